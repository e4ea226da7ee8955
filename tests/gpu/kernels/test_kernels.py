"""The kernels' arithmetic against numpy: their host build, or on a GPU (see ``kernel_device``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specrun.devices.cuda import compile_kernels
from specrun.gpu.kernels import THREADS, calls, source
from specrun.gpu.kernels.layout import DISTRIBUTION, IN_PROMPT, MAX_VOCAB, PROGRESS, SAMPLING, TOKEN_VALUE, record_len
from specrun.sampling.acceptance import accept_logits, accept_tokens
from specrun.sampling.limits import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_IDS
from specrun.sampling.penalties import TokenCounts, apply_penalties
from specrun.sampling.sampler import (
    Floats,
    Purpose,
    SamplingParams,
    exponential_noise,
    gumbel_argmax,
    log_probability,
    probabilities,
    sample,
    uniform,
)
from tests.helpers.host_device import call, kernel_device
from tests.helpers.tables import normal

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
    SamplingParams(1.2, top_k=500, min_p=0.1, seed=11),
    SamplingParams(1e30, top_k=3, seed=8),
]


@functools.cache
def rows() -> dict[str, Floats]:
    """Random and adversarial logits. Tests read them and write to none."""
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


def sampling_of(params: SamplingParams, **more: int) -> Any:
    """One row of SAMPLING; ``more`` is what is not a sampling parameter."""
    row = np.zeros(1, SAMPLING)
    values = {
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "biases": len(params.logit_bias),
        "draft_len": 99,
        "logprobs": -1,
        "seed": params.seed or 0,
    }
    for name in ("top_p", "temperature", "top_k", "min_p"):
        values[name] = getattr(params, name)
    for name, value in (values | more).items():
        row[name] = value
    return row


def progress_of(length: int, remaining: int) -> Any:
    return np.array([(length, remaining)], PROGRESS)


def judge(logits: Floats, params: SamplingParams, position: int, use_logits: int = 1) -> tuple[Any, int]:
    """The kernel's distribution of one row, and its token at ``position``."""
    found, chosen = np.zeros(1, DISTRIBUTION), np.full(1, -7, np.int32)
    state = {"progress": progress_of(position, 1), "sampling": sampling_of(params, use_logits=use_logits)}
    row = logits[None, None]
    call(calls.sample_target, state, logits=row, adjusted=row, distributions=found, chosen=chosen)
    return found[0], int(chosen[0])


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
    expected, found = probabilities(logits, params), weights(judge(logits, params, 7)[0], logits)
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
        noise = exponential_noise(params.seed, Purpose.TARGET, position, len(logits))
        # Rows that compare tokens draw from weights, the others from probabilities.
        expected, found = gumbel_argmax(probs, noise), judge(logits, params, position, use_logits=position % 2)[1]
        score = probs / noise
        assert expected == found or score[found] >= score[expected] * (1 - 1e-5)


@pytest.mark.parametrize("name", rows())
def test_greedy_is_the_first_of_the_largest(name: str) -> None:
    logits = rows()[name]
    assert judge(logits, SamplingParams(), 5)[1] == int(logits.argmax())


