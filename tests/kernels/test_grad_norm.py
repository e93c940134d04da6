"""The norm of many tensors in one launch: against float64 and torch's own, whatever their sizes and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels.grad_norm import grad_norm
from rush.kernels.grad_norm.reference import grad_norm as reference
from rush.kernels.grad_norm.triton import PIECE

SIZES = [(1,), (7,), (0,), (3, 5), (64, 64), (PIECE,), (PIECE + 1,), (2 * PIECE + 48,)]


def made(device: str, *dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = [
        torch.randn(size, generator=generator) * 10.0 ** (place % 3) for place, size in enumerate(SIZES)
    ]
    return [value.to(device, dtypes[place % len(dtypes)]) for place, value in enumerate(values)]


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "mixed"],
)
def test_the_norm_is_as_exact_as_plain_torch(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    tensors = made(device, *dtypes)
    exact = reference([tensor.double() for tensor in tensors])
    ours = grad_norm(tensors)
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    assert abs(ours.double() / exact - 1) < 3e-7  # sums of squares in fp32, rounded at the end


def test_every_element_counts_once(device: str) -> None:
    """Also where a tensor is not a whole number of pieces or vectors, and next to others."""
    for size in SIZES[:-1]:
        zeros = [torch.zeros(other, device=device) for other in SIZES]
        ones = torch.ones(size, device=device)
        assert grad_norm([*zeros, ones]).square().item() == pytest.approx(ones.numel(), rel=1e-6)


def test_what_is_no_number_shows(device: str) -> None:
    for spoiled in (float("inf"), float("nan")):
        tensors = made(device, torch.bfloat16)
        tensors[-1][-1] = spoiled
        assert not torch.isfinite(grad_norm(tensors))


def test_parts_of_other_tensors_and_cuts_made_before(device: str) -> None:
    """A view may begin at any address; how the work is cut is kept from step to step."""
    whole = torch.arange(1.0, 101.0, device=device)
    divisions: dict[object, object] = {}
    for _ in range(2):
        found = grad_norm([whole[1:50], whole[50:]], divisions)  # type: ignore[arg-type]
        assert found.item() == pytest.approx(whole[1:].double().norm().item(), rel=1e-6)
    assert len(divisions) == 1
    assert grad_norm([whole[:0]]).item() == 0


def test_repeats_give_the_same_bits(device: str) -> None:
    tensors = made(device, torch.float32)
    first = grad_norm(tensors)
    assert all(torch.equal(grad_norm(tensors), first) for _ in range(5 if device == "cpu" else 100))


def test_what_it_does_not_take_is_refused(device: str) -> None:
    with pytest.raises(KernelRefusal, match=r"fp32 and bf16; found torch\.float64"):
        grad_norm([torch.zeros(3, dtype=torch.float64, device=device)])
    with pytest.raises(KernelRefusal, match="contiguous"):
        grad_norm([torch.zeros(3, 4, device=device).t()])
    with pytest.raises(KernelRefusal, match="at least one"):
        grad_norm([])
