"""RMSNorm, with and without the residual add, against float64 and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.rmsnorm import add_rmsnorm, reference, rmsnorm
from rush.models.layers import RMSNorm

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 3), (3, 7), (2, 5, 64), (9, 300)]
MORE_ROWS_THAN_PROGRAMS = (37, 1100)
# On a GPU every width is another kernel to compile, so each has its reason.
LARGE = [(3, 7), (1000, 768), (3000, 2048), (7, 5000), (3, 65536)]
LARGE_SUMS = [(9, 300), (3000, 2048), (300, 8192)]


def inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=generator, device=device)).to(dtype)
    return x, residual, weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_gradients_are_as_near_to_float64_as_plain_torch(
    device: str, dtype: torch.dtype, compare: Callable[..., None]
) -> None:
    # The interpreter is slow: the last shape in one dtype only.
    shapes = SHAPES + [MORE_ROWS_THAN_PROGRAMS] * (dtype == torch.bfloat16)
    for shape in LARGE if device == "cuda" else shapes:
        x, _, weight = inputs(device, shape, dtype)
        compare(partial(rmsnorm, eps=EPS), partial(reference.rmsnorm, eps=EPS), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum_and_gradients_are_as_near_to_float64_as_plain_torch(
    device: str, dtype: torch.dtype, compare: Callable[..., None]
) -> None:
    shapes = SHAPES[1::2] + [MORE_ROWS_THAN_PROGRAMS] * (dtype == torch.float32)
    for shape in LARGE_SUMS if device == "cuda" else shapes:
        compare(
            partial(add_rmsnorm, eps=EPS),
            partial(reference.add_rmsnorm, eps=EPS),
            *inputs(device, shape, dtype),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_one_element(device: str, dtype: torch.dtype) -> None:
    """Its gradient is the difference of two equal terms: nothing, up to fp32 rounding of the terms."""
    x, _, weight = inputs(device, (5, 1), dtype)
    x.requires_grad_()
    out = rmsnorm(x, weight, EPS)
    torch.testing.assert_close(out, reference.rmsnorm(x, weight, EPS))
    (dx,) = torch.autograd.grad(out.sum(), x)
    terms = weight.float().abs() / x.detach().float().abs()
    # 1 - x² / (x² + eps) is what is left of the terms, about eps / x²; for a centred row exactly nothing is.
    left = EPS / x.detach().float().square()
    assert bool((dx.float().abs() <= terms * (2 * left + 1e-6)).all())


def test_the_reference_is_the_model_s_own_norm(device: str) -> None:
    x, _, weight = inputs(device, (4, 64), torch.bfloat16)
    module = RMSNorm(64, EPS).to(device, torch.bfloat16)
    module.weight.data.copy_(weight)
    assert torch.equal(reference.rmsnorm(x, weight, EPS), module(x))


def test_strides_of_rows_are_followed_and_other_strides_are_copied(
    device: str, compare: Callable[..., None]
) -> None:
    x, residual, weight = inputs(device, (6, 96), torch.float32)
    ours, plain = partial(add_rmsnorm, eps=EPS), partial(reference.add_rmsnorm, eps=EPS)
    compare(ours, plain, x[:, :64], residual[:, 32:], weight[:64])
    compare(ours, plain, x[::2], residual[1::2], weight)
    compare(ours, plain, x.view(6, 8, 12).transpose(0, 1), residual.view(8, 6, 12), weight[:12])
    compare(ours, plain, x[:, ::2], residual[:, 1::2], weight[::2])


def test_dtypes_mix_as_torch_promotes_them(device: str) -> None:
    x, residual, weight = inputs(device, (3, 32), torch.float32)
    narrow = x.to(torch.bfloat16).requires_grad_()
    residual.requires_grad_()
    out, total = add_rmsnorm(narrow, residual, weight, EPS)
    assert (out.dtype, total.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(total, residual + narrow)
    (out.sum() + total.square().sum()).backward()
    assert narrow.grad is not None
    assert residual.grad is not None
    assert (narrow.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(narrow.grad, residual.grad.to(torch.bfloat16))
    assert rmsnorm(narrow, weight, EPS).dtype == torch.float32
    rounded = rmsnorm(x, weight, EPS, dtype=torch.bfloat16)
    assert torch.equal(rounded, rmsnorm(x, weight, EPS).to(torch.bfloat16))


@pytest.mark.parametrize("used", ["norm", "sum"])
def test_a_result_that_is_not_used_gives_no_gradient(device: str, used: str) -> None:
    x, residual, weight = (tensor.requires_grad_() for tensor in inputs(device, (3, 32), torch.float32))
    wanted = [reference.add_rmsnorm(x, residual, weight, EPS), add_rmsnorm(x, residual, weight, EPS)]
    pick = 0 if used == "norm" else 1
    plain, ours = (
        torch.autograd.grad(out[pick].square().sum(), (x, residual, weight), allow_unused=True)
        for out in wanted
    )
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_it_compiles_without_a_graph_break(device: str, backend: str, compare: Callable[..., None]) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = add_rmsnorm(x, residual, weight, EPS)
        return rmsnorm(normed * 2, weight, EPS), total

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = reference.add_rmsnorm(x, residual, weight, EPS)
        return reference.rmsnorm(normed * 2, weight, EPS), total

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    compare(compiled, plain, *inputs(device, (5, 64), torch.float32))


def test_it_can_be_recomputed(device: str) -> None:
    x, residual, weight = (tensor.requires_grad_() for tensor in inputs(device, (5, 64), torch.bfloat16))

    def body(x: Tensor) -> Tensor:
        normed, total = add_rmsnorm(x, residual, weight, EPS)
        return rmsnorm(total, weight, EPS) + normed

    plain = torch.autograd.grad(body(x).float().square().sum(), (x, residual, weight))
    again = checkpoint(body, x, use_reentrant=False)
    recomputed = torch.autograd.grad(again.float().square().sum(), (x, residual, weight))
    for mine, theirs in zip(recomputed, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_the_same_bits_every_time(device: str, repeats: int) -> None:
    shape = (3000, 2048) if device == "cuda" else (40, 64)
    x, residual, weight = (tensor.requires_grad_() for tensor in inputs(device, shape, torch.bfloat16))
    seen = None
    for _ in range(repeats):
        out, total = add_rmsnorm(x, residual, weight, EPS)
        gradients = torch.autograd.grad((out * total).float().sum(), (x, residual, weight))
        found = [out, total, *gradients]
        assert seen is None or all(torch.equal(mine, first) for mine, first in zip(found, seen, strict=True))
        seen = found


def test_torch_finds_the_operators_well_formed(device: str) -> None:
    x, residual, weight = (tensor.requires_grad_() for tensor in inputs(device, (3, 16), torch.float32))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.rush.rmsnorm.default, (x, weight, EPS, torch.float32), test_utils=checks)
    torch.library.opcheck(
        torch.ops.rush.add_rmsnorm.default, (x, residual, weight, EPS, torch.float32), test_utils=checks
    )


def test_an_empty_batch_works(device: str) -> None:
    x, weight = (
        torch.zeros(0, 8, device=device, requires_grad=True),
        torch.ones(8, device=device, requires_grad=True),
    )
    out = rmsnorm(x, weight, EPS)
    assert out.shape == (0, 8)
    dx, dweight = torch.autograd.grad(out.sum(), (x, weight))
    assert dx.shape == (0, 8)
    assert torch.equal(dweight, torch.zeros(8, device=device))


def test_what_it_does_not_support_is_refused(device: str) -> None:
    x, residual, weight = inputs(device, (3, 16), torch.float32)
    with pytest.raises(KernelRefusal, match="takes fp32, bf16 and fp16"):
        rmsnorm(x.double(), weight.double(), EPS)
    with pytest.raises(KernelRefusal, match="as long as the last dim"):
        rmsnorm(x, weight[:8], EPS)
    with pytest.raises(KernelRefusal, match="of the input's shape"):
        add_rmsnorm(x, residual[:1], weight, EPS)
    with pytest.raises(KernelRefusal, match="at most 65536 wide"):
        rmsnorm(x.new_zeros(1, 70000), x.new_zeros(70000), EPS)


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count() -> None:
    rows, width = 2**31 // 2048 + 3, 2048
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    out = rmsnorm(x, weight, EPS)
    tail = slice(rows - 3, rows)
    torch.testing.assert_close(out[tail], reference.rmsnorm(x[tail], weight, EPS), rtol=2e-2, atol=1e-3)
