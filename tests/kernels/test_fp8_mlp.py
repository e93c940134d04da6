"""Llama's MLP in 8 bits as one function: SwiGLU's kernels, the matmuls, all gradients, against float64 and `fp8_linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.fp8_linear import fp8_linear
from rush.kernels.fp8_linear.reference import E4M3, E5M2, quantize, scale_for
from rush.kernels.fp8_mlp import fp8_mlp, reference
from rush.kernels.fp8_mlp import triton as kernels

WHAT = ("out", "dx", "dgate and dup", "ddown")
WAYS: list[dict[str, Any]] = [{}, {"casts": "kernel"}, {"fast_accum": "all"}]
# tokens, width of the MLP: smaller than a tile, not a multiple of one, several of them
SHAPES = [(16, 16), (144, 48), (48, 528)]
LARGE = [(4096, 2048), (1040, 3008)]


@pytest.fixture(autouse=True)
def _units(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit matmuls")


def wide_tensors(device: str, tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A gradient from above and gate|up, with rows of unlike size."""
    generator = torch.Generator(device).manual_seed(0)
    dh = torch.randn(tokens, width, generator=generator, device=device) * 1e-4
    joined = torch.randn(tokens, 2 * width, generator=generator, device=device)
    joined *= torch.logspace(-2, 1, tokens, device=device)[:, None]
    return dh.to(dtype), joined.to(dtype)


def inputs(device: str, tokens: int = 48, hidden: int = 32, width: int = 80) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = {
        "x": (tokens, hidden),
        "joined": (2 * width, hidden),
        "down": (hidden, width),
        "dout": (tokens, hidden),
    }
    sizes = {"x": 1.0, "joined": 0.2, "down": 0.2, "dout": 1e-4}
    return [
        (torch.randn(shape, generator=generator, device=device) * sizes[name]).bfloat16()
        for name, shape in shapes.items()
    ]


