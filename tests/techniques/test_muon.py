"""Muon: the iteration against singular values in float64, the update against torch's own Muon, skipped steps, joined matrices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from rush.techniques.optimizer.muon_update import COEFFICIENTS, ITERATIONS, Muon, orthogonalize, scaled_update

SHAPES = [(1, 1), (7, 3), (3, 7), (16, 16), (65, 33)]
BETAS = (0.9, 0.95)


def by_singular_values(matrix: Tensor) -> Tensor:
    """The same polynomial of each singular value, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def gradients(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def made(parameters: Sequence[nn.Parameter], matrices: Sequence[nn.Parameter], **more: object) -> Muon:
    parts = {id(one): (one.shape[0],) for one in matrices}
    options = {"lr": 0.02, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1, "dtype": torch.float32, **more}
    return Muon([{"params": list(parameters)}], matrices=parts, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.stack(gradients([shape] * 3, seed=1))
    found = orthogonalize(matrices, torch.float32)
    for ours, matrix in zip(found, matrices, strict=True):
        assert torch.allclose(ours.double(), by_singular_values(matrix), atol=2e-5)


def test_singular_values_of_a_gradient_end_near_one() -> None:
    (matrix,) = gradients([(64, 48)], seed=2)
    before = torch.linalg.svdvals(matrix)
    after = torch.linalg.svdvals(orthogonalize(matrix[None], torch.float32)[0])
    assert before.max() / before.min() > 8
    assert 0.6 < after.min() <= after.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_torchs_own_muon_in_the_learning_rate_of_adamw(dtype: torch.dtype) -> None:
    shapes = [(12, 8), (8, 12), (12, 8), (9, 9)]
    ours = [nn.Parameter(value) for value in gradients(shapes, seed=3)]
    theirs = [nn.Parameter(value.clone().detach()) for value in ours]
    own = made(ours, ours, dtype=dtype)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for one, other, gradient in zip(ours, theirs, gradients(shapes, seed=10 + step), strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        own.step()
        reference.step()
    for one, other, start in zip(ours, theirs, gradients(shapes, seed=3), strict=True):
        moved = (other - start).norm()
        # torch iterates in bf16, which rounds each matmul to 8 bits.
        assert (one - other).norm() < 0.02 * moved
        assert (one - start).norm() > 0.9 * moved


def test_what_is_no_matrix_of_a_block_is_updated_by_adamw() -> None:
    shapes = [(6, 4), (4,), (10, 4)]
    ours = [nn.Parameter(value) for value in gradients(shapes, seed=4)]
    theirs = [nn.Parameter(value.clone().detach()) for value in ours[1:]]
    own = made(ours, ours[:1])
    reference = torch.optim.AdamW(theirs, lr=0.02, betas=BETAS, eps=1e-8, weight_decay=0.1)
    for step in range(3):
        given = gradients(shapes, seed=20 + step)
        for one, gradient in zip(ours, given, strict=True):
            one.grad = gradient.clone()
        for other, gradient in zip(theirs, given[1:], strict=True):
            other.grad = gradient.clone()
        own.step()
        reference.step()
    for one, other in zip(ours[1:], theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert set(own.state[ours[0]]) == {"momentum_buffer"}
    assert set(own.state[ours[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_matrices_that_are_stored_as_one_are_orthogonalized_one_by_one() -> None:
    (joined,) = gradients([(8 + 4 + 4, 8)], seed=5)
    found = scaled_update(joined[None], (8, 4, 4), torch.float32)[0]
    apart = [scaled_update(part[None], (len(part),), torch.float32)[0] for part in joined.split([8, 4, 4])]
    assert torch.equal(found, torch.cat(apart))
    whole = scaled_update(joined[None], (16,), torch.float32)[0]
    assert (found - whole).norm() > 0.1 * whole.norm()


def test_an_update_has_the_size_of_adamws() -> None:
    (matrix,) = gradients([(96, 64)], seed=6)
    update = scaled_update(matrix[None], (96,), torch.float32)[0]
    assert 0.15 < float(update.square().mean().sqrt()) < 0.25


def test_a_skipped_step_changes_nothing_and_gradients_are_divided_by_the_scale() -> None:
    shapes = [(6, 4), (4,)]
    ours = [nn.Parameter(value) for value in gradients(shapes, seed=7)]
    theirs = [nn.Parameter(value.clone().detach()) for value in ours]
    own, other = made(ours, ours[:1]), made(theirs, theirs[:1])
    for one, same, gradient in zip(ours, theirs, gradients(shapes, seed=8), strict=True):
        one.grad, same.grad = 4 * gradient, gradient.clone()
    own.found_inf, own.grad_scale = torch.zeros(()), torch.full((), 4.0)  # type: ignore[attr-defined]
    own.step()
    other.step()
    for one, same in zip(ours, theirs, strict=True):
        assert torch.allclose(one, same, atol=1e-6)
    before = [one.clone() for one in ours]
    states = [{key: value.clone() for key, value in own.state[one].items()} for one in ours]
    for one in ours:
        one.grad = torch.full_like(one, torch.nan)
    own.found_inf = torch.ones(())  # type: ignore[attr-defined]
    own.step()
    assert all(torch.equal(one, was) for one, was in zip(ours, before, strict=True))
    for one, was in zip(ours, states, strict=True):
        assert all(torch.equal(own.state[one][key], value) for key, value in was.items())