@pytest.mark.parametrize("params", [SamplingParams(), *PARAMS[:5]], ids=str)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 77, 999])
def test_what_is_not_a_number_is_no_token(params: SamplingParams, bad: float, place: int) -> None:
    logits = normal(9, 1000)
    logits[place] = bad
    assert judge(logits, params, 3)[1] == -1
    assert judge(np.full(9, -np.inf, np.float32), params, 3)[1] == -1


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
        q[:, :draft_vocab] = [probabilities(row, params) for row in draft]
        noise = [exponential_noise(params.seed, Purpose.DRAFT, length + i, draft_vocab) for i in range(g)]
        drafts = [gumbel_argmax(q[i, :draft_vocab], noise[i]) for i in range(g)]
        p = [probabilities(row, params) for row in target]
        uniforms = [uniform(params.seed, Purpose.ACCEPT, length + i) for i in range(g)]
        accepted, remainder = accept_logits(drafts, q, p, uniforms)
        last = exponential_noise(params.seed, Purpose.TARGET, length + accepted, vocab)

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
    g = len(drafts)
    progress = progress_of(length, 20)
    tokens = np.zeros((1, 64), np.int64)
    tokens[0, length : length + g] = drafts
    q = np.array([judge(row, params, length)[0] for row in draft], DISTRIBUTION)
    judged = [judge(row, params, length + i) for i, row in enumerate(target)]
    p, chosen = np.array([d for d, _ in judged], DISTRIBUTION), np.array([token for _, token in judged], np.int32)
    record = np.zeros((1, record_len(g)), np.int64)
    call(
        calls.accept,
        state_of(tokens, progress, sampling_of(params, use_logits=1)),
        q=q,
        draft_logits=draft,
        step_stride=draft.shape[-1],
        draft_stride=draft.shape[-1],
        draft_vocab=draft.shape[-1],
        p=p,
        chosen=chosen,
        target_logits=target[None],
        adjusted=target[None],
        records=record,
    )
    return record[0], tokens[0], progress


def state_of(tokens: Any, progress: Any, sampling: Any, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """One row without penalties, as the kernels see it."""
    stops = np.zeros((1, MAX_STOP_IDS), np.int64)
    stops[0, : len(stop_ids)] = stop_ids
    nothing = np.zeros((1, 1), np.uint32)
    return {"tokens": tokens, "progress": progress, "sampling": sampling, "stop_ids": stops, "counts": nothing}


def commit(progress: Any, tokens: Any, chosen: list[int], stop_ids: list[int], record: Any) -> None:
    """``accept`` where tokens are compared: it reads no logits."""
    nothing, none = np.zeros(1, DISTRIBUTION), np.zeros((1, len(chosen), 1), np.float32)
    call(
        calls.accept,
        state_of(tokens, progress, sampling_of(SamplingParams(), stops=len(stop_ids)), stop_ids),
        q=nothing,
        draft_logits=none,
        **dict.fromkeys(("step_stride", "draft_stride", "draft_vocab"), 1),
        p=nothing,
        chosen=np.array(chosen, np.int32),
        target_logits=none,
        adjusted=none,
        records=record[None],
    )


@pytest.mark.parametrize("remaining, stop, kept", [(9, 99, 3), (2, 99, 2), (9, 12, 2), (9, 11, 1), (1, 99, 1)])
def test_commit_ends_where_the_text_ends(remaining: int, stop: int, kept: int) -> None:
    """Two of three drafts stand; the row ends at a stop id or where nothing remains."""
    tokens = np.array([[5, 11, 12, 77, 0, 0]], np.int64)
    progress = np.array([(1, remaining)], PROGRESS)
    record = np.zeros(6, np.int64)
    commit(progress, tokens, [11, 12, 13, 14], [98, stop], record)
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
    commit(progress, tokens, [0] * 4, [], record)
    assert (tokens == before).all()
    assert tuple(progress[0]) == (3, 0)
    assert list(record[:3]) == [0, 0, -1]


ADJUSTED = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, presence_penalty=-0.4),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.3),
    SamplingParams(frequency_penalty=-0.1, logit_bias={7: 2.5, 3: -np.inf, 400: -100, 5000: 1}),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.7, logit_bias={11: 1e-3}),
    SamplingParams(logit_bias={v: v / 7 - 20 for v in range(3 * MAX_BIASES, 0, -3)}),
]


