"""A draft compared with its target: what is minimized, and how many of its tokens would stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specbuild.training import memory
from specbuild.training.data.rows import Batch
from specbuild.training.memory import sparing
from specbuild.training.student import Student

DECAY = 0.8
"""Weight of a draft beside the one before it, as in EAGLE-3: it counts only if that one stands."""


@dataclass
class Score:
    """Sums over positions; those of several batches are added."""

    divergence: list[float] = field(default_factory=list)
    """Divergence of each draft from the target in nats, summed over positions."""
    positions: list[int] = field(default_factory=list)
    """Number of compared positions of each draft."""
    reached: list[int] = field(default_factory=list)
    """Number of these positions at which all drafts before have agreed with the target."""
    accepted: list[int] = field(default_factory=list)
    """Number of those at which this draft agrees too."""

    def add(self, other: Score) -> None:
        """Count another batch, too."""
        for name, mine in vars(self).items():
            setattr(self, name, [a + b for a, b in zip_longest(mine, getattr(other, name), fillvalue=0)])

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


class Expected:
    """The target's distributions where drafts are compared with them. They are made once, for all drafts."""

    def __init__(self, logits: Tensor, vocabulary: Tensor | None) -> None:
        """logits [N, V]. With a ``vocabulary`` [V_draft] they are renormalized on it, as in SpecForge."""
        self.best = logits.argmax(-1)
        """[N]: the likeliest token."""
        self._vocabulary = vocabulary
        self._counts = torch.ones_like(self.best) if vocabulary is None else torch.isin(self.best, vocabulary)
        size = logits.shape[-1] if vocabulary is None else len(vocabulary)
        self._probs = logits.new_empty(len(logits), size)
        self._entropy = logits.new_empty(len(logits), dtype=torch.float32)
        step = max(1, memory.KEPT // logits.shape[-1])
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            drafted = logits[part] if vocabulary is None else logits[part, vocabulary]
            logs = drafted.float().log_softmax(-1)
            probs = logs.exp()
            self._entropy[part] = -(probs * logs).sum(-1)
            self._probs[part] = probs

    @property
    def width(self) -> int:
        """Tokens that the draft may draft."""
        return self._probs.shape[-1]

    def diverge(self, rows: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of each of ``rows`` [n]: KL(target || draft) in float32, and whether both have the same likeliest token.

        draft_logits: the draft's logits, [n, V_draft]. Rows whose likeliest token it cannot draft teach nothing (0).
        """
        likeliest = draft_logits.argmax(-1)
        if self._vocabulary is not None:
            likeliest = self._vocabulary[likeliest]
        crossed = functional.cross_entropy(draft_logits.float(), self._probs[rows].float(), reduction="none")
        return (crossed - self._entropy[rows]) * self._counts[rows], likeliest == self.best[rows]


def compare(
    student: Student, batch: Batch, features: Tensor, target_logits: Tensor, count: int
) -> tuple[Tensor, Score]:
    """The loss of a batch, and its score. count: drafts of each origin.

    features [B, S, W] and target_logits [B, S, V] are the target's. The loss is the sum over drafts k of
    ``DECAY ** k`` times the mean of KL(target || draft k).
    """
    score = Score()
    loss = target_logits.new_zeros((), dtype=torch.float32)
    length = batch.ids.shape[1]
    wanted = batch.wanted[:, 2:]
    expected = Expected(target_logits[:, 1 : length - 1][wanted], student.vocabulary)
    rows = torch.zeros_like(wanted, dtype=torch.int64)
    rows[wanted] = torch.arange(len(expected.best), device=rows.device)
    standing = torch.ones_like(wanted)
    for draft, states in enumerate(student.drafts(batch.ids, batch.mask, features, min(count, length - 2))):
        drafted = wanted[:, draft:]
        divergence, agrees = _diverge_in_parts(student, states[drafted], expected, rows[:, draft:][drafted])
        loss = loss + DECAY**draft * divergence.sum() / max(1, len(divergence))
        standing = standing[:, : drafted.shape[1]]
        score.reached.append(int((standing & drafted).sum()))
        standing = standing & torch.zeros_like(drafted).masked_scatter(drafted, agrees)
        score.accepted.append(int(standing.sum()))
        score.divergence.append(float(divergence.detach().sum()))
        score.positions.append(len(divergence))
    return loss, score


def _diverge_in_parts(student: Student, states: Tensor, expected: Expected, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``Expected.diverge`` of a draft's states [n, ..]: never are the logits of all positions kept."""

    def diverge(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return expected.diverge(rows, student.logits(states))

    size = max(1, memory.KEPT // expected.width)
    parts = zip(states.split(size), rows.split(size), strict=True)
    results = [sparing(len(part) * expected.width, diverge, part, row_part) for part, row_part in parts]
    return torch.cat([part[0] for part in results]), torch.cat([part[1] for part in results])
