"""The training loop: steps, comparison on held-out text, and ends that can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specbuild.export.features import watched
from specbuild.hf.model_facts import vocab_size_of
from specbuild.progress import deferred_signals
from specbuild.training.data.rows import Batch, Data
from specbuild.training.losses import Score, compare
from specbuild.training.muon import Muon
from specbuild.training.student import Student

WARM_UP = 0.05
"""Share of the steps in which the learning rate rises; then it falls to nothing, along a line."""
_LARGEST_GRADIENT = 1.0
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Plan:
    """How long, and how fast."""

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    save_steps: int
    """Steps between comparisons, each with a checkpoint."""
    num_drafts: int
    """Compared on held-out text."""
    optimizer: str = "adamw"

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        rising = (step + 1) / max(1.0, WARM_UP * self.steps)
        return self.learning_rate * min(rising, 1.0, (1 - step / self.steps) / (1 - WARM_UP))


class Trainer:
    """A draft on its way from step ``step``. What a step does follows from its number and the state alone."""

    def __init__(self, student: Student, target: PreTrainedModel, data: Data, plan: Plan, dtype: torch.dtype) -> None:
        """dtype: linear layers compute in it. The parameters are float32."""
        self.student, self.target, self.data, self.plan = student, target, data, plan
        self._dtype = dtype
        self.step = 0
        self.optimizer = _optimizer(student, target, plan.optimizer)

    def run(self, advance: Callable[[], None], at_pause: Callable[[float, bool], None]) -> None:
        """Train to the end. at_pause: called every ``save_steps`` and at the end, with the loss since and False.

        Ctrl-C and SIGTERM take effect when the step has ended and ``at_pause`` was called with True.
        """
        losses: list[float] = []
        with deferred_signals(second_ends=True) as stopped:
            while self.step < self.plan.steps:
                losses.append(self._train(self.data.batch(self.step, self.plan.batch_size, self.plan.seed)))
                self.step += 1
                advance()
                if stopped.is_set():
                    at_pause(sum(losses) / len(losses), True)
                    return
                if self.step % self.plan.save_steps == 0 or self.step == self.plan.steps:
                    at_pause(sum(losses) / len(losses), False)
                    losses.clear()

    def _train(self, batch: Batch) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step)
        loss, _ = self._compare(batch, self.student.trained_drafts)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.student.trained.values(), _LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def compare_held_out(self) -> Score:
        """The draft beside the target on held-out text."""
        total = Score()
        with torch.no_grad():
            for batch in self.data.held_out_batches(self.plan.batch_size):
                total.add(self._compare(batch, self.plan.num_drafts)[1])
        return total

    def _compare(self, batch: Batch, count: int) -> tuple[torch.Tensor, Score]:
        batch = batch.to(self.target.device)
        mixed = self._dtype != torch.float32
        with (
            torch.autocast(self.target.device.type, self._dtype, enabled=mixed),
            watched(self.target, self.student.fusion) as features,
        ):
            with torch.no_grad():
                output = self.target(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
            return compare(self.student, batch, features(), output.logits, count)


def _optimizer(student: Student, target: PreTrainedModel, name: str) -> torch.optim.Optimizer:
    """Muon is for the matrices between hidden states; embeddings and output layers have a row for each token."""
    if name == "adamw":
        return torch.optim.AdamW(student.trained.values(), betas=_BETAS, weight_decay=0.0)
    vocabularies = {vocab_size_of(target)} | ({len(student.vocabulary)} if student.vocabulary is not None else set())
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in student.trained.values():
        is_hidden = parameter.ndim == 2 and vocabularies.isdisjoint(parameter.shape)
        (matrices if is_hidden else others).append(parameter)
    return Muon(others, matrices, betas=_BETAS, weight_decay=0.0)
