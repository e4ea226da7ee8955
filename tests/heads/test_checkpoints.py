"""A target's checkpoint and a head's become a pair of engines for ``specrun``."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.pair import Pair, PairRequest
from specrun.builder import BuildOptions
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.errors import PairError
from tests.helpers.heads.decoding import MANNERS, decode
from tests.helpers.heads.mtp import save_mtp_target
from tests.helpers.heads.trained import PROMPTS

OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=64, max_draft_len=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def built(target: Path, draft: Path) -> dict[str, Path]:
    request = PairRequest(str(target), str(draft), OPTIONS)
    engines = Pair(request).engines()
    assert Pair(request).engines() == engines, "they are found again"
    return engines


def drafts_as_its_target_alone_writes(engines: dict[str, Path]) -> bool:
    """Whether texts are the target's own. Fails where nothing was drafted."""
    with SpeculativeDecoder.open(engines["target"]) as decoder:
        alone = [request.output for request in decode(decoder, PROMPTS, MANNERS["greedy"])]
    with SpeculativeDecoder.open(engines["target"], engines["draft"]) as decoder:
        requests = decode(decoder, PROMPTS, MANNERS["greedy"])
        assert sum(request.stats.evaluated for request in requests) > 0
    return [request.output for request in requests] == alone


def test_an_eagle_head(target: Path, pair: Path) -> None:
    engines = built(target, pair / "hf")
    assert open_engine(engines["draft"]).graph.is_head
    assert open_engine(engines["target"]).graph.features is not None
    assert drafts_as_its_target_alone_writes(engines)


@pytest.mark.slow("heads/test_mtp.py")
def test_a_target_that_is_named_twice_drafts_with_its_own_layer(tmp_path: Path) -> None:
    target = save_mtp_target(tmp_path / "hf", "glm4_moe")
    engines = built(target, target)
    assert open_engine(engines["draft"]).graph.is_head
    assert drafts_as_its_target_alone_writes(engines)


def test_a_head_needs_its_targets_checkpoint(target: Path, pair: Path) -> None:
    with pytest.raises(
        PairError, match=r"hf: is a draft head, and .*target is an engine already; give the target's ch"
    ):
        Pair(PairRequest(str(pair / "target"), str(pair / "hf"), OPTIONS))
