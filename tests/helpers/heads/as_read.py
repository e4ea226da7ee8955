"""A target's features and its head in torch, as ``convert`` reads them, without graphs and engines."""

from __future__ import annotations

from pathlib import Path

import torch

from specbuild.convert.head import _make
from specbuild.export.features import Fusion, watched
from specbuild.export.meta_model import load_meta_model
from specbuild.export.reference import Float32
from specbuild.head_formats.detect import read_head
from specbuild.heads.medusa import Medusa
from specbuild.heads.module import GraphModule
from specbuild.hf.model_config import read_model_config
from specbuild.weights.lazy_tensors import Reader, StoredTensor
from specbuild.weights.safetensors_files import check_weights
from specrun.sampling.sampler import Floats


def as_read(target: Path, directory: Path, texts: list[list[int]]) -> tuple[GraphModule | Medusa, list[Floats]]:
    """The head in ``directory``, and the features [S, width] of each text."""
    head, config = read_head(directory), read_model_config(target, False)
    stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in check_weights(target).entries.items()}
    owner, weights = load_meta_model(target, config, "auto", False, stored)
    fusion, features = Fusion(head, owner), []
    for text in texts:
        with torch.no_grad(), Float32(), watched(owner, fusion) as fused:
            owner(input_ids=torch.tensor([text]), use_cache=False)
            features.append(fused()[0].numpy())
    return _make(head, owner, weights), features
