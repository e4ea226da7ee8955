"""The kernels' arithmetic against numpy: their host build, or on a GPU (see ``kernel_device``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.acceptance import accept_logits
from specrun.kernels import MAX_VOCAB, THREADS, compile_cubin
from specrun.rounds.device import DISTRIBUTION, PROGRESS, SAMPLING
from specrun.sampling import Floats, Purpose, SamplingParams, exponentials, probabilities, race, uniform
from tests.host_device import call
from tests.tables import normal

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]

PARAMS = [
    SamplingParams(1.0, seed=1),
    SamplingParams(0.3, seed=2),
    SamplingParams(0.9, top_k=40, seed=3),
    SamplingParams(1.3, top_p=0.9, seed=4),
    SamplingParams(0.8, top_k=50, top_p=0.5, seed=(1 << 64) - 1),
    SamplingParams(1.0, top_k=1, seed=5),
    SamplingParams(1.0, top_p=1e-9, seed=6),
    SamplingParams(1e-30, seed=7),
    SamplingParams(1.0, min_p=0.05, seed=9),
    SamplingParams(1.1, top_k=30, top_p=0.7, min_p=0.02, seed=10),
    SamplingParams(1e30, top_k=3, seed=8),
]


def rows() -> dict[str, Floats]:
    """Random and adversarial logits."""
    wide = normal(1, 50_257, scale=3)
    masked = normal(2, 1000)
    masked[::3] = -np.inf
    one_hot = np.full(777, -np.inf, np.float32)
    one_hot[500] = 3
    return {
        "narrow": normal(3, 5),
        "one": normal(4, 1),
        "odd": normal(5, 1001, scale=2),
        "wide": wide,
        "largest": normal(6, 262_144, scale=4),
        "all equal": np.zeros(300, np.float32),
        "ties": np.repeat(normal(7, 25), 8).astype(np.float32),
        "minus infinity": masked,
        "one-hot": one_hot,
        "far apart": np.array([88, -1e4, 87.5, 3e38, -3e38, 0], np.float32)[[0, 1, 2, 5, 5]],
        "subnormal weights": np.array([0, -90, -95, -100, -103, -104, -1], np.float32),
        "subnormal logits": np.array([1e-40, -1e-42, 0, -0.0, 5e-45], np.float32),
    }


def state(params: SamplingParams, length: int, remaining: int) -> tuple[Any, Any]:
    values = (params.seed, params.top_p, params.temperature, params.top_k, params.min_p, 0)
    sampling = np.array([values], SAMPLING)
    return sampling, np.array([(length, remaining)], PROGRESS)


def describe(logits: Floats, params: SamplingParams) -> Any:
    """The kernel's distribution of one row."""
    sampling, progress = state(params, 7, 1)
    found = np.zeros(1, DISTRIBUTION)
    call("describe_target", (1, 1), logits, len(logits), sampling, progress, 0, found)
    return found[0]


def choose(logits: Floats, params: SamplingParams, position: int) -> int:
    """The kernel's token at ``position``."""
    sampling, progress = state(params, position, 1)
    found = np.full(1, -7, np.int32)
    call("choose_target", (1, 1), logits, len(logits), sampling, progress, 0, found)
    return int(found[0])


def weights(d: Any, logits: Floats) -> Floats:
    """What a kernel's distribution says of its logits."""
    with np.errstate(over="ignore"):
        raw = np.exp((logits - d["peak"]) / d["temperature"], dtype=np.float32)
    # numpy's exp and the compiler's differ in the last bit; what is at the cut is in.
    return np.where(raw >= d["smallest"] * np.float32(1 - 1e-6), raw / d["total"], 0)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("name", rows())
def test_distribution_is_numpys(name: str, params: SamplingParams) -> None:
    logits = rows()[name]
    expected, found = probabilities(logits, params), weights(describe(logits, params), logits)
    # A weight within rounding of a cut may fall on either side of it.
    apart = (expected > 0) != (found > 0)
    assert apart.sum() <= 1e-4 * len(logits) or not apart.any()
    np.testing.assert_allclose(found[~apart], expected[~apart], rtol=2e-5 if not apart.any() else 1e-3, atol=1e-37)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("name", rows())
def test_choice_is_numpys(name: str, params: SamplingParams) -> None:
    """The same token for the same seed and position, unless two race within rounding of each other."""
    logits = rows()[name]
    probs = probabilities(logits, params)
    for position in (1, 2, 1000):
        noise = exponentials(params.seed, Purpose.TARGET, position, len(logits))
        expected, found = race(probs, noise), choose(logits, params, position)
        score = probs / noise
        assert expected == found or score[found] >= score[expected] * (1 - 1e-5)


@pytest.mark.parametrize("name", rows())
def test_greedy_is_the_first_of_the_largest(name: str) -> None:
    logits = rows()[name]
    assert choose(logits, SamplingParams(), 5) == int(logits.argmax())


