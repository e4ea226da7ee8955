"""DFlash and DSpark heads draft what their formula says, a block in one pass, and texts stay the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from specbuild.convert.verify_head import reference_block
from specbuild.heads.dflash import DFlash
from specrun.drafters.markov import Markov
from specrun.engine_dir.config import open_engine
from specrun.sampling.sampler import Floats
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import VOCAB
from tests.helpers.heads.agreement import TEXTS, TOLERANCE, difference
from tests.helpers.heads.as_read import as_read as read
from tests.helpers.heads.dflash import (
    BLOCK,
    DIALECTS,
    MASK,
    WIDTH,
    Dialect,
    block_tensors,
    drafted,
    features_of,
    save_block_head,
    with_targets_matrices,
)
from tests.helpers.heads.made import LAYERS, SIZES, SMALL, TARGET_WIDTH, Tensors, make_pair, prefilled, states_of

DRAFTS = [[44, 260, 9, 18, 5], [12, 13, 310, 7, 99]]
"""Behind each of ``TEXTS``."""
WANTED = [4, 2]
VERIFIED = ("z-lab", "modelopt", "speculators")
"""Dialects whose conversion is compared with torch by ``convert`` as well."""
ONLY_READ = ("deepspec", "speculators, dflash")
"""Dialects that are another way of writing what others compute: compared in torch, without engines."""


# -------------------------------------------------------------------------------------- what heads compute


def found(pair: Path) -> list[torch.Tensor]:
    """Logits [wanted, V + 1] behind each text and ``DRAFTS``, of confidence at the end; 0 where there is none.

    Both rows at once. What drafts of a round before have left is read again.
    """
    target, head = prefilled(pair, [text[:-1] for text in TEXTS])
    before = target.backend.cache.part(0, 2)[-1].copy()
    graph = head.backend.config.graph
    for texts in ([text[:-2] for text in TEXTS], TEXTS):
        for row, text in enumerate(texts):
            head.rows.rewind(row, len(text) - 1)
        logits = head.forward(texts, WANTED, [[0] * (count - graph.sample_from_anchor) for count in WANTED])
        for row, text in enumerate(texts):
            head.rows.rewind(row, len(text) - 1)
    assert (target.backend.cache.part(0, 2)[-1] == before).all(), "features are the target's"
    return behind_tokens(list(logits), Markov.open(pair / "head", graph))


def as_read(target: Path, directory: Path, scratch: Path) -> tuple[list[torch.Tensor], int]:
    """The same in torch, of what ``convert`` would export, and the number of draft tokens of a block."""
    model, features = read(target, directory, TEXTS)
    assert isinstance(model, DFlash)
    rows = zip(TEXTS, features, WANTED, strict=True)
    logits = [reference_block(model, np.array(text), own, count) for text, own, count in rows]
    files = model.write_markov(scratch)
    markov = Markov(*(np.load(scratch / name) for name in files)) if files else None
    return behind_tokens(logits, markov), model.head.num_drafts


def behind_tokens(logits: Sequence[Floats], markov: Markov | None) -> list[torch.Tensor]:
    """Logits and confidence [wanted, V + 1] of each row's places behind the text and ``DRAFTS``."""
    rows = []
    for row, count in enumerate(WANTED):
        tokens = [TEXTS[row][-1], *DRAFTS[row]][:count]
        own = [markov.applied(logits[row][i], token) if markov else logits[row][i] for i, token in enumerate(tokens)]
        rows.append(torch.from_numpy(np.pad(np.stack(own), ((0, 0), (0, VOCAB + 1 - len(own[0]))))))
    return rows


def expected(
    target: Path, dialect: Dialect, tensors: Tensors, row: int, shift: int = 0, before: Sequence[int] | None = None
) -> torch.Tensor:
    """The same in plain torch. shift: of the features, by positions. before: tokens in front of draft tokens."""
    text, tensors = TEXTS[row], with_targets_matrices(tensors, target)
    features = features_of(dialect, tensors, states_of(target, torch.tensor([text])))[0].roll(shift, 0)
    tokens = [text[-1], *DRAFTS[row]][: WANTED[row]] if before is None else list(before)
    logits, confidence = drafted(dialect, tensors, features, text, tokens)
    return torch.cat([logits, confidence[:, None]], dim=-1)


