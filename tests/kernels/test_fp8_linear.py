"""Linear layers with fp8 operands: the casts, the matmuls, the gradients, emulated on a CPU and real on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.fp8_linear import fp8_linear, reference
from rush.kernels.fp8_linear.operands import _cast_transpose
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Fp8Tensor, quantize, scale_for

RECIPES = ["tensorwise", "rowwise"]
WAYS: list[dict[str, Any]] = [
    {"recipe": "tensorwise"},
    {"recipe": "rowwise"},
    {"recipe": "tensorwise", "casts": "kernel"},
    {"recipe": "tensorwise", "fast_accum": "all"},
]
# tokens, inputs, outputs
SHAPES = [(16, 16, 16), (48, 32, 80), (32, 96, 16)]
LARGE = [(4096, 2048, 512), (1040, 768, 3072)]


@pytest.fixture(autouse=True)
def _units(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit matmuls")


def inputs(device: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, outputs = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, device=device)
    weight = torch.randn(outputs, width, generator=generator, device=device) * 0.02
    dout = torch.randn(tokens, outputs, generator=generator, device=device) * 1e-4
    return x.bfloat16(), weight.bfloat16(), dout.bfloat16()


def results(x: Tensor, weight: Tensor, dout: Tensor, **how: Any) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = fp8_linear(x, weight, **how)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), dout)]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_is_a_power_of_two_that_fills_the_range_and_never_leaves_it(
    device: str, dtype: torch.dtype
) -> None:
    top = torch.finfo(dtype).max
    largest = torch.logspace(-20, 20, 4001, base=2.0, device=device) * torch.linspace(
        1, 2, 4001, device=device
    )
    largest = torch.cat(
        [largest, torch.tensor([top, top * 1.0001, top * 0.9999, 2.0, 1.75, 1.875], device=device)]
    )
    scale = scale_for(largest, dtype)
    assert torch.equal(scale, torch.exp2(scale.log2().round()))
    assert bool((largest * scale <= top).all())
    assert bool((largest * scale > top / 2).all())
    assert bool(scale_for(torch.zeros(1, device=device), dtype).isfinite().all())


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_cast_rounds_to_the_nearest_8_bit_value_and_nothing_else(device: str, rowwise: bool) -> None:
    x, _, _ = inputs(device, (48, 32, 16))
    x = x * torch.logspace(-3, 3, 48, device=device)[:, None].bfloat16()
    values, inv_scale = quantize(x, E4M3, rowwise)
    assert inv_scale.shape == ((48, 1) if rowwise else ())
    exact = x.double()
    back = values.double() * inv_scale.double()
    # Three bits of mantissa: half a step is 2^-4 of the value; below the smallest normal 2^-6 steps are 2^-9.
    allowed = torch.maximum(exact.abs() * 2**-4, inv_scale.double() * 2**-10)
    assert bool(((back - exact).abs() <= allowed).all())
    assert not torch.equal(back, exact)
    if rowwise:
        assert float((back - exact).norm() / exact.norm()) < 0.04
        assert float(((back - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 0.05, (
            "each row is as fine as any"
        )


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(device: str) -> None:
    for rowwise in (False, True):
        values, inv_scale = quantize(torch.zeros(4, 16, device=device), E4M3, rowwise)
        assert bool((values.float() * inv_scale == 0).all())
        for bad in (torch.nan, torch.inf):
            x = torch.ones(4, 16, device=device)
            x[1, 3] = bad
            values, inv_scale = quantize(x, E4M3, rowwise)
            assert bool((values.float() * inv_scale).isnan().any()), "a run that diverged must be seen to"


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_matmuls_are_those_of_the_fp8_operands(
    device: str, how: dict[str, Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Against float64 matmuls of the same fp8 operands, the error is that of a bf16 matmul of them: at most twice.

    With fast accumulation (on a GPU) sums keep 14 bits or so, which is declared coarser: at most four times.
    """
    rowwise = how["recipe"] == "rowwise"
    for shape in [*SHAPES, *LARGE] if device == "cuda" else SHAPES:
        x, weight, dout = inputs(device, shape)
        ours = results(x, weight, dout, **how)
        exact, plain = (
            [
                reference.fp8_linear(x, weight, rowwise, dtype),
                *reference.fp8_linear_gradients(dout, x, weight, rowwise, dtype),
            ]
            for dtype in (torch.float64, torch.bfloat16)
        )
        for what, mine, theirs, truth in zip(("out", "dx", "dweight"), ours, plain, exact, strict=True):
            fast = device == "cuda" and (what == "out" or how.get("fast_accum") == "all")
            allowed = (4 if fast else 2) * error(theirs, truth)
            assert mine.dtype == torch.bfloat16
            assert error(mine, truth) <= allowed, f"{what} of {shape}: {error(mine, truth)} > {allowed}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_a_linear_layer_up_to_8_bit_rounding(
    device: str, recipe: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    """Two operands with 3 bits of mantissa: about 4 % of a matmul that sums random terms; e5m2 gradients twice that."""
    x, weight, dout = inputs(device, (64, 128, 96))
    wide, weight_wide, dout_wide = x.double(), weight.double(), dout.double()
    exact = [wide @ weight_wide.t(), dout_wide @ weight_wide, dout_wide.t() @ wide]
    found = [
        error(mine, truth) for mine, truth in zip(results(x, weight, dout, recipe=recipe), exact, strict=True)
    ]
    gradient = 0.05 if recipe == "rowwise" else 0.09
    assert found[0] < 0.05, found
    assert max(found[1:]) < gradient, found
    assert min(found) > 0.005, "so near that nothing can have been rounded to 8 bits"


