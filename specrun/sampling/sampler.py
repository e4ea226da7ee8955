"""From logits to a distribution, and from a distribution to a token. The only place where either happens.

Draws race exponentials: with E_v ~ Exp(1) for every token v, argmax p_v / E_v is distributed as p (the Gumbel-max
trick, Maddison et al., 2014). The E_v come from a counter-based generator keyed by (seed, purpose, position), so a
token depends on nothing but its request; draft and target racing against the same E agree as often as two
distributions can without talking to each other (at least (1 - TV) / (1 + TV); arXiv 2408.07978).
"""

from __future__ import annotations

import enum
import functools
import math
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from specrun.arguments import Checked, Limit, number, show, whole
from specrun.errors import BackendError, RequestError
from specrun.sampling.limits import MAX_BIASES

Floats = npt.NDArray[np.float32]

SEEDS = 1 << 64
"""Number of seeds."""
LARGEST_BIAS = 1000
"""The largest penalty or bias: beyond it logits would leave float32, or nothing would change any more."""

_BLOCK, _FEW = 64, 1024
"""Vocabularies are large and what is looked for is among few tokens: values of a block, tokens that are looked at."""

NON_FINITE_LOGITS = "an engine's logits are not numbers (NaN or infinite); the model overflows its dtype, or is damaged"


class Purpose(enum.IntEnum):
    """What random numbers are for; different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


_TEMPERATURE = Limit("0 (greedy) or a positive number", lambda value: 0 <= value < math.inf)
_TOP_K = Limit("0 (off) or a positive number", lambda value: value >= 0)
_TOP_P = Limit("more than 0 and at most 1 (off)", lambda value: 0 < value <= 1)
_MIN_P = Limit("0 (off) to 1", lambda value: 0 <= value <= 1)
_SEED = Limit("0 to 2**64 - 1", lambda value: 0 <= value < SEEDS)
_FACTOR = Limit(
    f"1 (off), or {1 / LARGEST_BIAS} to {LARGEST_BIAS}", lambda value: 1 / LARGEST_BIAS <= value <= LARGEST_BIAS
)
_SUMMAND = Limit(f"0 (off), or -{LARGEST_BIAS} to {LARGEST_BIAS}", lambda value: abs(value) <= LARGEST_BIAS)


def _biases(name: str, biases: Any) -> dict[int, float]:
    """A ``logit_bias``. Raises RequestError."""
    if not isinstance(biases, Mapping):
        raise RequestError(f"{name} {show(biases)}: expected token ids and numbers")
    if len(biases) > MAX_BIASES:
        raise RequestError(f"{name}: {len(biases)} tokens, expected at most {MAX_BIASES}")
    checked = {whole(name, token): number(f"{name} {token}", bias) for token, bias in biases.items()}
    for token, bias in checked.items():
        if token < 0 or not (abs(bias) <= LARGEST_BIAS or bias == -math.inf):
            raise RequestError(
                f"{name} {token}: {bias}: expected a token id, and -{LARGEST_BIAS} to {LARGEST_BIAS} or -inf"
            )
    return checked


class SamplingKeywords(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keywords, for type checkers and editors; a test compares the two."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How one request chooses tokens; see ``probabilities`` and ``apply_penalties``.

    Raises RequestError, naming the parameter, for values of the wrong type and such that mean nothing.
    """

    temperature: Annotated[float, _TEMPERATURE] = 0.0
    """0: greedy, the likeliest token every time."""
    top_k: Annotated[int, _TOP_K] = 0
    """Keep the k likeliest tokens; 0: off."""
    top_p: Annotated[float, _TOP_P] = 1.0
    """Keep the likeliest tokens that have this mass together; 1: off."""
    seed: Annotated[int, _SEED] | None = None
    """The same seed gives the same text. Default: a new one, which is shown.

    From Python each request draws its own; ``request.params.seed`` tells it."""
    min_p: Annotated[float, _MIN_P] = 0.0
    """Keep tokens at least so many times as likely as the likeliest; 0: off."""
    repetition_penalty: Annotated[float, _FACTOR] = 1.0
    """Penalty of every token of prompt and output; 1: off."""
    presence_penalty: Annotated[float, _SUMMAND] = 0.0
    """Penalty of every token of the output; 0: off."""
    frequency_penalty: Annotated[float, _SUMMAND] = 0.0
    """Penalty of every token, times its count in the output; 0: off."""
    logit_bias: Annotated[Mapping[int, float], _biases] = field(default_factory=dict)
    """Numbers to add to these tokens' logits; -inf forbids a token."""

    def seeded(self, offset: int = 0) -> SamplingParams:
        """The same with a seed: its own plus ``offset``; a new one where it has none, or 0 where greedy needs none."""
        seed = self.seed
        if seed is None:
            seed = 0 if self.greedy else secrets.randbits(32)
        seed = (seed + offset) % SEEDS
        return self if seed == self.seed else replace(self, seed=seed)

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot at the largest logit."""
        return self.temperature == 0

    @property
    def has_logits_processors(self) -> bool:
        """Whether logits are changed before they become a distribution."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens of the text change logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def probabilities(logits: Floats, params: SamplingParams) -> Floats:
    """The distribution that tokens are drawn from: logits [V] -> float32 [V], which sum to 1.

    Temperature, then min-p (tokens at least min_p times as likely as the likeliest), then top-k, then top-p (the
    smallest set of most likely tokens whose mass reaches top_p). Tokens that tie with the last one kept are kept too,
    so the result does not depend on their order.
    Raises BackendError where the largest logit is not a finite number.
    """
    kept = _weights(logits, params)
    kept /= kept.sum()
    return kept


