"""The arithmetic that says whether a pair fits into a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.engine_dir.config import open_engine
from specrun.errors import BackendError
from specrun.gpu.memory import Need, blocks_that_fit, need, require_room
from specrun.kv_cache import BLOCK

GB = 1_000_000_000


def test_an_engines_need_is_its_files_its_cache_and_its_logits(engines: Path) -> None:
    config = open_engine(engines / "target")
    found = need("target", config, rows=2, positions=5, texts=True, blocks=3)
    build, graph = config.build_config, config.graph
    assert found.weights == sum(path.stat().st_size for path in (engines / "target").glob("model.onnx*"))
    per_position = sum(cache.heads * cache.head_dim for cache in graph.caches) * 4
    assert found.cache == (build.max_batch_size * build.cache_length + 3 * BLOCK) * per_position
    assert found.buffers > 2 * (5 + 1) * graph.vocab_size * 4, "logits and counts"
    assert need("draft", config, 2, 5, texts=False, blocks=3).buffers < found.buffers - 2 * graph.vocab_size * 4


def test_both_models_must_fit_beside_each_other() -> None:
    pair = [Need("target", 16 * GB, 2 * GB, 0), Need("draft", 2 * GB, 1 * GB, 0)]
    require_room("GPU 0", 22 * GB, 0.9, pair)
    with pytest.raises(BackendError) as error:
        require_room("GPU 0 (RTX)", 21 * GB, 0.9, pair)
    message = str(error.value)
    for part in ("GPU 0 (RTX)", "3.00 GB of 0.9 x 3.00 GB", "16.00 GB weights", "1.00 GB cache", "free: 21.00 GB"):
        assert part in message
    assert "--kv_cache_free_gpu_memory_fraction" in message
    require_room("GPU 0", 21 * GB, 1.0, pair)


def test_weights_that_do_not_fit_are_said_to_be_the_reason() -> None:
    pair = [Need("target", 16 * GB, 0, 0, workspace=GB)]
    require_room("GPU 0", 17 * GB, 0.5, pair)
    with pytest.raises(BackendError, match=r"without any cache .*1\.00 GB workspace"):
        require_room("GPU 0", 16 * GB, 0.5, pair)


def test_past_texts_get_what_is_left(engines: Path) -> None:
    config = open_engine(engines / "target")
    build, per_block = config.build_config, 2 * config.graph.cache_bytes(1, BLOCK)
    rows = 2 * config.graph.cache_bytes(build.max_batch_size, build.cache_length)
    assert blocks_that_fit(4 * GB - rows, 0.75, [config, config]) == (3 * GB - rows) // per_block
    assert blocks_that_fit(rows // 4, 0.75, [config, config]) == 0
