"""What is trained is what runs: states of chains, losses and counts against plain formulae."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbuild.export.features import watched
from specbuild.training import memory
from specbuild.training.data.rows import Batch
from specbuild.training.eagle3 import Eagle3Student
from specbuild.training.losses import DECAY, Expected, Score, compare
from specbuild.training.student import Student
from tests.helpers.families import VOCAB
from tests.helpers.heads.made import DIALECTS, head_tensors, save_head, save_target, states_of, target_matrix
from tests.helpers.heads.reference import chain, fused

TOKENS = [5, 9, 200, 31, 7, 7, 120, 64, 2]
CHAIN = 3


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chains") / "target"
    save_target(directory)
    return directory


@pytest.mark.parametrize("name", ["specforge", "specforge, 3.1", "speculators", "speculators, two layers", "modelopt"])
def test_every_origins_chain_is_what_a_head_would_draft(random_target: Path, tmp_path: Path, name: str) -> None:
    """All origins are computed at once; the formula goes through each from its beginning."""
    dialect, tensors = DIALECTS[name], head_tensors(name)
    model: Any = AutoModelForCausalLM.from_pretrained(random_target).eval()
    student = Eagle3Student(save_head(tmp_path / "head", name), model, CHAIN)
    ids = torch.tensor([TOKENS, TOKENS[::-1]])
    with torch.no_grad():
        with watched(model, student.fusion) as features:
            model(ids)
        found = list(student.drafts(ids, torch.ones_like(ids), features(), CHAIN))
        logits = [student.logits(states) for states in found]
    features_ = fused(dialect, tensors, states_of(random_target, ids))
    embedding = target_matrix(random_target, "embed_tokens")
    drafted = torch.arange(VOCAB) if student.vocabulary is None else student.vocabulary
    for row in range(2):
        for origin in range(len(TOKENS) - 2):
            most = min(CHAIN, len(TOKENS) - 2 - origin)
            tokens = ids[row, : origin + 1 + most].tolist()
            expected = chain(dialect, tensors, embedding, features_[row], tokens, origin + 2)
            for draft in range(most):
                assert torch.allclose(logits[draft][row, origin], expected[draft][drafted], atol=1e-3, rtol=1e-3)


def test_what_is_computed_twice_to_spare_memory_is_the_same(
    random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(random_target).eval().requires_grad_(False)
    student = Eagle3Student(save_head(tmp_path / "head", "specforge"), model, CHAIN)
    ids = torch.tensor([TOKENS])
    batch = Batch(ids, torch.ones_like(ids), torch.ones_like(ids).bool())
    found = []
    for kept in (memory.KEPT, VOCAB * 2):
        monkeypatch.setattr(memory, "KEPT", kept)
        with watched(model, student.fusion) as features:
            logits = model(ids).logits
            loss, _ = compare(student, batch, features(), logits, CHAIN)
        found.append(torch.autograd.grad(loss, list(student.trained.values())))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))
    assert any(gradient.abs().max() > 1e-3 for gradient in found[0])


class Fixed(Student):
    """Says what it is told: logits [draft][B, origins, V]."""

    def __init__(self, said: list[torch.Tensor], vocabulary: torch.Tensor | None = None) -> None:
        super().__init__()
        self.said, self.vocabulary = said, vocabulary

    def drafts(self, ids: torch.Tensor, mask: torch.Tensor, features: torch.Tensor, count: int) -> Any:
        return iter(self.said[:count])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        raise AssertionError


def test_the_loss_is_the_divergence_at_answers_and_weighs_less_along_the_chain() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 6, 5, generator=generator)
    said = [torch.randn(2, 4 - draft, 5, generator=generator) for draft in range(2)]
    wanted = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1]]).bool()
    batch = Batch(torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64), wanted)
    loss, score = compare(Fixed(said), batch, torch.zeros(2, 6, 1), target, 2)
    expected = 0.0
    for draft in range(2):
        terms = []
        for row in range(2):
            for origin in range(4 - draft):
                if wanted[row, origin + 2 + draft]:
                    p, q = target[row, origin + 1 + draft].softmax(-1), said[draft][row, origin].softmax(-1)
                    terms.append(float((p * (p / q).log()).sum()))
        assert score.positions[draft] == len(terms)
        expected += DECAY**draft * sum(terms) / len(terms)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert score.loss == pytest.approx(expected, rel=1e-5)


def test_acceptance_counts_drafts_whose_predecessors_stand() -> None:
    """Draft 0 is right at two of three origins; draft 1 counts at these only."""
    right, wrong = torch.eye(4)[1] * 9, torch.eye(4)[2] * 9
    target = right.expand(1, 6, 4)
    said = [torch.stack([right, right, wrong, right])[None], torch.stack([right, wrong, right])[None]]
    wanted = torch.tensor([[0, 0, 1, 1, 1, 0]]).bool()
    batch = Batch(torch.zeros(1, 6, dtype=torch.int64), torch.ones(1, 6, dtype=torch.int64), wanted)
    _, score = compare(Fixed(said), batch, torch.zeros(1, 6, 1), target, 2)
    assert (score.reached, score.accepted) == ([3, 2], [2, 1])
    assert score.acceptance == [2 / 3, 1 / 2]
    assert score.tokens_a_round == pytest.approx(1 + 2 / 3 + 1 / 3)
    score.add(Score([1.0], [3], [3], [0]))
    assert score.acceptance == [2 / 6, 1 / 2]


def test_a_reduced_vocabulary_learns_nothing_where_the_target_is_outside() -> None:
    vocabulary = torch.tensor([0, 3])
    expected = torch.tensor([[5.0, 0, 0, 1], [0, 5.0, 0, 1], [0, 0, 0, 5.0]])
    found = torch.tensor([[2.0, 0], [2.0, 0], [2.0, 0]])
    divergence, agrees = Expected(expected, vocabulary).diverge(torch.arange(3), found)
    assert divergence[1] == 0
    assert agrees.tolist() == [True, False, False]
    p, q = expected[0, vocabulary].softmax(-1), found[0].softmax(-1)
    assert float(divergence[0]) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
