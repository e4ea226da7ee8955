"""A draft with another tokenizer, on the CPU beside a target on a simulated GPU; on a GPU it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import PairError
from specrun.request.request import Request
from tests.gpu_simulator.tensorrt import as_plan
from tests.helpers.other_tokenizers import KINDS, PARAMS, TEXTS, save_reader
from tests.helpers.tables import decode


def some(decoder: SpeculativeDecoder) -> list[Request]:
    return [decoder.request(text, params, max_output_len=8) for text, params in zip(TEXTS, PARAMS, strict=False)]


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_ids_are_the_targets_own(tmp_path: Path) -> None:
    for name in ("pieces", "bytes"):
        as_plan(save_reader(tmp_path / name, KINDS[name]()), tmp_path / "plans" / name)
    with SpeculativeDecoder.open(tmp_path / "pieces") as decoder:
        expected = [decode(decoder, [request])[0] for request in some(decoder)]
    config = DraftTargetConfig(3, warm_up=False)
    with SpeculativeDecoder.open(tmp_path / "plans" / "pieces", tmp_path / "bytes", config) as pair:
        requests = some(pair)
        assert decode(pair, requests) == expected
    assert sum(request.stats.accepted for request in requests) > 0
    with pytest.raises(
        PairError, match="use a draft with the target's tokenizer, or an engine of this one for the CPU"
    ):
        SpeculativeDecoder.open(tmp_path / "plans" / "pieces", tmp_path / "plans" / "bytes")
