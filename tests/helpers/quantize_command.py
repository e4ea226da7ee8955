"""``specbuild quantize``, run on small checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.convert.options import QuantizeOptions
from specbuild.export.meta_model import MetaModel, load_meta_model
from specbuild.files import read_json
from specbuild.hf.model_config import read_model_config
from specbuild.quantization.calibration_data import TextOptions
from specbuild.quantize.quantize import quantize
from specbuild.quantized_formats.config.schemes import read_scheme
from specbuild.quantized_formats.loading import packed_linears, with_packed
from specbuild.weights.lazy_tensors import Reader, StoredTensor
from specbuild.weights.packed_model import PackedModel
from specbuild.weights.safetensors_files import check_weights
from tests.helpers.engines import quiet

TEXTS = {"size": 3, "length": 16}


def run(source: Path, output: Path, text: Path, **options: Any) -> dict[str, Any]:
    texts = TextOptions(str(text), **TEXTS)
    return quantize(QuantizeOptions(str(source), output, texts=texts, **options), quiet())


def meta_model(directory: Path) -> tuple[MetaModel, PackedModel]:
    """A checkpoint's model and its quantized weights, as ``convert`` reads them."""
    stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in check_weights(directory).entries.items()}
    scheme = read_scheme(directory, read_json(directory / "config.json"))
    loaded = load_meta_model(
        directory, read_model_config(directory, False), "auto", False, with_packed(scheme, stored) if scheme else stored
    )
    return loaded, packed_linears(loaded.model, scheme, loaded.weights, []) if scheme else PackedModel()