@dataclass
class Row:
    """A row in the middle of its text, and what the models say of it."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    target: Floats
    draft: Floats
    use_logits: bool = False
    cap: int = 99
    remaining: int = 20
    stop_ids: list[int] = field(default_factory=list)
    min_output_len: int = 0
    fails_at: int | None = None
    """The draft step whose logits are not finite."""

    def adjusted(self, logits: Floats, drafts: Sequence[int]) -> Floats:
        output = [*self.output, *drafts]
        seen = functools.reduce(TokenCounts.add, output, TokenCounts.of(self.prompt))
        return apply_penalties(logits, self.params, seen, self.stop_ids if len(output) < self.min_output_len else ())

    def round(self, g: int) -> tuple[list[int], int, int]:
        """What numpy decides: the draft tokens, how many stand, and the token after them."""
        position, params = len(self.prompt) + len(self.output), self.params
        sampled, vocab = self.use_logits and not params.greedy, self.target.shape[1]
        drafts: list[int] = []
        q = np.zeros((g, vocab), np.float32)
        for i in range(max(0, min(g, self.cap, self.remaining - 1))):
            if i == self.fails_at:
                break
            logits = self.adjusted(self.draft[i], drafts)
            if sampled:
                q[i, : len(logits)] = probabilities(logits, params)
                drafts.append(gumbel_argmax(q[i], exponential_noise(params.seed, Purpose.DRAFT, position + i, vocab)))
            else:
                drafts.append(sample(logits, params, position + i))
        target = [self.adjusted(self.target[i], drafts[:i]) for i in range(len(drafts) + 1)]
        if not sampled:
            return drafts, *accept_tokens(drafts, [sample(p, params, position + i) for i, p in enumerate(target)])
        uniforms = [uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(drafts))]
        p = [probabilities(logits, params) for logits in target]
        accepted, weights = accept_logits(drafts, q[: len(drafts)], p, uniforms)
        return (
            drafts,
            accepted,
            gumbel_argmax(weights, exponential_noise(params.seed, Purpose.TARGET, position + accepted, vocab)),
        )


def table(batch: Sequence[Row], width: int) -> dict[str, Any]:
    """The rows as the kernels see them."""
    vocab = batch[0].target.shape[1]
    found: dict[str, npt.NDArray[Any]] = {
        "tokens": np.zeros((len(batch), width), np.int64),
        "progress": np.zeros(len(batch), PROGRESS),
        "sampling": np.zeros(len(batch), SAMPLING),
        "counts": np.zeros((len(batch), vocab), np.uint32),
        "biases": np.zeros((len(batch), MAX_BIASES), TOKEN_VALUE),
        "stop_ids": np.zeros((len(batch), MAX_STOP_IDS), np.int64),
    }
    for i, row in enumerate(batch):
        text = row.prompt + row.output
        found["tokens"][i, : len(text)] = text
        found["progress"][i] = (len(text), row.remaining)
        found["sampling"][i] = sampling_of(
            row.params,
            use_logits=row.use_logits,
            draft_len=row.cap,
            stops=len(row.stop_ids),
            free_length=len(row.prompt) + row.min_output_len,
        )
        np.add.at(found["counts"][i], row.output, 1)
        found["counts"][i, row.prompt] |= IN_PROMPT
        found["biases"][i, : len(row.params.logit_bias)] = [*row.params.logit_bias.items()]
        found["stop_ids"][i, : len(row.stop_ids)] = row.stop_ids
    return found


def adjust_all(logits: Any, vocab: int, first: int, g: int, rows: dict[str, Any]) -> Any:
    """The kernel's adjusted logits [B, positions, stride]."""
    adjusted = logits.copy()  # Ids beyond ``vocab`` stay as they are, and rows that adjust nothing.
    call(calls.apply_penalties, rows, logits=logits, vocab=vocab, first=first, draft_len=g, adjusted=adjusted)
    return adjusted