@pytest.mark.quick("z-lab")
@pytest.mark.parametrize("name", DIALECTS)
def test_logits_of_blocks(target: Path, tmp_path: Path, name: str) -> None:
    """And the check sees other layers, other positions, other places of the block and other tokens before."""
    dialect, tensors, head = DIALECTS[name], block_tensors(name), save_block_head(tmp_path / "hf", name)
    if name not in ONLY_READ:
        pair = make_pair(target, head, tmp_path / "pair", verify=name in VERIFIED)
        rows, drafts = found(pair), open_engine(pair / "head").graph.parallel_drafts
    else:
        rows, drafts = as_read(target, head, tmp_path)
    assert drafts == dialect.drafts
    for row, logits in enumerate(rows):
        assert difference(expected(target, dialect, tensors, row), logits) < TOLERANCE
    wrong = [
        replace(dialect, reads=tuple((layer + 1) % (LAYERS + 1) for layer in dialect.reads)),
        replace(dialect, from_anchor=not dialect.from_anchor),
        replace(dialect, theta=dialect.theta * 10),
        replace(dialect, qk_norm=False),
    ]
    others = [expected(target, one, tensors, 0) for one in wrong] + [expected(target, dialect, tensors, 0, shift=1)]
    if dialect.rank:
        others.append(expected(target, dialect, tensors, 0, before=[3] * WANTED[0]))
    if dialect.confidence:
        changed = {**tensors, "confidence_head.proj.bias": torch.tensor([9.0])}
        others.append(expected(target, dialect, changed, 0))
    for other in others:
        assert difference(other, rows[0]) > 100 * TOLERANCE


@pytest.mark.slow("test_logits_of_blocks")
def test_transformers_own_model_of_the_kind_agrees(target: Path, tmp_path: Path) -> None:
    """Muse Glimmer's assistant is a DFlash head with other names: written and computed by transformers."""
    fields = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    config = MuseGlimmerAssistantConfig(
        hidden_size=TARGET_WIDTH,
        num_hidden_layers=2,
        head_dim=WIDTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"] * 2,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[0, 2],
        **{name: SIZES[name] for name in fields},
    )
    torch.manual_seed(3)
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4).add_(0.3 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
    renamed = {"encoder.output_norm_enc.": "hidden_norm.", "encoder.": ""}
    tensors = {}
    for name, tensor in model.state_dict().items():
        begin = next((begin for begin in renamed if name.startswith(begin)), "")
        tensors[renamed.get(begin, "") + name.removeprefix(begin)] = tensor
    pair = make_pair(target, save_block_head(tmp_path / "hf", "z-lab", tensors), tmp_path)
    rows, matrices = found(pair), with_targets_matrices({}, target)
    for row, text in enumerate(TEXTS):
        states = states_of(target, torch.tensor([text[:-1]]))
        ids = torch.tensor([[text[-1], *[MASK] * WANTED[row]]])
        with torch.no_grad():
            hidden = model(
                noise_embeds=matrices["embed_tokens.weight"][ids],
                context_hidden_states=torch.cat([states[1], states[3]], dim=-1),
            ).last_hidden_state
        logits = hidden[0, 1:] @ matrices["lm_head.weight"].T
        assert difference(logits, rows[row][:, :VOCAB]) < TOLERANCE


# -------------------------------------------------------------------------------------- TensorRT


@pytest.mark.quick("z-lab")
@pytest.mark.parametrize("name", ["z-lab", "modelopt"])
def test_plans_write_back_what_they_read(target: Path, tmp_path: Path, name: str) -> None:
    """In float16, compiled by TensorRT-RTX: caches are updated in place, and a round's pass has its profile."""
    head = save_block_head(tmp_path / "hf", name)
    make_onnx(head, tmp_path / "onnx", head_of=str(target), dtype="float16", verify=True)
    made = make_engine(tmp_path / "onnx", tmp_path / "plan", **SMALL, backend="tensorrt_rtx")
    config = open_engine(made)
    tensors = {tensor.name: tensor for tensor in config.io}
    for cache in ("features", "0.key", "1.value"):
        assert tensors[f"present.{cache}"].aliases == f"past_key_values.{cache}"
    # At most 6 draft tokens, of which 6 may be accepted: they are read again, with two that the target has chosen.
    assert config.build_config.profiles[1].sequence[2] == 6 + 2 + 6 - DIALECTS[name].from_anchor
    assert tensors["logits"].shape[-1] == VOCAB + (name == "modelopt")