@pytest.mark.parametrize("params", [SamplingParams(), *PARAMS[:5]], ids=str)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 77, 999])
def test_what_is_not_a_number_is_no_token(params: SamplingParams, bad: float, place: int) -> None:
    logits = normal(9, 1000)
    logits[place] = bad
    assert choose(logits, params, 3) == -1
    assert choose(np.full(9, -np.inf, np.float32), params, 3) == -1


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("params", PARAMS[:6], ids=str)
def test_rejection_sampling_is_numpys(params: SamplingParams, same: bool) -> None:
    """Every way a round can end: rejected at each place, everything accepted, p equal to q."""
    g, vocab, draft_vocab = 3, 1000, 900
    ends = set()
    for case in range(12):
        target = normal(20 + case, g + 1, vocab, scale=2)
        draft = target[:g, :draft_vocab] + (0 if same else normal(50 + case, g, draft_vocab, scale=0.5))
        draft = np.ascontiguousarray(draft, np.float32)
        length = 5 + case
        q = np.zeros((g, vocab), np.float32)
        q[:, :draft_vocab] = probabilities(draft, params)
        noise = [exponentials(params.seed, Purpose.DRAFT, length + i, draft_vocab) for i in range(g)]
        drafts = [race(q[i, :draft_vocab], noise[i]) for i in range(g)]
        p = probabilities(target, params)
        uniforms = [uniform(params.seed, Purpose.ACCEPT, length + i) for i in range(g)]
        accepted, remainder = accept_logits(drafts, q, p, uniforms)
        last = exponentials(params.seed, Purpose.TARGET, length + accepted, vocab)

        record, tokens, progress = accept(params, length, drafts, draft, target)
        assert list(record[:2]) == [g, accepted]
        score = remainder / last
        # Where hardly anything is left over, p - q is rounding, and so is which token is drawn from it.
        if remainder.sum() > 1e-3:
            assert score[record[2]] >= score.max() * (1 - 1e-3)
        assert list(record[3:]) == drafts
        assert tokens[length + accepted] == record[2]
        assert tuple(progress[0]) == (length + accepted + 1, 20 - accepted - 1)
        ends.add(accepted)
    assert len(ends) > 1 or same or params.top_k == 1


def accept(params: SamplingParams, length: int, drafts: list[int], draft: Floats, target: Floats) -> tuple[Any, ...]:
    g, vocab = len(drafts), target.shape[-1]
    sampling, progress = state(params, length, 20)
    tokens = np.zeros((1, 64), np.int64)
    tokens[0, length : length + g] = drafts
    q = np.array([describe(row, params) for row in draft], DISTRIBUTION)
    p = np.array([describe(row, params) for row in target], DISTRIBUTION)
    stop_ids, record = np.full(1, -1, np.int64), np.zeros(3 + g, np.int64)
    draft_vocab = draft.shape[-1]
    own = (q, draft, draft_vocab, draft_vocab, draft_vocab)
    call("accept_logits", (1, 1), tokens, 64, progress, g, *own, p, target, vocab, sampling, stop_ids, 1, record)
    return record, tokens[0], progress


@pytest.mark.parametrize("remaining, stop, kept", [(9, 99, 3), (2, 99, 2), (9, 12, 2), (9, 11, 1), (1, 99, 1)])
def test_commit_ends_where_the_text_ends(remaining: int, stop: int, kept: int) -> None:
    """Two of three drafts stand; the row ends at a stop id or where nothing remains."""
    tokens = np.array([[5, 11, 12, 77, 0, 0]], np.int64)
    progress = np.array([(1, remaining)], PROGRESS)
    chosen = np.array([11, 12, 13, 14], np.int32)
    stop_ids, record = np.array([98, stop], np.int64), np.zeros(6, np.int64)
    call("accept_tokens", (1, 1), tokens, 6, progress, 3, chosen, stop_ids, 2, record)
    assert progress[0]["length"] == 1 + kept
    ended = stop in (11, 12) or kept == remaining
    assert progress[0]["remaining"] == (0 if ended else remaining - kept)
    drafted = min(3, remaining - 1)
    assert (
        list(record[: 3 + drafted])
        == [drafted, min(2, drafted), [11, 12, 13][min(2, drafted)], 11, 12, 77][: 3 + drafted]
    )


def test_a_row_that_has_ended_stays_as_it_is() -> None:
    tokens = np.array([[5, 11, 12, 77, 0, 0]], np.int64)
    progress = np.array([(3, 0)], PROGRESS)
    before, record = tokens.copy(), np.zeros(6, np.int64)
    chosen, stop_ids = np.zeros(4, np.int32), np.zeros(1, np.int64)
    call("accept_tokens", (1, 1), tokens, 6, progress, 3, chosen, stop_ids, 0, record)
    assert (tokens == before).all()
    assert tuple(progress[0]) == (3, 0)


def test_the_largest_vocabulary_does_not_overflow() -> None:
    """All weights are 1: their masses add up to the most there can be."""
    d = describe(np.zeros(MAX_VOCAB, np.float32), SamplingParams(1.0, top_p=0.999))
    assert d["total"] == MAX_VOCAB


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_gpus(architecture: str) -> None:
    """With NVRTC, which needs no GPU; every kernel is in the binary."""
    pytest.importorskip("cuda.core")
    cubin = bytes(compile_cubin(architecture).code)
    assert cubin[:4] == b"\x7fELF"
    for kernel in THREADS:
        assert kernel.encode() + b"\0" in cubin