def test_adjusted_logits_are_numpys() -> None:
    """To the last bit: texts and drafts that repeat themselves, stop ids that become free, a narrower draft."""
    g, vocab, narrow, stride = 4, 1000, 900, 950
    drafts = [7, 990, 7, 7]
    batch = []
    for i, params in enumerate(ADJUSTED):
        target, draft = normal(60 + i, g + 1, vocab, scale=3), normal(70 + i, g, stride, scale=3)
        for logits in (target, draft):
            logits[:, ::9] = np.resize(
                np.array([0, -0.0, -np.inf, 3e38, -3e38, 1e-42], np.float32), logits[:, ::9].shape
            )
        texts = np.random.default_rng(i).integers(0, 2 * i + 1, 60) * 83  # Row 0 knows one token only.
        prompt, output = texts[:30].tolist(), texts[30 : 30 + 10 * (i % 4)].tolist()
        own: dict[str, Any] = {"stop_ids": [11 + i, 920, 7], "min_output_len": len(output) + i % 6}
        batch.append(Row(params, prompt, output, target, draft, **own))
    rows = table(batch, 80)
    for i, row in enumerate(batch):
        start = len(row.prompt) + len(row.output)
        rows["tokens"][i, start : start + g] = drafts
    found = adjust_all(np.stack([row.target for row in batch]), vocab, 0, g, rows)
    steps = [adjust_all(np.stack([row.draft[i : i + 1] for row in batch]), narrow, i, g, rows) for i in range(g)]
    with np.errstate(over="ignore"):
        for b, row in enumerate(batch):
            for i in range(g + 1):
                assert same_bits(found[b, i], row.adjusted(row.target[i], drafts[:i]))
            for i in range(g):
                assert same_bits(steps[i][b, 0, :narrow], row.adjusted(row.draft[i, :narrow], drafts[:i]))
                assert same_bits(steps[i][b, 0, narrow:], row.draft[i, narrow:])


