"""Heads that are enlarged along with their target (scripts/grow_head.py): the demo's are."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
from click.testing import CliRunner

from scripts import grow_head
from scripts.grow_checkpoint import main as grow_checkpoint
from scripts.growth import Growth
from specrun.errors import SpecError
from tests.helpers.families import save_checkpoint
from tests.helpers.heads.made import make_pair
from tests.helpers.trained_drafts import GREEDY, SMALL, decode

pytestmark = pytest.mark.slow("heads are trained: training/test_trained.py")

SIZES = MappingProxyType(
    {"hidden_size": 128, "intermediate_size": 200, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4}
)


@pytest.fixture(scope="module")
def grown_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("grown") / "target"
    sizes = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]
    done = CliRunner().invoke(grow_checkpoint, ["--input_dir", str(target), "--output_dir", str(output), *sizes])
    assert done.exit_code == 0, done.output
    return output


def test_a_grown_heads_drafts_are_the_small_ones(
    target: Path, trained: Path, grown_target: Path, tmp_path: Path
) -> None:
    """Texts and accepted drafts of the large pair are those of the small one."""
    grow_head.grow(trained / "hf", target, grown_target, tmp_path / "hf")
    make_pair(grown_target, tmp_path / "hf", tmp_path / "pair", **SMALL)
    small, large = (decode(pair / "target", pair / "head", GREEDY) for pair in (trained / "pair", tmp_path / "pair"))
    assert [one.output for one in large] == [one.output for one in small]
    counts = [[(one.stats.evaluated, one.stats.accepted) for one in requests] for requests in (small, large)]
    assert counts[0] == counts[1]


def test_a_head_that_computes_something_else_is_not_written(
    target: Path, trained: Path, grown_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "norm_scale", 1.0)
    with pytest.raises(SpecError, match="the logits differ by"):
        grow_head.grow(trained / "hf", target, grown_target, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_hybrid_grows_as_a_llama_does(tmp_path: Path) -> None:
    """What was written is compared with what it was made of. An untied one is refused."""
    sizes = {
        **{"hidden_size": 128, "intermediate_size": 160, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4},
        "num_linear_heads": 4,
    }
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    for tied in (True, False):
        hf = save_checkpoint(tmp_path / f"hf {tied}", "qwen3_5", tie_word_embeddings=tied)
        command = ["--input_dir", str(hf), "--output_dir", str(tmp_path / f"grown {tied}"), *flags]
        result = CliRunner().invoke(grow_checkpoint, command)
        assert (result.exit_code == 0) == tied, result.output
        assert ("largest logit difference" if tied else "only those with tied embeddings") in result.output
