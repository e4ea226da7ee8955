"""Muon's steps, beside AdamW's."""

from __future__ import annotations

import pytest
import torch

from specbuild.training.muon import Muon, orthogonalised

RATE = 0.01


def parameters() -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """A vector and a matrix, with gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in [(8,), (8, 24)]]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made[0], made[1]


def test_steps_of_matrices_are_orthogonal_and_of_adamws_size() -> None:
    _, weight = parameters()
    before = weight.detach().clone()
    Muon([], [weight], lr=RATE, weight_decay=0.0).step()
    step = before - weight.detach()
    values = torch.linalg.svdvals(step)
    assert values.max() / values.min() < 2, "a gradient's differ by more"
    assert values.mean() == pytest.approx(0.2 * RATE * 24**0.5, rel=0.3)
    expected = 0.2 * RATE  # AdamW's mean square, for 8 of 24 dimensions of full rank.
    assert step.square().mean().sqrt() == pytest.approx(expected, rel=0.3)


def test_a_random_gradient_is_not_orthogonal() -> None:
    gradient = parameters()[1].grad
    assert gradient is not None
    values = torch.linalg.svdvals(gradient)
    assert values.max() / values.min() > 2
    assert torch.linalg.svdvals(orthogonalised(gradient.T)).mean() == pytest.approx(1, abs=0.3)


def test_the_rest_steps_as_with_adamw() -> None:
    (mine, matrix), (theirs, _) = parameters(), parameters()
    optimizers = Muon([mine], [matrix], lr=RATE, weight_decay=0.0), torch.optim.AdamW([theirs], RATE, weight_decay=0.0)
    for _ in range(3):
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = parameter.detach().sin()
            optimizer.step()
    assert torch.equal(mine, theirs)


def test_what_has_no_gradient_stays() -> None:
    vector, matrix = parameters()
    before = [one.detach().clone() for one in (vector, matrix)]
    vector.grad = matrix.grad = None
    Muon([vector], [matrix], lr=RATE).step()
    assert torch.equal(vector, before[0]) and torch.equal(matrix, before[1])