def test_rows_of_unlike_size_are_where_rowwise_pays(
    device: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    x, weight, _ = inputs(device, (64, 128, 96))
    x = x * torch.logspace(0, 5, 64, device=device)[:, None].bfloat16()
    small = slice(0, 8)
    exact = x[small].double() @ weight.double().t()
    found = {recipe: error(fp8_linear(x, weight, recipe=recipe)[small], exact) for recipe in RECIPES}
    assert found["rowwise"] < 0.05 < found["tensorwise"], found


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_casting_kernel_makes_the_same_bits_in_both_layouts(device: str, dtype: torch.dtype) -> None:
    for rows, columns in [(1, 1), (16, 48), (65, 130), *([(4096, 3000)] if device == "cuda" else [])]:
        x = torch.randn(rows, 2 * columns, device=device, dtype=torch.bfloat16)[:, :columns]
        scale = scale_for(x.abs().amax(), dtype)
        values, transposed = _cast_transpose(x, scale, dtype)
        expected = quantize(x, dtype, rowwise=False).values
        assert values.is_contiguous()
        assert transposed.is_contiguous()
        assert torch.equal(values.view(torch.uint8), expected.contiguous().view(torch.uint8))
        assert torch.equal(transposed.view(torch.uint8), expected.t().contiguous().view(torch.uint8))


def test_the_master_weight_is_untouched_and_gets_a_gradient_in_its_own_dtype(device: str) -> None:
    x, weight, dout = inputs(device, (32, 48, 16))
    master = weight.float().requires_grad_()
    before = master.detach().clone()
    fp8_linear(x, master).backward(dout)
    assert torch.equal(master.detach(), before)
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    frozen = fp8_linear(x.requires_grad_(), weight)
    frozen.backward(dout)
    assert weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_frozen_weight_needs_no_input_and_gives_the_same_gradient(device: str, how: dict[str, Any]) -> None:
    x, weight, dout = inputs(device, (32, 48, 16))
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fp8_linear(x, weight, **how)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert tuple(weight.shape) in saved
    assert not {(32, 48), (48, 32)} & set(saved)
    assert torch.equal(dx, results(x, weight, dout, **how)[1])


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_it_compiles_without_a_graph_break_and_means_the_same(
    device: str, backend: str, how: dict[str, Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    if device == "cuda" and (how["recipe"] == "rowwise" or "fast_accum" in how):
        pytest.skip("compiled on a GPU with a whole model, in tests/gpu")
    x, weight, dout = inputs(device, (48, 32, 80))

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_linear(torch.nn.functional.silu(x), weight, **how) * 2

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaf, master = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = function(leaf, master)
        return [out.detach(), *torch.autograd.grad(out, (leaf, master), dout)]

    compiled = run(torch.compile(layer, fullgraph=True, backend=backend))
    # Fused code rounds silu once less, which moves a few values to the next 8-bit step.
    limit = 0.02 if device == "cuda" else 1e-6
    for mine, eager in zip(compiled, run(layer), strict=True):
        assert error(mine, eager.double()) <= limit


def test_it_works_on_tokens_of_any_shape_and_can_be_recomputed(device: str) -> None:
    x, weight, dout = inputs(device, (32, 48, 16))
    flat = results(x, weight, dout)
    leaf = x.view(2, 16, 48).requires_grad_()
    again = checkpoint(lambda x: fp8_linear(x, weight), leaf, use_reentrant=False)
    assert torch.equal(again.view(32, 16), flat[0])
    (dx,) = torch.autograd.grad(again, leaf, dout.view(2, 16, 16))
    assert torch.equal(dx.view(32, 48), flat[1])


def test_the_same_bits_every_time(device: str, repeats: int) -> None:
    given = inputs(device, (64, 96, 32))
    first = results(*given)
    for _ in range(repeats):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results(*given), first, strict=True))


def test_under_autocast_it_takes_what_it_is_given(device: str) -> None:
    x, weight, _ = inputs(device, (32, 48, 16))
    plain = fp8_linear(x, weight)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(fp8_linear(x, weight.float()), plain)


def test_what_it_does_not_support_is_refused(device: str) -> None:
    x, weight, _ = inputs(device, (32, 48, 16))
    with pytest.raises(KernelRefusal, match="takes fp32, bf16 and fp16"):
        fp8_linear(x.double(), weight)
    for short in ((x[:30], weight), (x[:, :40], weight[:, :40]), (x, weight[:10])):
        with pytest.raises(KernelRefusal, match="in multiples of 16"):
            fp8_linear(*short)
    with pytest.raises(KernelRefusal, match="outputs, inputs"):
        fp8_linear(x, weight.t())
    with pytest.raises(KernelRefusal, match="tensorwise and rowwise"):
        fp8_linear(x, weight, recipe="blockwise")  # type: ignore[arg-type]
    with pytest.raises(KernelRefusal, match="needs tensorwise scales"):
        fp8_linear(x, weight, recipe="rowwise", casts="kernel")


@pytest.mark.gpu
def test_a_gpu_takes_bf16_only_and_multiplies_in_8_bits(device: str) -> None:
    if device != "cuda":
        pytest.skip("about GPUs")
    x, weight, dout = inputs(device, (64, 64, 64))
    with pytest.raises(KernelRefusal, match="takes bf16 activations on a GPU"):
        fp8_linear(x.float(), weight)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        results(x, weight, dout)
    names = [event.name for event in profile.events() or []]
    assert names.count("aten::_scaled_mm") >= 3
    assert "rush::fp8_emulated_matmul" not in names


def test_emulated_matmuls_are_seen_in_a_profile(device: str) -> None:
    if device == "cuda":
        pytest.skip("about CPUs")
    with torch.profiler.profile(acc_events=True) as profile:
        results(*inputs(device, (16, 16, 16)))
    assert [event.name for event in profile.events() or []].count("rush::fp8_emulated_matmul") == 3


def test_the_reference_multiplies_the_quantized_operands(device: str) -> None:
    left = Fp8Tensor(torch.tensor([[1.0, 2.0]], device=device).to(E4M3), torch.tensor(4.0, device=device))
    right = Fp8Tensor(
        torch.tensor([[3.0, 0.5], [1.0, 1.0]], device=device).to(E4M3),
        torch.tensor([[1.0], [2.0]], device=device),
    )
    assert reference.scaled_mm(left, right, torch.float64).tolist() == [[16.0, 24.0]]
