"""Ctrl-C at any line of a step, in pairs of every kind: what comes after is the target's own text."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import specrun
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.kv_cache.prefix_cache import PrefixCache
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.other_tokenizers import KINDS, save_reader

SOURCES = Path(specrun.__file__).parent
ROOMS = ("kv_cache", "runners", "drafters", "speculative", "scheduler")
NOT_AT_EVERY_LINE = (str(SOURCES / "scheduler" / "step_turns.py"),)
"""Where it counts that signal handlers run at calls and nowhere else; test_threads sends signals."""
COPIES = ("save", "save_state", "load", "load_state")


class Lines:
    """Counts lines that run in some rooms, in all functions or in those that copy, and interrupts at one of them."""

    def __init__(self, rooms: Sequence[str], copies: bool, at: int | None = None) -> None:
        self._folders, self._at, self.count = tuple(str(SOURCES / room) for room in rooms), at, 0
        self._copies = copies

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._at_a_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _at_a_call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        is_ours = code.co_filename.startswith(self._folders) and (not self._copies or code.co_name in COPIES)
        return self._at_a_line if is_ours and code.co_filename not in NOT_AT_EVERY_LINE else None

    def _at_a_line(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._at_a_line


def some_requests(draw: random.Random, known: list[list[int]]) -> list[Request]:
    """New prompts, some of which begin as known ones do; and known ones."""
    made = []
    for _ in range(draw.randint(1, 4)):
        prompt = [draw.randrange(5, 65) for _ in range(draw.randint(2, 40))]
        if known and draw.random() < 0.6:
            prompt = draw.choice(known)[: draw.randint(16, 60)] + prompt[: draw.choice([0, 9])]
        made.append(Request(prompt, SamplingParams(0.8, seed=7) if draw.random() < 0.5 else SamplingParams(), 24))
    known += [list(request.prompt) for request in made]
    return made


def decode(decoder: SpeculativeDecoder, asked: list[Request]) -> None:
    for _ in decoder.run(asked):
        pass
    assert not [request.error for request in asked if request.error]


Pair = tuple[Path, Path | None, dict[str, Any]]
"""Engines, and settings."""


def recurrent(work: Path, _engines: Path) -> Pair:
    target = make_onnx(save_checkpoint(work / "target hf", "qwen3_5"), work / "target onnx", verify=False)
    draft = make_onnx(save_checkpoint(work / "draft hf", "lfm2", seed=1), work / "draft onnx", verify=False)
    sizes = {"max_seq_len": 160, "max_input_len": 120}
    return make_engine(target, work / "target", max_draft_len=4, **sizes), make_engine(draft, work / "draft"), {}


def other_tokenizer(work: Path, _engines: Path) -> Pair:
    for name in ("bytes", "pieces"):
        save_reader(work / name, KINDS[name]())
    return work / "bytes", work / "pieces", {}


KINDS_OF_PAIRS: dict[str, Callable[[Path, Path], Pair]] = {
    "model": lambda _work, engines: (engines / "target", engines / "draft", {}),
    "suffix": lambda _work, engines: (engines / "target", None, {"draft": "suffix"}),
    "model and suffix": lambda _work, engines: (engines / "target", engines / "draft", {"draft": "suffix"}),
    "recurrent": recurrent,
    "another tokenizer": other_tokenizer,
}


@pytest.fixture(scope="module")
def pairs(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(kind: str) -> Pair:
        if kind not in made:
            made[kind] = KINDS_OF_PAIRS[kind](tmp_path_factory.mktemp("pair"), engines)
        return made[kind]

    return pair


def num_wrong(pair: Pair, times: int) -> int:
    """Texts that are not the target's own, of those that come after an interrupt."""
    target, draft, settings = pair
    draw, wrong, known = random.Random(0), 0, list[list[int]]()
    config = DraftTargetConfig(3, max_tokens_in_kv_cache=8192, **settings)  # No clock decides what runs.
    with (
        SpeculativeDecoder.open(target, config=DraftTargetConfig(reuse_blocks=False)) as alone,
        SpeculativeDecoder.open(target, draft, config) as decoder,
    ):

        def differ() -> int:
            decode(decoder, asked := some_requests(draw, known))
            again = [Request(one.prompt, one.params, one.max_output_len) for one in asked]
            decode(alone, again)
            return sum(one.output != other.output for one, other in zip(asked, again, strict=True))

        for number in range(times):
            place = (ROOMS, False) if number % 2 else (ROOMS[:1], True)
            whole = Lines(*place)
            with whole.counted():
                decode(decoder, some_requests(draw, known))
            lines = Lines(place[0], place[1], draw.randint(1, max(1, whole.count)))
            with suppress(KeyboardInterrupt), lines.counted():
                decode(decoder, some_requests(draw, known))
            wrong += sum(differ() for _ in range(3))
            if wrong:
                break
            del known[:-20]
    return wrong


@pytest.mark.parametrize("kind", KINDS_OF_PAIRS)
def test_what_comes_after_an_interrupt_is_the_targets_own(kind: str, pairs: Callable[[str], Pair]) -> None:
    assert num_wrong(pairs(kind), 40) == 0


def test_control_serial_numbers_that_begin_again_are_seen(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is kept under a block's number. After an interrupt another text's block would have the same one."""
    begin = PrefixCache.__init__

    def begin_again(self: PrefixCache, capacity: int) -> None:
        begin(self, capacity)
        monkeypatch.setattr("specrun.kv_cache.prefix_cache._SERIALS", iter(range(1, 1 << 30)))

    monkeypatch.setattr(PrefixCache, "__init__", begin_again)
    target, _, _ = pairs("recurrent")  # A draft would take numbers of its own.
    assert num_wrong((target, None, {"draft": "suffix"}), 150)
