"""Whether two engines fit each other, as far as their descriptions tell."""

from __future__ import annotations

from pathlib import Path

from specrun.engine_dir.config import EngineConfig
from specrun.errors import PairError
from specrun.speculative.loader import Engine
from specrun.text.retokenizer import Translator, open_translator
from specrun.text.tokenizer import require_same_tokenizer


def check_fit(
    target_dir: Path, target: EngineConfig, draft_dir: Path, draft: EngineConfig, draft_len: int | None
) -> int:
    """The most draft tokens of a round. Raises PairError where the two engines do not fit."""
    asked, draft_len = draft_len, check_draft_len(target_dir, target, draft_len)
    if (most := draft.graph.parallel_drafts) is not None:
        if asked is not None and asked > most:
            raise PairError(f"draft_len {asked}: {draft_dir} drafts at most {most} tokens a round; give at most {most}")
        draft_len = min(draft_len, most)
    have, need = draft.build_config.max_seq_len, target.build_config.max_seq_len
    if have < need:
        raise PairError(
            f"{draft_dir}: max_seq_len {have} is shorter than the target's {need}; "
            f"build the draft with --max_seq_len {need}, or the target with {have}"
        )
    return draft_len


def find_translator(target: Engine, draft: Engine) -> Translator | None:
    """What translates the target's ids to the draft's; None where both have one tokenizer.

    Raises PairError where they differ and the draft is a head or on a GPU, where they have no token in common, and
    where a tokenizer is missing and the numbers of ids differ.
    """
    here, there = target.config, draft.config
    if here.tokenizer and there.tokenizer:
        if here.tokenizer.fingerprint == there.tokenizer.fingerprint:
            return None
        if there.graph.is_head or there.backend.device != "cpu":
            require_same_tokenizer(target.directory, draft.directory)
            return None
        sizes = here.graph.vocab_size, there.graph.vocab_size
        return open_translator(target.directory, draft.directory, *sizes)
    if here.graph.vocab_size != there.graph.vocab_size and not there.graph.is_head:
        raise PairError(
            f"{target.directory} has {here.graph.vocab_size} logits and {draft.directory} {there.graph.vocab_size}, "
            "and without a tokenizer in both nothing shows that their vocabularies agree"
        )
    return None


def check_draft_len(target_dir: Path, target: EngineConfig, draft_len: int | None) -> int:
    """The most draft tokens of a round: ``draft_len``, or what the engine allows. Raises PairError beyond that."""
    most = target.build_config.max_draft_len
    if most == 0 and draft_len != 0:
        raise PairError(
            f"{target_dir}: built without draft tokens; build it with --max_draft_len to use it as a target"
        )
    if draft_len is not None and draft_len > most:
        raise PairError(
            f"draft_len {draft_len}: {target_dir} was built with max_draft_len {most}; "
            f"give at most {most}, or build it with --max_draft_len {draft_len}"
        )
    return most if draft_len is None else draft_len


def check_head(target: Engine, head: Engine) -> None:
    """Raise PairError unless ``head`` was made for the features of ``target``, and they can share them."""
    features, wanted = target.config.graph.features, head.config.graph.features
    if features is None:
        raise PairError(
            f"{head.directory}: is a draft head, and {target.directory} has no features for it; convert the target "
            "with --head"
        )
    if wanted is None or features.fingerprint != wanted.fingerprint:
        raise PairError(
            f"{head.directory}: is the head of another target than {target.directory}, or of other features; convert "
            "both from the same two checkpoints, with --head and --head_of"
        )
    if target.config.backend.device != head.config.backend.device or target.gpu != head.gpu:
        raise PairError(
            f"{head.directory}: a head shares memory with its target, so both run on one device; build both for it, "
            "and give both the same number"
        )
    here, there = target.config.build_config, head.config.build_config
    for name in ("max_seq_len", "max_draft_len", "max_input_len"):
        if getattr(here, name) != getattr(there, name):
            raise PairError(
                f"{head.directory}: {name} {getattr(there, name)}, and its target has {getattr(here, name)}; a head "
                f"shares memory with its target: build both with the same --{name}"
            )
    if target.config.graph.feature_element != head.config.graph.feature_element:
        raise PairError(
            f"{head.directory}: computes in {head.config.graph.dtype}, and {target.directory} in "
            f"{target.config.graph.dtype}; convert both with the same --dtype"
        )


def describe_sizes(target: EngineConfig, draft: EngineConfig) -> str:
    """What is odd about the draft's size; empty where nothing is."""
    ours, theirs = ({name: info.sha256 for name, info in model.files.items()} for model in (target, draft))
    if ours == theirs:
        return "the draft is the target itself, so drafting costs as much as it saves; give a smaller model"
    have, need = (sum(info.bytes for info in model.files.values()) for model in (target, draft))
    if need > 1.1 * have:
        return f"the draft has {need / have:.1f} times the target's bytes; were the two swapped?"
    return ""
