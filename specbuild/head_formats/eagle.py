"""EAGLE heads as they are published: one form for the dialects of their trainers. ``Head`` is what all kinds have.

Known are the files of SafeAILab's EAGLE (as safetensors), SpecForge, AngelSlim, NVIDIA's ModelOpt, and of vLLM's
speculators. They hold the same tensors under slightly different names; their configurations differ more. What is not
known is refused by name: a head that is read wrongly drafts badly and says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from specbuild.weights.safetensors_files import check_weights
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from specbuild.weights.lazy_tensors import Reader
    from specbuild.weights.safetensors_files import Weights

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
Kind = Literal["eagle1", "eagle3", "medusa", "dflash", "mtp"]
LAYER_TYPES = ("llama", "qwen3")
"""The ``model_type`` of layers that heads may have."""
_IDS = "eagle_aux_hidden_state_layer_ids"
MARKS = ("speculators_model_type", "speculators_config", "eagle_config", "draft_vocab_size")
"""Fields that only EAGLE heads have."""
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_drafting": False,
    "use_sliding_window": False,
}
"""Fields that must have these values where they are given: others are other formulae."""
_NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that say what others say too, or that only training needs."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head's configuration, and where its tensors lie. It reads the target's last state, if not said otherwise."""

    directory: Path
    kind: Kind
    hidden_size: int
    vocab_size: int
    """Size of its target's vocabulary."""
    tensors: Mapping[str, Reader]
    """Tensors, by the names to which every dialect's are brought."""
    nbytes: int
    """Size of its weight files."""
    num_layers: int
    epsilon: float = 0.0
    """Epsilon of its RMS norms, if it has some."""

    @property
    def config_file(self) -> Path:
        """For messages."""
        return self.directory / CONFIG_NAME

    def aux_layers_of(self, num_layers: int, hidden_size: int) -> tuple[int, ...]:
        """The layers of a target with ``num_layers`` layers whose inputs are fused; ``num_layers``: the last's output.

        None for the last state behind the target's final norm. Raises CheckpointError where the target has no such
        layers, or is wider or narrower.
        """
        if hidden_size != self.hidden_size:
            raise CheckpointError(
                f"{self.directory}: reads states of {self.hidden_size} channels, and the target's have {hidden_size}: "
                "it is the head of another target"
            )
        return ()

    def fused_names(self, num_states: int) -> list[str]:
        """Its tensors that its target's graph has. num_states: how many layers' inputs are fused."""
        return []

    def check_target(self, target: Path, weights: Weights) -> None:
        """Raise CheckpointError where the head says of itself that it was trained with other ``weights``."""

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Of a tensor. Raises CheckpointError where it is missing or has another number of axes."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: the tensor {name} is missing; download the head again")
        shape = self.tensors[name].shape
        if len(shape) != axes:
            raise CheckpointError(f"{self.directory}: {name} has the shape {list(shape)}; expected {axes} axes")
        return shape


@dataclass(frozen=True, kw_only=True)
class LayerHead(Head):
    """A head of transformer layers. Tensors have the names of SpecForge: ``fc.weight``, ``layers.0.mlp...``, ..."""

    layer: Mapping[str, Any]
    """The configuration of its layers, as transformers has it for ``layer["model_type"]``."""
    draft_vocab_size: int
    """Tokens that it may draft: ``d2t`` says which."""
    aux_layers: tuple[int, ...] | None
    """The layers of the target whose inputs it fuses, from 0; None: it does not say, see ``aux_layers_of``."""

    def check_layers(self, layers: Sequence[int], num_layers: int, hidden_size: int, said: str) -> None:
        """Raise CheckpointError where a target with ``num_layers`` layers lacks one of ``layers``, or ``fc`` differs.

        said: who names the layers.
        """
        if bad := [layer for layer in layers if not 0 <= layer <= num_layers]:
            raise CheckpointError(
                f"{self.config_file}: {said} layer {bad[0]} of a target with {num_layers} layers: out of range"
            )
        self.require_fc(self.hidden_size, len(layers) * hidden_size)

    def require_fc(self, rows: int, columns: int) -> None:
        """Raise CheckpointError where ``fc.weight`` is of another shape."""
        if (actual := self.shape("fc.weight", 2)) != (rows, columns):
            raise CheckpointError(
                f"{self.directory}: fc.weight is {actual[0]} x {actual[1]}; for this target and the layers that "
                f"config.json names it is {rows} x {columns}: it is the head of another target"
            )