def results(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, down: Tensor, dout: Tensor
) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, down)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def layers_alone(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    """The same MLP by `fp8_linear` and plain torch between: what it takes the place of."""
    gate, up = fp8_linear(x, weight).chunk(2, dim=-1)
    return fp8_linear(F.silu(gate) * up, down)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def differing(ours: Tensor, exact: Tensor) -> float:
    """The part of the values that are not those rounded from float64, none of which may be off by more than a step."""
    steps = (bits(ours).int() - bits(exact).int()).abs()
    assert int(steps.max()) <= 1
    return float((steps > 0).double().mean())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_the_kernels_make_what_float64_makes_rounded_once(device: str, dtype: torch.dtype) -> None:
    """fp32 inside: at most one value in a thousand lies so near the middle of two 8-bit numbers that it falls otherwise."""
    for shape in [*SHAPES, *LARGE] if device == "cuda" else SHAPES:
        dh, joined = wide_tensors(device, *shape, dtype)
        h, djoined = (
            reference.swiglu(joined.double()),
            reference.swiglu_gradient(dh.double(), joined.double()),
        )
        largest, steepest = kernels.amax(joined)
        assert torch.allclose(largest.double(), h.abs().amax(), rtol=1e-6)
        h_scale, scale = scale_for(largest, E4M3), scale_for(kernels.bound(dh, steepest), E5M2)
        ours = kernels.forward(joined, h_scale)
        assert differing(ours, (h * h_scale).float().to(E4M3)) <= 1e-3
        out, out_transposed, h_transposed = kernels.backward(dh, joined, scale, h_scale)
        assert differing(out, (djoined * scale).float().to(E5M2)) <= 1e-3
        for transposed, plain in ((out_transposed, out), (h_transposed, ours)):
            assert transposed.is_contiguous()
            assert torch.equal(bits(transposed.t()), bits(plain)), "the same bits, transposed over"


def test_the_forward_scale_is_that_of_a_plain_cast(device: str) -> None:
    _, joined = wide_tensors(device, 64, 96, torch.bfloat16)
    h_scale = scale_for(kernels.amax(joined)[0], E4M3)
    assert torch.equal(h_scale.reciprocal(), quantize(reference.swiglu(joined), E4M3, False).inv_scale)


@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_the_bound_is_never_below_the_largest_gradient_and_seldom_far_above(
    device: str, outlier: float
) -> None:
    """A row of a segment whose largest dh and steepest place lie apart makes it too large; within a factor of 8 here, and
    with one activation as far out as some models have them within that much more."""
    for seed in range(2):
        torch.manual_seed(seed)
        dh, joined = wide_tensors(device, 48, 528, torch.bfloat16)
        dh[torch.randperm(48)] *= torch.logspace(-3, 0, 48, device=device)[:, None].bfloat16()
        joined[seed, 7 + 60 * seed] = outlier
        exact = reference.swiglu_gradient(dh.double(), joined.double()).abs().amax()
        bound = kernels.bound(dh, kernels.amax(joined)[1]).double()
        assert exact * (1 - 1e-6) <= bound <= 8 * outlier * exact


@pytest.mark.parametrize("shut", ["gate", "up"])
def test_the_bound_sees_either_derivative_where_the_other_is_zero(device: str, shut: str) -> None:
    dh, joined = wide_tensors(device, 16, 272, torch.bfloat16)
    joined.chunk(2, dim=1)[("gate", "up").index(shut)].zero_()
    exact = reference.swiglu_gradient(dh.double(), joined.double()).abs().amax()
    assert 0 < exact * (1 - 1e-6) <= kernels.bound(dh, kernels.amax(joined)[1]).double()


def test_what_is_not_finite_stays_so_and_zeros_are_zeros(device: str) -> None:
    for bad in (torch.nan, torch.inf):
        x, weight, down, dout = inputs(device)
        x[3, 5] = bad
        assert not bool(results(fp8_mlp, x, weight, down, dout)[0].isfinite().all()), (
            "a run that diverged must be seen to"
        )
        x, weight, down, dout = inputs(device)
        dout[3, 5] = bad
        for gradient in results(fp8_mlp, x, weight, down, dout)[1:]:
            assert not bool(gradient.isfinite().all())
    nothing = [torch.zeros_like(tensor) for tensor in inputs(device)]
    assert all(bool((found == 0).all()) for found in results(fp8_mlp, *nothing))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_matmuls_are_those_of_the_fp8_operands(
    device: str, how: dict[str, Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Against the written-out MLP with matmuls in float64, where only operands are rounded: off by no more than the
    written-out one in bf16, doubled (fast accumulation on a GPU: four times)."""
    sizes = [(48, 32, 80), (16, 16, 16), *([(2048, 1024, 3008)] if device == "cuda" else [])]
    for size in sizes:
        given = inputs(device, *size)
        ours = results(lambda *leaves: fp8_mlp(*leaves, **how), *given)
        exact, plain = (reference.fp8_mlp(*given, dtype) for dtype in (torch.float64, torch.bfloat16))
        for what, mine, theirs, truth in zip(WHAT, ours, plain, exact, strict=True):
            allowed = (4 if device == "cuda" else 2) * error(theirs, truth)
            assert mine.dtype == torch.bfloat16
            assert error(mine, truth) <= allowed, f"{what} of {size}: {error(mine, truth)} > {allowed}"


def test_it_is_as_near_the_plain_mlp_as_layers_alone_are(
    device: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    """SwiGLU and its gradient are rounded once, to 8 bits, where layers alone round them to bf16 first: that moves a few
    values to the next 8-bit number, by less than half of what the 8 bits cost. In fp32 both cast the same values."""
    sixteen = inputs(device, 256, 64, 192)
    exact = results(
        lambda x, weight, down: reference.swiglu(x @ weight.t()) @ down.t(), *(t.double() for t in sixteen)
    )
    for dtype, share in ((torch.bfloat16, 0.5), (torch.float32, 0.02)):
        if device == "cuda" and dtype == torch.float32:
            continue  # a GPU takes bf16
        given = [tensor.to(dtype) for tensor in sixteen]
        ours, alone = results(fp8_mlp, *given), results(layers_alone, *given)
        for what, mine, theirs, truth in zip(WHAT, ours, alone, exact, strict=True):
            assert error(mine, truth) <= 1.02 * error(theirs, truth), what
            assert error(mine, theirs.double()) <= share * error(theirs, truth), what
            assert 0.005 < error(mine, truth) < 0.15, what


@pytest.mark.parametrize(
    "how", [WAYS[0], *(pytest.param(how, marks=pytest.mark.slow) for how in WAYS[1:])], ids=str
)
def test_it_compiles_without_a_graph_break_and_means_the_same(
    device: str, backend: str, how: dict[str, Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    given = inputs(device)

    def block(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
        return x + fp8_mlp(x * 2, weight, down, **how)

    compiled = results(torch.compile(block, fullgraph=True, backend=backend), *given)
    limit = 0.02 if device == "cuda" else 1e-6
    for what, mine, eager in zip(WHAT, compiled, results(block, *given), strict=True):
        assert error(mine, eager.double()) <= limit, what


def test_it_can_be_recomputed_and_takes_tokens_of_any_shape(device: str) -> None:
    x, weight, down, dout = inputs(device)
    flat = results(fp8_mlp, x, weight, down, dout)

    def recomputed(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
        out: Tensor = checkpoint(fp8_mlp, x.view(3, 16, 32), weight, down, use_reentrant=False)
        return out.view(48, 32)

    again = results(recomputed, x, weight, down, dout)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, flat, strict=True))


def test_it_keeps_the_input_in_8_bits_and_gate_and_up_and_nothing_wider(device: str) -> None:
    x, weight, down, _ = inputs(device, 64, 32, 96)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        fp8_mlp(x.requires_grad_(), weight.requires_grad_(), down.requires_grad_())
    weights = {weight.data_ptr(), down.data_ptr()}
    held = sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in weights and tensor.dim())
    steepest = 4 * kernels.segments(96)
    assert held == 64 * (32 * 1 + 2 * 96 * 2 + steepest)


def test_master_weights_get_gradients_in_their_own_dtype_and_frozen_ones_none(device: str) -> None:
    x, weight, down, dout = inputs(device)
    masters = weight.float().requires_grad_(), down.float().requires_grad_()
    fp8_mlp(x, *masters).backward(dout)
    assert all(master.grad is not None and master.grad.dtype == torch.float32 for master in masters)
    fp8_mlp(x.requires_grad_(), weight, down).backward(dout)
    assert weight.grad is None
    assert x.grad is not None


def test_the_same_bits_every_time(device: str, repeats: int) -> None:
    given = inputs(device)
    first = results(fp8_mlp, *given)
    for _ in range(repeats):
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(results(fp8_mlp, *given), first, strict=True)
        )


def test_what_it_does_not_support_is_refused(device: str) -> None:
    x, weight, down, _ = inputs(device)
    with pytest.raises(KernelRefusal, match="fp8_mlp takes fp32, bf16 and fp16"):
        fp8_mlp(x.double(), weight, down)
    with pytest.raises(KernelRefusal, match="fp8_mlp needs tokens, inputs and outputs in multiples of 16"):
        fp8_mlp(x[:30], weight, down)
    for wrong in (weight[:80], torch.cat((weight, weight))):
        with pytest.raises(KernelRefusal, match="concatenated weight of gate and up"):
            fp8_mlp(x, wrong, down)