def largest_probability(logits: Floats) -> float:
    """The largest probability of a token at temperature 1: logits [V]."""
    weights: Floats = logits - logits.max()
    np.exp(weights, out=weights)
    return float(1 / weights.sum())


def _weights(logits: Floats, params: SamplingParams) -> Floats:
    """``probabilities``, but that they need not sum to 1."""
    best = _likeliest(logits)
    if params.greedy:
        hot = np.zeros_like(logits)
        hot[best] = 1
        return hot
    # Kept within float32, where smaller ones would be 0 and larger ones infinite.
    temperature = np.float32(min(max(params.temperature, 1e-37), 1e38))
    with np.errstate(over="ignore"):  # Far below the best token, -inf is right.
        weights: Floats = logits - logits[best]
        weights /= temperature
    np.exp(weights, out=weights)
    if params.min_p > 0:
        weights *= weights >= np.float32(params.min_p)
    if 0 < params.top_k < len(logits):
        weights *= weights >= _kth_largest(weights, params.top_k)
    if params.top_p < 1:
        weights /= weights.sum()
        weights *= weights >= _least_of_mass(weights, params.top_p)
    return weights


def _kth_largest(values: Floats, k: int) -> float:
    """The k-th largest of values [V], k of 1 to V."""
    # At least k values are as large as the k-th largest of the blocks' largest ones; the others need not be looked at.
    block = min(_BLOCK, len(values) // (2 * k))
    if block > 1:
        largest = values[: len(values) // block * block].reshape(block, -1).max(0)
        values = values.compress(values >= np.partition(largest, -k)[-k])
    return float(np.partition(values, -k)[-k])


def _least_of_mass(probs: Floats, mass: float) -> float:
    """The least likely of the fewest most likely tokens of probs [V] that have ``mass`` together."""
    # Sorting 100,000 tokens takes milliseconds. Those below half of an even share of what is to be cut off are never
    # needed, and mostly a few have the mass.
    few = probs = probs.compress(probs >= (1 - mass) / (2 * len(probs)))
    if len(probs) > _FEW:
        few = probs.compress(probs >= _kth_largest(probs, _FEW))
        if few.sum(dtype=np.float64) < mass:
            few = probs
    descending = np.sort(few)[::-1]
    reached = int(descending.astype(np.float64).cumsum().searchsorted(mass))
    return float(descending[min(reached, len(few) - 1)])


def whole_nan(logits: Floats) -> Floats:
    """The logits [V]; NaN in all places where the first one is.

    Our own CPU products write no more of a row of NaN than the first number. What moves or hides single logits asks for
    this before.
    """
    return np.full_like(logits, np.nan) if math.isnan(logits[0]) else logits


def _likeliest(logits: Floats) -> int:
    """The first largest of logits [V]. Raises BackendError where it is not a finite number."""
    best = int(logits.argmax())  # The first NaN, where there is one.
    if not math.isfinite(logits[best]):
        raise BackendError(NON_FINITE_LOGITS)
    return best


@functools.lru_cache(maxsize=64)
def exponential_noise(seed: int | None, purpose: Purpose, position: int, size: int) -> Floats:
    """``size`` draws of Exp(1) as float32, fixed by (seed, purpose, position).

    Philox4x64-10 (Salmon et al., 2011) with key (seed, purpose) and counter (1, position, 0, 0) upwards; each 64-bit
    word gives two 32-bit integers n, low half first, and E = -log1p(-(n + 0.5) / 2**32), at most 24 log 2.
    The last ones are kept, because the target races against the noise that the draft has just raced against.
    Raises ValueError for None: a request's parameters always have a seed.
    """
    words = _words(seed, purpose, position, (size + 1) // 2)
    noise = words.view(np.uint32)[:size].astype(np.float32)
    noise += 0.5
    noise *= -(2**-32)
    np.maximum(noise, 2**-24 - 1, out=noise)  # (n + 0.5) / 2**32 may round up to 1.
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    noise.flags.writeable = False
    return noise


def uniform(seed: int | None, purpose: Purpose, position: int) -> float:
    """One draw from [0, 1) with 53 bits, fixed by (seed, purpose, position). Raises as ``exponential_noise``."""
    return float(_words(seed, purpose, position, 1)[0] >> np.uint64(11)) * 2.0**-53


_own = threading.local()


def _words(seed: int | None, purpose: Purpose, position: int, count: int) -> npt.NDArray[np.uint64]:
    if seed is None:
        raise ValueError("the sampling parameters have no seed; see SamplingParams.seeded")
    # A generator for each thread, set to its place: making one takes longer than drawing from it.
    if not hasattr(_own, "generator"):
        _own.generator = np.random.Philox(0)
    _own.generator.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": (0, position, 0, 0),
            "key": (seed, purpose),
        },
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    words: npt.NDArray[np.uint64] = _own.generator.random_raw(count)
    return words


def gumbel_argmax(probs: Floats, noise: Floats) -> int:
    """The token drawn from ``probs`` [V] (any scale) by ``noise`` [V]: argmax p / E."""
    return int((probs / noise).argmax())


class TokenLogprob(NamedTuple):
    """How likely a token was to the target itself: temperature 1, nothing cut off, no penalties."""

    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens and their log-probabilities, as many as were asked for and are possible at all.

    Of equals the smaller id comes first.
    """


def log_probability(logits: Floats, token: int, top: int) -> TokenLogprob:
    """Log-softmax of one row [V]: of ``token``, and of the ``top`` likeliest tokens; NaN where a logit is."""
    if not math.isfinite(best := logits.max()):
        return TokenLogprob(math.nan, [])
    with np.errstate(over="ignore"):  # Far below the best token, -inf is right.
        total = float(best) + math.log(np.exp(logits - best).sum(dtype=np.float64))
    few = np.flatnonzero(logits >= _kth_largest(logits, min(top, len(logits)))) if top else np.zeros(0, np.int64)
    likeliest = few[np.argsort(-logits[few], kind="stable")[:top]].tolist()
    return TokenLogprob(
        float(logits[token]) - total,
        [(other, float(logits[other]) - total) for other in likeliest if logits[other] > -np.inf],
    )


def sample(logits: Floats, params: SamplingParams, position: int, purpose: Purpose = Purpose.TARGET) -> int:
    """The token a model chooses at ``position``: logits [V] -> id. Raises BackendError as ``probabilities``."""
    if params.greedy:
        return _likeliest(logits)
    return gumbel_argmax(_weights(logits, params), exponential_noise(params.seed, purpose, position, len(logits)))