def test_masked_logits_are_numpys() -> None:
    """Of constrained rows alone; a vocabulary that ends inside a word of the mask."""
    for vocab in (1, 31, 33, 5003):
        logits = normal(vocab, 3, 2, vocab)
        allowed = np.random.default_rng(vocab).random((3, 2, -(-vocab // 32) * 32)) < 0.5
        masks = np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)
        rows = {"sampling": np.concatenate([sampling_of(SamplingParams(), constrained=flag) for flag in (1, 0, 1)])}
        found = logits.copy()
        call(calls.apply_masks, rows, masks=masks, vocab=vocab, adjusted=found)
        expected = np.where(allowed[..., :vocab], logits, -np.inf)
        expected[1] = logits[1]
        assert same_bits(found, expected.astype(np.float32))


def test_markov_heads_are_numpys() -> None:
    """Of rows with texts of their own, in the first step and behind draft tokens; a draft that failed adds nothing."""
    generator = np.random.default_rng(4)
    vocab, rank, stride = 300, 24, 310
    w1, w2 = (generator.standard_normal(size).astype(np.float32) for size in ((vocab, rank), (rank, vocab)))
    tokens = generator.integers(0, vocab, (3, 12))
    tokens[2, 8] = -1
    rows = {"tokens": tokens, "progress": np.array([(4, 9), (6, 9), (7, 9)], PROGRESS)}
    for step in (0, 2):
        logits = generator.standard_normal((3, 1, stride)).astype(np.float32)
        found, expected = logits.copy(), logits.copy()
        call(calls.apply_markov, rows, logits=found, step=step, w1=w1, w2=w2)
        for row, (length, _) in enumerate(rows["progress"]):
            if (before := tokens[row, length + step - 1]) >= 0:
                expected[row, 0, :vocab] += w1[before] @ w2
        assert np.allclose(found, expected, atol=1e-4)
        assert (expected[2] == logits[2]).all() == (step == 2)


def same_bits(a: Floats, b: Floats) -> bool:
    return bool(((np.ascontiguousarray(a).view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def test_rounds_of_mixed_rows_are_numpys() -> None:
    """Rows that compare tokens, logits or nothing, adjusted or not, with caps and ends of their own, in one batch."""
    g, vocab, stride, narrow, width = 3, 600, 580, 560, 64
    warm, penalties = SamplingParams(0.9, top_k=50, seed=1), ADJUSTED[5]
    kinds: list[dict[str, Any]] = [
        {"params": warm},
        {"params": warm, "use_logits": True},
        {"params": SamplingParams(), "use_logits": True},
        {"params": replace(penalties, temperature=0.8), "use_logits": True, "cap": 2},
        {"params": replace(penalties, temperature=1.1)},
        {"params": penalties, "min_output_len": 12},
        {"params": warm, "use_logits": True, "remaining": 2},
        {"params": warm, "fails_at": 1},
        {"params": warm, "use_logits": True, "fails_at": 2},
        {"params": replace(penalties, temperature=0.8), "use_logits": True, "fails_at": 2},
        {"params": warm, "use_logits": True, "fails_at": 0},
        {"params": warm, "cap": 0},
        {"params": warm, "use_logits": True, "cap": 0},
        {"params": warm, "remaining": 0},
    ]
    ends: list[set[int]] = [set() for _ in kinds]
    stopped: set[int] = set()
    for case in range(8):
        batch = []
        for i, kind in enumerate(kinds):
            target = normal(1000 * case + i, g + 1, vocab, scale=2.5)
            draft = np.ascontiguousarray(target[:g, :stride] + normal(1000 * case + 500 + i, g, stride, scale=0.4))
            draft[:, narrow:] = 99  # Beyond the target's ids, if they were looked at.
            if "fails_at" in kind:
                draft[kind["fails_at"], 7] = np.nan
            text = np.random.default_rng(case).integers(0, 40, 30 + i).tolist()
            own = {**kind, "params": replace(kind["params"], seed=case)}
            # A token in ten is a stop id, another one in each row.
            stops = list(range(i, vocab, 10))
            batch.append(Row(prompt=text[:20], output=text[20:], target=target, draft=draft, stop_ids=stops, **own))
        found = play(batch, g, narrow, width)
        for i, row in enumerate(batch):
            if not row.remaining:
                assert list(found["records"][i, :3]) == [0, 0, -1]
                continue
            narrowed = replace(row, draft=row.draft[:, :narrow])
            drafts, accepted, next_token = narrowed.round(g)
            assert list(found["records"][i, : 3 + len(drafts)]) == [len(drafts), accepted, next_token, *drafts]
            committed = [*drafts[:accepted], next_token]
            last = next((at for at, token in enumerate(committed) if token in row.stop_ids), None)
            if last is not None:
                stopped.add(i)
                committed = committed[: last + 1]
                assert len(row.output) + last >= row.min_output_len
            after = replace(row, output=row.output + committed, remaining=row.remaining - len(committed))
            expected = table([after], width)
            assert found["progress"][i]["length"] == expected["progress"][0]["length"]
            assert found["progress"][i]["remaining"] == (after.remaining if last is None else 0)
            counted = row.params.repetition_penalty != 1  # Without penalties nobody needs the counts.
            assert (found["counts"][i] == (expected if counted else table([row], width))["counts"][0]).all()
            ends[i].add(accepted)
    assert [len(accepted) > 1 for accepted in ends] == [True] * 10 + [False] * 4
    assert len(stopped) > 4


def play(batch: Sequence[Row], g: int, narrow: int, width: int) -> dict[str, Any]:
    """A round made of the kernels, of which the draft's know ``narrow`` ids: the rows, and ``records``."""
    rows = table(batch, width)
    each = (len(batch), g + 1)
    q, p = np.zeros((len(batch), g), DISTRIBUTION), np.zeros(each, DISTRIBUTION)
    steps, chosen = np.stack([row.draft for row in batch], axis=1), np.zeros(each, np.int32)
    for step in range(g):
        logits = steps[step][:, None]
        logits[...] = adjust_all(logits, narrow, step, g, rows)
        call(calls.sample_draft, rows, logits=logits, vocab=narrow, draft_len=g, step=step, distributions=q)
    target = np.stack([row.target for row in batch])
    adjusted = adjust_all(target, target.shape[2], 0, g, rows)
    for found, row in zip(adjusted, batch, strict=True):
        if not row.params.has_logits_processors and not row.min_output_len:
            found[:] = np.nan  # Nobody looks at it.
    call(calls.sample_target, rows, logits=target, adjusted=adjusted, distributions=p, chosen=chosen)
    records = np.zeros((len(batch), record_len(g)), np.int64)
    call(
        calls.accept,
        rows,
        q=q,
        draft_logits=steps,
        step_stride=steps[0].size,
        draft_stride=steps.shape[2],
        draft_vocab=narrow,
        p=p,
        chosen=chosen,
        target_logits=target,
        adjusted=adjusted,
        records=records,
    )
    return {**rows, "records": records}


@pytest.mark.parametrize("top", [0, MAX_LOGPROBS])
@pytest.mark.parametrize("name", rows())
def test_log_probabilities_are_numpys(name: str, top: int) -> None:
    """Of a token that stood and of the one after it; nothing of the rejected one, or where nothing is wanted."""
    logits = rows()[name]
    both = np.stack([logits, np.roll(logits, 1), logits])
    tokens = [int(logits.argmax()), len(logits) // 2]
    record = np.array([2, 1, tokens[1], tokens[0], 0], np.int64)
    untouched = np.zeros((3, 1 + MAX_LOGPROBS), TOKEN_VALUE)
    found = untouched.copy()
    for wanted in (-1, top):
        assert (found == untouched).all()
        state = {"sampling": sampling_of(SamplingParams(0.1, top_k=1), logprobs=wanted)}
        call(calls.log_probabilities, state, logits=both[None], records=record[None], logprobs=found)
    for i, token in enumerate(tokens):
        expected = log_probability(both[i], token, top)
        assert found[i]["id"][0] == token
        np.testing.assert_allclose(found[i]["value"][0], expected.logprob, rtol=1e-5, atol=1e-5)
        ids, values = found[i]["id"][1 : 1 + top], found[i]["value"][1 : 1 + top]
        known = min(top, len(logits))
        assert list(ids[:known]) == list(np.argsort(-both[i], kind="stable")[:known])
        assert (ids[known:] == -1).all()
        possible = values[:known][np.isfinite(values[:known])]  # The host leaves out what is not.
        np.testing.assert_allclose(possible, [value for _, value in expected.top], rtol=1e-5, atol=1e-5)
    assert (found[2] == untouched[2]).all()


def test_the_largest_vocabulary_does_not_overflow() -> None:
    """All weights are 1: their masses add up to the most there can be."""
    d, _ = judge(np.zeros(MAX_VOCAB, np.float32), SamplingParams(1.0, top_p=0.999), 7)
    assert d["total"] == MAX_VOCAB


@pytest.mark.quick("sm_80")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_gpus(architecture: str) -> None:
    """With NVRTC, which needs no GPU; every kernel is in the binary."""
    pytest.importorskip("cuda.core")
    cubin = bytes(compile_kernels(architecture, source()).code)
    assert cubin[:4] == b"\x7fELF"
    for kernel in THREADS:
        assert kernel.encode() + b"\0" in cubin


@pytest.mark.parametrize("units", [1, 7, (1 << 14) - 1, 1 << 14, 100_003])
def test_two_arrays_change_places(units: int) -> None:
    device = kernel_device()
    values = np.random.default_rng(units).integers(0, 1 << 16, (3, units)).astype(np.uint16)
    memory = device.zeros(values.shape, np.uint16)
    mirror = device.pinned_like(memory)
    device.write(memory, values)
    calls.swap(device, array=memory.part(0, (units,)), other=memory.part(2 * units, (units,)))
    device.copy_to_host(memory, mirror)
    device.wait()
    assert (mirror == values[::-1]).all()
