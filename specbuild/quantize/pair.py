"""The draft of a quantized target: what it would propose on a text."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbuild.export.meta_model import load_meta_model
from specbuild.export.reference import Float32, SeeInput
from specbuild.files import read_json
from specbuild.hf.model_config import read_model_config, save_tokenizer
from specbuild.hf.model_facts import positions_of
from specbuild.quantization.activation_ranges import rounding
from specbuild.quantized_formats.config.schemes import read_scheme
from specbuild.quantized_formats.loading import packed_linears, require_claimed, with_packed
from specbuild.weights.lazy_tensors import Reader, StoredTensor
from specbuild.weights.packed_model import PackedModel, use_dequantized
from specbuild.weights.safetensors_files import check_weights, require_layers
from specrun.errors import BuildConfigError, VerificationError
from specrun.text.tokenizer import describe_tokenizer

if TYPE_CHECKING:
    from specbuild.quantization.calibration_data import Rows


@dataclass(frozen=True)
class Draft:
    """A draft that is run without its weights in memory."""

    directory: Path
    model: Any
    """A meta model; see ``reference.py``."""
    see_input: SeeInput
    """Rounds inputs, where the draft is quantized itself."""
    positions: int | None
    """Number of positions that it was trained for."""

    def proposals(self, batch: Rows) -> torch.Tensor:
        """[B, S]: after every token of ``batch``, the most likely next one.

        Raises BuildConfigError where the draft does not have all tokens, VerificationError where logits are not finite.
        """
        size = self.model.get_input_embeddings().weight.shape[0]
        if batch.max() >= size:
            raise BuildConfigError(
                f"--draft_dir {self.directory}: has {size} tokens, and the text has token {batch.max()}; give a draft "
                "of the same vocabulary"
            )
        with torch.no_grad(), Float32(self.see_input):
            logits = self.model(input_ids=torch.from_numpy(batch), use_cache=False).logits
        if not torch.isfinite(logits).all():
            raise VerificationError(f"{self.directory}: the draft's logits are not finite (NaN or inf)")
        return torch.as_tensor(logits.argmax(dim=-1))


def load_draft(directory: Path, target: Path, trust_remote_code: bool) -> Draft:
    """The checkpoint in ``directory``, dense or quantized, as a draft for the one at ``target``.

    Raises CheckpointError, UnsupportedModelError; BuildConfigError where the two have different tokenizers.
    """
    config = read_model_config(directory, trust_remote_code)
    files = check_weights(directory)
    require_layers(directory, config, files)
    draft, wanted = (_fingerprint(path, trust_remote_code) for path in (directory, target))
    if draft != wanted:
        raise BuildConfigError(
            f"--draft_dir {directory}: has another tokenizer than {target}; a pair needs the same one"
        )
    scheme = read_scheme(directory, read_json(directory / "config.json"))
    stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in files.entries.items()}
    model, weights = load_meta_model(
        directory, config, "auto", trust_remote_code, with_packed(scheme, stored) if scheme else stored
    )
    require_claimed(directory, weights)
    packed = packed_linears(model, scheme, weights, []) if scheme else PackedModel()
    use_dequantized(model, packed, directory)
    return Draft(directory, model, rounding(model, packed), positions_of(config))


def _fingerprint(directory: Path, trust_remote_code: bool) -> str | None:
    """Of the tokenizer in fast form; None where there is none. Raises CheckpointError."""
    with tempfile.TemporaryDirectory() as name:
        if not save_tokenizer(directory, Path(name), trust_remote_code):
            return None
        described = describe_tokenizer(Path(name))
        return None if described is None else described.fingerprint
