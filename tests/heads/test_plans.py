"""Targets with features and heads in float16: compared with torch, and compiled by TensorRT-RTX."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.artifacts.inspect import describe
from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specrun.engine_dir.config import open_engine
from tests.helpers.heads.made import DIALECTS, SMALL, make_pair, save_head

pytestmark = pytest.mark.slow("heads compile: heads/test_dflash.py::test_plans_write_back_what_they_read")

NAME = "speculators"


def test_plans_update_features_in_place(target: Path, tmp_path: Path) -> None:
    made = make_pair(
        target, save_head(tmp_path / "hf", NAME), tmp_path, verify=True, dtype="float16", backend="tensorrt_rtx"
    )
    for role in ("target", "head"):
        difference = open_checkpoint(made / "onnx" / role).max_logit_difference
        assert difference is not None
        assert difference < 2e-2
        config = open_engine(made / role)
        assert config.graph.features is not None
        assert config.graph.features.of == role
        assert "features of 64 channels, of what goes into layers" in describe(made / role, as_json=False)
        assert config.graph.features.layers == list(DIALECTS[NAME].reads)
        assert not any("fused" in note for note in config.provenance.notes)
        tensors = {tensor.name: tensor for tensor in config.io}
        assert tensors["present.features"].aliases == "past_key_values.features"
        assert tensors["present.features"].shape == ["batch", 1, config.build_config.cache_length, 64]
        assert tensors["present.features"].dtype == "float16"
        generation = config.build_config.profiles[1]
        assert generation.sequence == (1, SMALL["max_draft_len"] + 1, SMALL["max_draft_len"] + 1)
