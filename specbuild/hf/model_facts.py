"""What a model says of itself: positions, vocabulary, element type."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from specrun.engine_dir.dtypes import FLOAT_NAMES
from specrun.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def require_packages(*names: str) -> None:
    """Raise ModuleNotFoundError where one is missing."""
    for package in names:
        if importlib.util.find_spec(package) is None:  # Importing them would take seconds, before bad input is told.
            raise ModuleNotFoundError(f"no module named {package}", name=package)


def positions_of(config: PreTrainedConfig) -> int | None:
    """Positions that the model was trained for, where its configuration says so."""
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if trained is None else int(trained)


def vocab_size_of(model: PreTrainedModel) -> int:
    """How many logits it has. Raises UnsupportedModelError."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{model.name_or_path}: {type(model).__name__} has no output embeddings (lm_head)")
    return int(head.weight.shape[0])


def dtype_name(model: PreTrainedModel) -> Any:
    """What it computes in. Raises UnsupportedModelError."""
    name = str(model.dtype).removeprefix("torch.")
    if name not in FLOAT_NAMES:
        raise UnsupportedModelError(f"{model.name_or_path}: weights are {name}; give --dtype {'|'.join(FLOAT_NAMES)}")
    return name


def plain(value: Any) -> Any:
    """Config values as JSON can hold them."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
