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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from specrun.arguments import Checked, Limit, between, number, show, whole
from specrun.errors import BackendError, RequestError
from specrun.sampling.limits import MAX_BIASES
from specrun.sampling.truncation import Floats as Floats
from specrun.sampling.truncation import kth_largest, least_of_mass, typical, within_sigmas, without_top_choices

SEEDS = 1 << 64
"""Number of seeds."""
LARGEST_BIAS = 1000
"""The largest penalty or bias: beyond it logits would leave float32, or nothing would change any more."""

NON_FINITE_LOGITS = "an engine's logits are not numbers (NaN or infinite); the model overflows its dtype, or is damaged"


class Purpose(enum.IntEnum):
    """What random numbers are for; different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    XTC = 3


_TEMPERATURE = Limit("0 (greedy) or a positive number", lambda value: 0 <= value < math.inf)
_TOP_K = Limit("0 (off) or a positive number", lambda value: value >= 0)
_TOP_P = Limit("more than 0 and at most 1 (off)", lambda value: 0 < value <= 1)
_MIN_P = Limit("0 (off) to 1", lambda value: 0 <= value <= 1)
_SHARE = Limit("0 to 1", lambda value: 0 <= value <= 1)
_SIGMAS = Limit("0 (off) or a positive number", lambda value: 0 <= value < math.inf)
_MULTIPLIER = Limit(f"0 (off) to {LARGEST_BIAS}", lambda value: 0 <= value <= LARGEST_BIAS)
_WINDOW = Limit("-1 (the whole text) or more", lambda value: value >= -1)
_FEW = Limit("at most 16 texts", lambda value: len(value) <= 16)
_BASE = Limit("1 to 100", lambda value: 1 <= value <= 100)
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
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: str | Sequence[str]
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
    repeat_last_n: Annotated[int, _WINDOW] = -1
    """Last tokens of the text that ``repetition_penalty`` looks at; -1: all."""
    presence_penalty: Annotated[float, _SUMMAND] = 0.0
    """Penalty of every token of the output; 0: off."""
    frequency_penalty: Annotated[float, _SUMMAND] = 0.0
    """Penalty of every token, times its count in the output; 0: off."""
    top_n_sigma: Annotated[float, _SIGMAS] = 0.0
    """Keep tokens whose logits are at most so many standard deviations below the largest; 0: off."""
    typical_p: Annotated[float, _TOP_P] = 1.0
    """Keep the tokens nearest to the entropy that have this mass together (locally typical); 1: off."""
    xtc_probability: Annotated[float, _MIN_P] = 0.0
    """Chance that XTC takes the likeliest tokens away; 0: off."""
    xtc_threshold: Annotated[float, _SHARE] = 0.1
    """Probability of the tokens that XTC takes away, but for the least likely of them."""
    dry_multiplier: Annotated[float, _MULTIPLIER] = 0.0
    """DRY's penalty of a token that continues a repetition of dry_allowed_length tokens; 0: off."""
    dry_base: Annotated[float, _BASE] = 1.75
    """Factor of DRY's penalty for every further token of the repetition."""
    dry_allowed_length: Annotated[int, between(1, 1000)] = 2
    """Longest repetition in tokens that DRY lets go on."""
    dry_sequence_breakers: Annotated[str | Sequence[str], _FEW] = ("\n", ":", '"', "*")
    """Texts whose tokens end a repetition for DRY."""
    logit_bias: Annotated[Mapping[int, float], _biases] = field(default_factory=dict)
    """Numbers to add to these tokens' logits; -inf forbids a token."""

    def seeded(self, offset: int = 0) -> SamplingParams:
        """The same with a seed: its own plus ``offset``; a new one where it has none, or 0 where greedy needs none."""
        seed = self.seed
        if seed is None:
            seed = 0 if self.greedy else secrets.randbits(32)
        seed = (seed + offset) % SEEDS
        return self if seed == self.seed else replace(self, seed=seed)

    def at(self, position: int) -> SamplingParams:
        """The same where XTC's chance is decided for ``position``, by the seed: draft and target decide alike."""
        if self.greedy or self.xtc_probability in (0, 1):
            return self
        return replace(self, xtc_probability=float(uniform(self.seed, Purpose.XTC, position) < self.xtc_probability))

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
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.dry_multiplier
        return penalties != (1, 0, 0, 0)

    @property
    def of_hosts(self) -> str | None:
        """The first field that is set and that no kernel for GPUs knows; None: there is none."""
        fields = {
            "repeat_last_n": self.repeat_last_n != -1 and self.repetition_penalty != 1,
            "dry_multiplier": self.dry_multiplier > 0,
            "top_n_sigma": self.top_n_sigma > 0 and not self.greedy,
            "typical_p": self.typical_p < 1 and not self.greedy,
            "xtc_probability": self.xtc_probability > 0 and not self.greedy,
        }
        return next((name for name, is_set in fields.items() if is_set), None)


def probabilities(logits: Floats, params: SamplingParams) -> Floats:
    """The distribution that tokens are drawn from: logits [V] -> float32 [V], which sum to 1.

    Temperature and top-n-sigma, then min-p (tokens at least min_p times as likely as the likeliest), then top-k, then
    typical-p, then top-p (the smallest set of most likely tokens whose mass reaches top_p), then XTC, which
    ``params.at`` has decided. Tokens that tie with the last one kept are kept too, so the result does not depend on
    their order.
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
    near = within_sigmas(weights, params.top_n_sigma) if params.top_n_sigma > 0 else None
    np.exp(weights, out=weights)
    if near is not None:
        weights *= near
    if params.min_p > 0:
        weights *= weights >= np.float32(params.min_p)
    if 0 < params.top_k < len(logits):
        weights *= weights >= kth_largest(weights, params.top_k)
    if params.typical_p < 1:
        weights /= weights.sum()
        weights *= typical(weights, params.typical_p)
    if params.top_p < 1:
        weights /= weights.sum()
        weights *= weights >= least_of_mass(weights, params.top_p)
    if params.xtc_probability > 0:
        if params.xtc_probability < 1:
            raise ValueError("XTC is not decided yet; see SamplingParams.at")
        weights /= weights.sum()
        weights *= without_top_choices(weights, params.xtc_threshold)
    return weights


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


_thread = threading.local()


def _words(seed: int | None, purpose: Purpose, position: int, count: int) -> npt.NDArray[np.uint64]:
    if seed is None:
        raise ValueError("the sampling parameters have no seed; see SamplingParams.seeded")
    # A generator for each thread, set to its place: making one takes longer than drawing from it.
    if not hasattr(_thread, "generator"):
        _thread.generator = np.random.Philox(0)
    _thread.generator.state = {
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
    words: npt.NDArray[np.uint64] = _thread.generator.random_raw(count)
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
    few = np.flatnonzero(logits >= kth_largest(logits, min(top, len(logits)))) if top else np.zeros(0, np.int64)
    likeliest = few[np.argsort(-logits[few], kind="stable")[:top]].tolist()
    return TokenLogprob(
        float(logits[token]) - total,
        [(other, float(logits[other]) - total) for other in likeliest if logits[other] > -np.inf],
    )


def sample(logits: Floats, params: SamplingParams, position: int, purpose: Purpose = Purpose.TARGET) -> int:
    """The token a model chooses at ``position``: logits [V] -> id. Raises BackendError as ``probabilities``."""
    if params.greedy:
        return _likeliest(logits)
    return gumbel_argmax(
        _weights(logits, params.at(position)), exponential_noise(params.seed, purpose, position, len(logits))
    )
