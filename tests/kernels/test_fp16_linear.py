"""Matmuls with fp16 operands on an ARM CPU: the bits their definition says, near the exact result, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels import fp16_linear as kernel
from rush.kernels.fp16_linear import fp16_linear, reference
from rush.kernels.fp16_linear.reference import INNER, scaled

UNIT = 2.0**-11
"""Half a unit in the last place of fp16, relative to the number."""
SHAPES = [(1, 1, 1), (3, 5, 7), (8, 128, 16), (64, 64, 64), (37, 75, 45), (65, 129, 17), (130, 700, 66)]


@pytest.fixture
def built() -> None:
    if reason := kernel.cannot_run():
        pytest.skip(f"the kernel cannot run here: {reason}")
    kernel.load()


def random(*dims: int, seed: int = 0) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed + 13 * len(dims)))


def matmul(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.rush.fp16_matmul(left, right, bias)
    return out


def defined(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """The matmul as the kernel computes it, step by step: each multiply-add rounded once to fp16, blocks added up in fp32.

    In NumPy, whose cast from float64 to fp16 rounds once; torch's goes by way of fp32.
    """
    (a, a_units), (b, b_units) = scaled(left), scaled(right.t())
    a, b, a_units, b_units = (part.double().numpy() for part in (a, b, a_units, b_units))
    total = np.zeros((len(a), len(b)), np.float32)
    if bias is not None:
        total += bias.numpy()
    for start in range(0, a.shape[1], INNER):
        partial = np.zeros(total.shape, np.float16)
        for k in range(start, min(start + INNER, a.shape[1])):
            partial = (partial.astype(np.float64) + np.outer(a[:, k], b[:, k])).astype(np.float16)
        back = np.outer(a_units[:, start], b_units[:, start])
        total = (total + partial.astype(np.float64) * back).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["alone", "with a bias"])
def test_it_gives_the_bits_of_its_definition(
    shape: tuple[int, int, int], with_bias: bool, built: None
) -> None:
    m, k, n = shape
    left, right = random(m, k), random(k, n, seed=1)
    bias = random(n, seed=2) if with_bias else None
    assert torch.equal(matmul(left, right, bias), defined(left, right, bias))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e10])
def test_a_scale_for_each_block_keeps_large_and_small_numbers(size: float, built: None) -> None:
    left, right = random(40, 300) * size, random(300, 20, seed=1)
    left[:, :INNER] *= 1e-6  # a block far below the others has a scale of its own
    assert torch.equal(matmul(left, right), defined(left, right))
    alone = matmul(left[:, :INNER].contiguous(), right[:INNER])
    assert relative(alone, left[:, :INNER].double() @ right[:INNER].double()) < 4 * expected_error(INNER)


def expected_error(inner: int) -> float:
    """Of a matmul of normal numbers, relative to its size, by a random walk.

    A rounding of a number between powers of two is uniform in ± half a unit: on average (UNIT² / 3) / 2 of its square, for
    mantissas spread evenly over [1, 2). Partial sums of j products have a square of j (in units of one's); of `inner` steps that is
    inner² / 2 in all, against inner for the result. The operands are rounded once each.
    """
    steps = min(inner, INNER)
    return math.sqrt((steps / 2 + 2) * UNIT**2 / 6)


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(2048, 128, 384), (512, 512, 128), (256, 48, 2048)]
)
def test_forward_and_gradients_are_as_near_as_a_random_walk_allows(
    tokens: int, inputs: int, outputs: int, built: None
) -> None:
    x, weight = random(tokens, inputs).requires_grad_(), random(outputs, inputs, seed=1).requires_grad_()
    bias, above = random(outputs, seed=2).requires_grad_(), random(tokens, outputs, seed=3)
    out = fp16_linear(x, weight, bias)
    dx, dweight, dbias = torch.autograd.grad(out, (x, weight, bias), above)
    wide = [tensor.detach().double() for tensor in (x, weight, bias, above)]
    exact = torch.nn.functional.linear(*wide[:3])
    for ours, truth, inner in (
        (out.detach(), exact, inputs),
        (dx, wide[3] @ wide[1], outputs),
        (dweight, wide[3].t() @ wide[0], tokens),
    ):
        assert 0.5 * expected_error(inner) < relative(ours, truth) < 1.5 * expected_error(inner)
    assert relative(dbias, wide[3].sum(0)) < 1e-5


def test_what_the_definition_in_torch_leaves_out_is_the_rounding_of_sums(built: None) -> None:
    x, weight, bias, above = random(70, 200), random(50, 200, seed=1), random(50, seed=2), random(70, 50)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    out = fp16_linear(*leaves)
    gradients = torch.autograd.grad(out, leaves, above)
    expected = reference.fp16_linear(x, weight, bias), *reference.fp16_linear_gradients(above, x, weight)
    for ours, theirs, inner in zip((out.detach(), *gradients), expected, (200, 50, 70, 70), strict=True):
        assert relative(ours, theirs.double()) < 1.5 * expected_error(inner)


def test_it_reads_any_strides_and_offsets(built: None) -> None:
    wide, other = random(150, 333), random(333, 90, seed=1)
    for left, right in (
        (wide[3:, 5:70], other[5:70, 1:]),
        (wide.t()[:80], wide[:, 2:40]),
        (wide[::2, ::3], other[::3, ::2]),
        (wide[:1].expand(9, -1), other.t().contiguous().t()),
        (wide[:, :1], other[:1]),
    ):
        assert torch.equal(matmul(left, right), defined(left.contiguous(), right.contiguous()))


def test_no_tokens_give_no_results(built: None) -> None:
    x, weight = torch.empty(0, 8, requires_grad=True), random(5, 8).requires_grad_()
    out = fp16_linear(x, weight)
    assert out.shape == (0, 5)


def test_what_is_not_finite_stays_where_it_is(built: None) -> None:
    x, weight = random(4, 32), random(6, 32, seed=1)
    x[1, 3], x[2, 5] = math.nan, math.inf
    out = fp16_linear(x, weight)
    assert bool(out[1].isnan().all())
    assert not bool(out[2].isfinite().any())
    assert bool(out[[0, 3]].isfinite().all())


def test_repeats_and_other_numbers_of_threads_give_the_same_bits(built: None) -> None:
    def made() -> tuple[Tensor, ...]:
        x, weight = random(300, 160).requires_grad_(), random(200, 160, seed=1).requires_grad_()
        bias = random(200, seed=2).requires_grad_()
        out = fp16_linear(x, weight, bias)
        return out.detach(), *torch.autograd.grad(out, (x, weight, bias), random(300, 200, seed=3))

    first, threads = made(), torch.get_num_threads()
    try:
        for count in [threads] * 20 + [1, 2, 3]:
            torch.set_num_threads(count)
            assert all(map(torch.equal, made(), first))
    finally:
        torch.set_num_threads(threads)


def test_only_required_gradients_are_computed(built: None) -> None:
    x, weight, bias = random(9, 20), random(7, 20, seed=1), random(7, seed=2)
    above = random(9, 7, seed=3)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    every = torch.autograd.grad(fp16_linear(*leaves), leaves, above)
    for wanted in range(3):
        own = [
            tensor.clone().requires_grad_(which == wanted) for which, tensor in enumerate((x, weight, bias))
        ]
        (found,) = torch.autograd.grad(fp16_linear(*own), [own[wanted]], above)
        torch.testing.assert_close(found, every[wanted], rtol=1e-6, atol=1e-6)


def test_torch_finds_no_fault_with_the_operators(built: None) -> None:
    """Schema, fake tensors, autograd registration and compilation, by torch's own checks."""
    left, right, bias = (
        tensor.requires_grad_() for tensor in (random(5, 9), random(9, 4, seed=1), random(4, seed=2))
    )
    torch.library.opcheck(torch.ops.rush.fp16_matmul, (left, right, bias))
    torch.library.opcheck(torch.ops.rush.fp16_matmul_with_row_sums, (left.detach(), right.detach()))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_it_is_one_graph_and_the_same_bits_also_when_computed_again(built: None) -> None:
    weight, bias = random(24, 16).requires_grad_(), random(24, seed=1).requires_grad_()

    def model(x: Tensor) -> Tensor:
        return fp16_linear(x, weight, bias).relu()

    def again(x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return out

    def made(function: object) -> tuple[Tensor, ...]:
        x = random(2, 10, 16).requires_grad_()
        out = function(x)  # type: ignore[operator]
        return out.detach(), *torch.autograd.grad(out.sum(), (x, weight, bias))

    torch._dynamo.reset()
    expected = made(model)
    for function in (again, torch.compile(model, fullgraph=True, backend="aot_eager")):
        assert all(map(torch.equal, made(function), expected))


def test_what_it_does_not_support_it_refuses(built: None) -> None:
    x, weight = random(3, 8), random(5, 8)
    with pytest.raises(KernelRefusal, match=r"takes fp32 .* found torch\.bfloat16"):
        fp16_linear(x.bfloat16(), weight)
    with pytest.raises(KernelRefusal, match="a weight of"):
        fp16_linear(x, random(5, 9))
    with pytest.raises(KernelRefusal, match=r"a bias of \[outputs\]"):
        fp16_linear(x, weight, random(4))


def test_where_it_cannot_run_it_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_library", None)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert kernel.cannot_run() == "it needs an ARM CPU, and this is x86_64"
    with pytest.raises(KernelRefusal, match="cannot run here: it needs an ARM CPU"):
        fp16_linear(random(2, 3), random(4, 3))


def test_without_a_compiler_it_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if reason := kernel.lacks_fp16_arithmetic():
        pytest.skip(f"the kernel cannot run here: {reason}")
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert kernel.cannot_run() == "there is no C++ compiler (no-such-compiler)"
