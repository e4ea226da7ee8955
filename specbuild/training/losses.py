"""A draft beside its target: what is minimised, and how many of its tokens would stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from specbuild.training import memory
from specbuild.training.memory import sparing
from specbuild.training.rows import Batch
from specbuild.training.student import Student

DECAY = 0.8
"""Weight of a draft beside the one before it, as in EAGLE-3 and Medusa: it counts only if that one stands."""


@dataclass
class Score:
    """Sums over positions; those of several batches are added."""

    divergence: list[float] = field(default_factory=list)
    """Of each draft, from the target, in nats; summed over positions."""
    positions: list[int] = field(default_factory=list)
    """Compared, for each draft."""
    reached: list[int] = field(default_factory=list)
    """Of these, positions at which all drafts before have agreed with the target."""
    accepted: list[int] = field(default_factory=list)
    """And at which this one does, too."""

    def add(self, other: Score) -> None:
        """Count another batch, too."""
        for name in ("divergence", "positions", "reached", "accepted"):
            mine, more = getattr(self, name), getattr(other, name)
            length = max(len(mine), len(more))
            both = zip(*(one + [0] * (length - len(one)) for one in (mine, more)), strict=True)
            setattr(self, name, [a + b for a, b in both])

    @property
    def loss(self) -> float:
        """The mean divergence, weighted as in training."""
        means = [total / max(1, count) for total, count in zip(self.divergence, self.positions, strict=True)]
        return sum(DECAY**draft * mean for draft, mean in enumerate(means))

    @property
    def acceptance(self) -> list[float]:
        """Of each draft: how often it is the target's likeliest token, where all before it are."""
        return [right / max(1, count) for right, count in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_a_round(self) -> float:
        """Tokens that a greedy round would commit, if it always drafted as many as are compared here."""
        chance, tokens = 1.0, 1.0
        for rate in self.acceptance:
            chance *= rate
            tokens += chance
        return tokens

    def summary(self) -> dict[str, Any]:
        """For records."""
        return {
            "held_out_loss": round(self.loss, 4),
            "acceptance": [round(rate, 4) for rate in self.acceptance],
            "tokens_a_round": round(self.tokens_a_round, 3),
        }

    def describe(self) -> str:
        """For people."""
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance)
        return f"loss {self.loss:.3f}, accepted {rates}, {self.tokens_a_round:.2f} tokens a round"


def compare(
    student: Student, batch: Batch, features: torch.Tensor, target_logits: torch.Tensor, count: int
) -> tuple[torch.Tensor, Score]:
    """The loss of a batch, and its score. count: drafts of each origin.

    features [B, S, W] and target_logits [B, S, V] are the target's. The loss is the sum over drafts k of
    ``DECAY ** k`` times the mean of KL(target || draft k).
    """
    score = Score()
    loss = target_logits.new_zeros((), dtype=torch.float32)
    length = batch.ids.shape[1]
    standing = torch.ones_like(batch.wanted[:, 2:])
    for draft, states in enumerate(student.drafts(batch.ids, batch.mask, features, min(count, length - 2))):
        wanted = batch.wanted[:, 2 + draft :]
        expected = target_logits[:, 1 + draft : length - 1][wanted]
        divergence, agrees = _diverge_in_parts(student, draft, states[wanted], expected)
        loss = loss + DECAY**draft * divergence.sum() / max(1, len(divergence))
        standing = standing[:, : wanted.shape[1]]
        score.reached.append(int((standing & wanted).sum()))
        standing = standing & torch.zeros_like(wanted).masked_scatter(wanted, agrees)
        score.accepted.append(int(standing.sum()))
        score.divergence.append(float(divergence.detach().sum()))
        score.positions.append(len(divergence))
    return loss, score


def _diverge_in_parts(
    student: Student, draft: int, states: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``diverge`` of a draft's states [n, ..]: never are the logits of all positions kept."""

    def one(states: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return diverge(expected, student.logits(states, draft), student.vocabulary)

    size = max(1, memory.KEPT // expected.shape[-1])
    parts = zip(states.split(size), expected.split(size), strict=True)
    found = [sparing(expected.numel(), one, *part) for part in parts]
    return torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])


def diverge(
    expected: torch.Tensor, found: torch.Tensor, vocabulary: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each position: KL(target || draft) in float32, and whether both have the same likeliest token.

    expected [n, V] and found [n, V_draft] are logits. With a ``vocabulary`` [V_draft] the target's distribution is
    renormalised on it, and positions whose likeliest token is outside teach nothing (0), as in SpecForge.
    """
    best = expected.argmax(-1)
    own = found.argmax(-1)
    if vocabulary is not None:
        expected, own = expected[:, vocabulary], vocabulary[own]
    wanted, has = expected.float().log_softmax(-1), found.float().log_softmax(-1)
    divergence = functional.kl_div(has, wanted, reduction="none", log_target=True).sum(-1)
    if vocabulary is not None:
        divergence = divergence * torch.isin(best, vocabulary)
    return divergence, own == best
