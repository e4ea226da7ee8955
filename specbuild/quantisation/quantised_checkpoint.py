"""The quantised Hugging Face checkpoint of a skeleton: chosen, written tensor by tensor, read back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.export.skeleton import Skeleton
from specbuild.json_file import read_json
from specbuild.progress import Stages
from specbuild.quantisation.checkpoints.loading import PackedReader, with_packed
from specbuild.quantisation.checkpoints.schemes import read_scheme
from specbuild.quantisation.compressed_tensors_format import configuration, tensors
from specbuild.quantisation.hf_checkpoint import ShardWriter, copy_side_files
from specbuild.quantisation.packed import Packed
from specbuild.quantisation.packed_model import PackedModel, parameter_names
from specbuild.tensors import StoredTensor, Weight, parts
from specbuild.weights import Entry, check_weights
from specrun.errors import UnsupportedModelError


@dataclass(frozen=True)
class Product:
    """A weight that is stored quantised."""

    parameter: str
    """Its name in the model."""
    module: str
    """The name that the files give its module."""
    weight: Packed


def stored_products(
    source: Path, skeleton: Skeleton, packed: PackedModel, entries: dict[str, Entry], stages: Stages
) -> dict[str, Product]:
    """What is stored quantised, by the names of the original's tensors. Raises UnsupportedModelError."""
    names = {entry: name for name, entry in entries.items()}
    parameters = dict(skeleton.model.named_parameters(remove_duplicate=False))
    shared = parameter_names(skeleton.model)
    found = {}
    for parameter, weight in packed.products.items():
        module, reader = parameter.removesuffix(".weight"), skeleton.weights[parameter].reader
        owner = skeleton.model.get_submodule(module)
        if isinstance(owner, nn.Embedding):  # A tied one, under its other name.
            continue
        if isinstance(owner, Conv1D):
            raise UnsupportedModelError(
                f"{source}: {module} keeps its weight transposed (Conv1D), which compressed-tensors has no form for; "
                "specbuild convert --qformat quantises it on the way to ONNX"
            )
        if len(shared[id(parameters[parameter])]) > 1:
            stages.say(f"note: {module} shares its weight with the embedding or another module and stays as it is")
        elif not isinstance(reader, StoredTensor):
            stages.say(f"note: {module} is made of several stored tensors and stays as it is")
        else:
            name = names[reader.entry]
            found[name] = Product(parameter, name.removesuffix(".weight"), weight)
    if not found:
        raise UnsupportedModelError(f"{source}: these options leave no weight to quantise")
    return found


def output_bytes(entries: dict[str, Entry], products: dict[str, Product]) -> int:
    """How large the weight files will be."""
    dense = (StoredTensor(entry) for name, entry in entries.items() if name not in products)
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in dense) + sum(
        product.weight.nbytes for product in products.values()
    )


def write_weights(
    source: Path, work: Path, entries: dict[str, Entry], products: dict[str, Product], advance: Callable[[float], None]
) -> None:
    """Write every tensor of the original, quantised or as it is; one at a time is read."""
    writer = ShardWriter(work, 3 * len(entries))
    for name, entry in entries.items():
        if product := products.get(name):
            for suffix, tensor in tensors(product.weight).items():
                writer.write(f"{product.module}.{suffix}", tensor.dtype, tensor.shape, [tensor])
        else:
            stored = StoredTensor(entry)
            weight = Weight(name, stored.dtype, stored, source)
            pieces = (weight[index] for index in parts(weight.shape, weight.dtype.itemsize))
            writer.write(name, weight.dtype, weight.shape, pieces)
        advance(1)
    writer.finish()


def write_config(
    source: Path, work: Path, skeleton: Skeleton, entries: dict[str, Entry], products: dict[str, Product]
) -> None:
    """Write config.json, and copy what else stands beside the original's weights."""
    modules = {product.module: product.weight for product in products.values()}
    config = {
        **read_json(source / "config.json"),
        "quantization_config": configuration(modules, _dense_modules(skeleton, entries, products)),
    }
    copy_side_files(source, work)
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _dense_modules(skeleton: Skeleton, entries: dict[str, Entry], products: dict[str, Product]) -> list[str]:
    """Names of products that stay as they are, here or in other implementations of the model; experts as a pattern."""
    quantised = {product.parameter for product in products.values()}
    kinds = {f"{name}.weight": module for name, module in skeleton.model.named_modules()}
    here = [name for name, module in kinds.items() if isinstance(module, nn.Linear) and name not in quantised]
    matrices = [name for name, entry in entries.items() if len(entry.shape) == 2 and name not in products]
    stored = [name for name in matrices if name.endswith(".weight") and not isinstance(kinds.get(name), nn.Embedding)]
    names = {name.removesuffix(".weight") for name in (*here, *stored)}
    experts = {name for name in names if ".experts." in name}
    return sorted(names - experts) + ([r"re:.*\.experts\..*"] if experts else [])


def read_back(work: Path, products: dict[str, Product]) -> PackedModel:
    """The quantised weights that were written, as ``convert`` will read them."""
    scheme = read_scheme(work, read_json(work / "config.json"))
    assert scheme is not None
    readers = with_packed(scheme, {name: StoredTensor(entry) for name, entry in check_weights(work).entries.items()})
    found = PackedModel()
    for name, product in products.items():
        reader = readers[name]
        assert isinstance(reader, PackedReader), name
        found.products[product.parameter] = reader.packed
    return found