@dataclass(frozen=True, kw_only=True)
class EagleHead(LayerHead):
    """An EAGLE-3 head: a layer that reads its target's fused features."""

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @override
    def aux_layers_of(self, num_layers: int, hidden_size: int) -> tuple[int, ...]:
        """Where a head does not say, they are EAGLE's own; EAGLE-1's have none."""
        if self.kind == "eagle1":
            self.require_fc(self.hidden_size, 2 * hidden_size)
            return ()
        layers = (2, num_layers // 2, num_layers - 3) if self.aux_layers is None else self.aux_layers
        said = f"{_IDS}:" if self.aux_layers else f"no {_IDS}; by default"
        self.check_layers(layers, num_layers, hidden_size, said)
        return layers

    @override
    def fused_names(self, num_states: int) -> list[str]:
        """``fc.weight`` first. EAGLE-1's has none."""
        if self.kind == "eagle1":
            return []
        each = [f"fc_norm.{number}.weight" for number in range(num_states)] if self.fc_norm else []
        return ["fc.weight", *each, *(["input_norm.weight"] if self.norm_before_fc else [])]


def read_eagle(directory: Path, data: Mapping[str, Any], allow_pickle: bool) -> EagleHead:
    """Read a head's configuration ``data`` and its weight files' headers. See ``read_head``."""
    path = directory / CONFIG_NAME
    tensors, nbytes = read_tensors(directory, dict(data), allow_pickle)
    kind = _kind(path, data, tensors)
    eagle = mapping(path, data, "eagle_config")
    flags = {**eagle, **data}
    layer = mapping(path, data, "transformer_layer_config") or data
    require_values(path, {**layer, **flags}, _FIXED)
    fields = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    set_flags: dict[str, Any] = {name: flag(path, flags, name) for name in fields}
    return EagleHead(
        directory=directory,
        kind=kind,
        aux_layers=_aux_layers(path, data, eagle),
        tensors=tensors,
        nbytes=nbytes,
        **read_layer(path, data, layer, len(tensors)),
        **set_flags,
    )


def read_layer(path: Path, data: Mapping[str, Any], layer: Mapping[str, Any], num_tensors: int) -> dict[str, Any]:
    """What a ``LayerHead``'s configuration ``data`` says of its layers, by the names of its fields.

    layer: the fields of the layers themselves. num_tensors: of the whole head. Raises CheckpointError, and
    UnsupportedModelError where layers are of another type.
    """
    if layer.get("model_type") not in LAYER_TYPES:
        raise UnsupportedModelError(
            f"{path}: model_type {layer.get('model_type')!r}: layers of heads are {' or '.join(LAYER_TYPES)} here"
        )
    hidden_size, vocab_size = (whole(path, layer, name) for name in ("hidden_size", "vocab_size"))
    draft_vocab = data.get("draft_vocab_size") or vocab_size
    if not isinstance(draft_vocab, int):
        raise CheckpointError(f"{path}: draft_vocab_size {draft_vocab!r}: expected a number")
    num_layers = whole(path, {"num_hidden_layers": 1, **layer}, "num_hidden_layers")
    if num_layers > num_tensors:  # Making them could take hours.
        raise CheckpointError(f"{path}: num_hidden_layers {num_layers}, and there are {num_tensors} tensors in all")
    epsilon = layer.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
        raise CheckpointError(f"{path}: rms_norm_eps {epsilon!r}: expected a small number")
    return {
        "layer": {**layer, "hidden_size": hidden_size},
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab,
        "num_layers": num_layers,
        "epsilon": float(epsilon),
    }


def read_tensors(directory: Path, data: dict[str, Any], allow_pickle: bool) -> tuple[dict[str, Reader], int]:
    """Tensors of the weight files under one form of their names, and the files' size. data: the configuration.

    Quantized weights are read as dense ones. Raises CheckpointError, UnsupportedModelError.
    """
    from specbuild.head_formats.pickled import PICKLE_NAME, read_pickle
    from specbuild.quantized_formats.config.schemes import read_scheme
    from specbuild.quantized_formats.loading import with_packed
    from specbuild.weights.lazy_tensors import StoredTensor

    pickled = directory / PICKLE_NAME
    stored: dict[str, Reader]
    if pickled.is_file() and not any(directory.glob("*.safetensors")):
        stored, nbytes = read_pickle(pickled, allow_pickle), pickled.stat().st_size
    else:
        files = check_weights(directory)
        stored, nbytes = {name: StoredTensor(entry) for name, entry in files.entries.items()}, files.nbytes
    if scheme := read_scheme(directory, data):
        stored = with_packed(scheme, stored)
    tensors = {_canonical(name): tensor for name, tensor in stored.items()}
    used = {name: tensor for name, tensor in tensors.items() if name not in _NOT_READ and "rotary_emb" not in name}
    return used, nbytes


def require_values(path: Path, fields: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a field that is given and is not as ``wanted``: that is another formula."""
    for name, value in wanted.items():
        if (given := fields.get(name)) not in (None, value):
            raise UnsupportedModelError(f"{path}: {name} {given!r}: specbuild reads heads with {value} only")


def require_architectures(path: Path, data: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise UnsupportedModelError, naming the field, for a kind of head that is not ``known``."""
    for name in architectures(data):
        if name not in known:
            raise UnsupportedModelError(
                f"{path}: architectures {name!r}: an unknown kind of head; known are {', '.join(known)}"
            )


def _canonical(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def architectures(config: Mapping[str, Any]) -> list[Any]:
    """Those that a configuration names."""
    names = config.get("architectures")
    return names if isinstance(names, list) else []


def _kind(path: Path, data: Mapping[str, Any], tensors: Mapping[str, Reader]) -> Kind:
    """What kind of head it is. Raises UnsupportedModelError, naming the field, for others and for what is no head."""
    kind = data.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedModelError(f"{path}: speculators_model_type {kind!r}: specbuild reads eagle3 heads only")
    require_architectures(path, data, ARCHITECTURES)
    if "fc.weight" not in tensors:
        raise UnsupportedModelError(f"{path.parent}: has no tensor fc.weight; it is no EAGLE head")
    return "eagle3" if {"layers.0.hidden_norm.weight", "norm.weight"} & tensors.keys() else "eagle1"


def mapping(path: Path, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field of a configuration that holds fields; {} where it is missing. Raises CheckpointError."""
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"{path}: {name}: expected an object")
    return section


def whole(path: Path, data: Mapping[str, Any], name: str) -> int:
    """A field that is a number of 1 or more. Raises CheckpointError."""
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {name} {value!r}: expected a number of 1 or more")
    return value


def flag(path: Path, data: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false, as which a missing one counts. Raises CheckpointError."""
    value = data.get(name)
    if value not in (None, True, False):
        raise CheckpointError(f"{path}: {name} {value!r}: expected true or false")
    return bool(value)


def _aux_layers(path: Path, data: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose inputs are fused.

    ``eagle_config``'s ids (SpecForge, ModelOpt) name layers whose outputs are meant; those at the top (speculators,
    vLLM) name layers whose inputs are, with 0 for the embeddings.
    """
    ids, shift = (eagle[_IDS], 1) if eagle.get(_IDS) else (data.get(_IDS), 0)
    return None if ids in (None, []) else layer_ids(path, _IDS, ids, shift)


def layer_ids(path: Path, name: str, ids: Any, shift: int) -> tuple[int, ...]:
    """The field ``name``, each id with ``shift`` added. Raises CheckpointError."""
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise CheckpointError(f"{path}: {name} {ids!r}: expected a list of layer ids")
    return tuple(layer + shift for layer in ids)
