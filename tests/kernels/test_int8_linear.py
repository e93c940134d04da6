"""Linear layers with int8 operands: rounding, the matmuls, the gradients, on a CPU and on a GPU's int8 units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.hardware.measure import matmul
from rush.kernels.int8_linear import LONGEST, int8_linear, reference
from rush.kernels.int8_linear.reference import columns, noises, quantize, random_bits

# tokens, inputs, outputs; a GPU's sizes are multiples of 16
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 65), (130, 257, 48)]
OF_GPU = [(32, 32, 32), (48, 96, 80), (4096, 2048, 512), (1040, 768, 3072)]
Given = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _units(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU's int8 units are not used")


def inputs(
    device: str, shape: tuple[int, int, int] = (64, 96, 32), dtype: torch.dtype = torch.bfloat16
) -> Given:
    tokens, width, outputs = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, device=device)
    weight = torch.randn(outputs, width, generator=generator, device=device) * 0.02
    # A few large values and many small ones, as gradients have.
    dout = torch.randn(tokens, outputs, generator=generator, device=device) ** 3 * 1e-4
    return x.to(dtype), weight.to(dtype), dout.to(dtype)


def results(x: Tensor, weight: Tensor, dout: Tensor, seed: int = 0) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    torch.manual_seed(seed)
    out = int8_linear(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), dout)]


def exact_results(x: Tensor, weight: Tensor, dout: Tensor) -> list[Tensor]:
    x, weight, dout = x.double(), weight.double(), dout.double()
    return [x @ weight.t(), dout @ weight, dout.t() @ x]


def drawn(device: str, seed: int = 0) -> Tensor:
    """The seed that a layer draws first after this seed of the generator."""
    torch.manual_seed(seed)
    return torch.randint(2**31 - 1, (), dtype=torch.int32, device=device)


def test_values_are_rounded_to_the_nearest_of_255_steps_in_each_row(device: str) -> None:
    x = inputs(device, (48, 33, 1), torch.float32)[0]
    x = x * torch.logspace(-20, 20, 48, device=device)[:, None]
    values, inv_scale = quantize(x)
    assert inv_scale.shape == (48, 1)
    assert bool((values.abs().amax(1) == 127).all())
    assert torch.allclose(inv_scale[:, 0], x.abs().amax(1) / 127)
    off = (values.double() * inv_scale.double() - x.double()).abs() / inv_scale
    assert 0.4 < float(off.max()) <= 0.5 + 1e-4


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(device: str) -> None:
    for noise in (None, torch.full((4, 16), 1 - 2**-16, device=device)):
        values, inv_scale = quantize(torch.zeros(4, 16, device=device), noise)
        assert not bool(values.any())
        assert bool(inv_scale.reciprocal().isfinite().all())
    x, weight, _ = inputs(device)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[1, 3] = bad
        finite = int8_linear(x, weight).isfinite()
        assert not bool(finite[1].any()), "a run that diverged must be seen to"
        assert bool(finite[2:].all())


def test_stochastic_rounding_goes_to_a_neighbor_and_is_right_on_average(device: str) -> None:
    draws = 20_000
    row = torch.cat([torch.tensor([127.0]), torch.linspace(-126.9, 126.9, 40), torch.tensor([0.01, -0.01])])
    x, exact = row.to(device).repeat(draws, 1), row.double().to(device)
    for noise in noises(random_bits(draws, len(row), torch.tensor(7, dtype=torch.int32, device=device))):
        steps = quantize(x, noise).values.double()
        assert bool(((steps - exact).abs() < 1).all())
        # A rounding has a variance of f · (1 - f) steps for the fraction f; the second term is for the rare ones.
        fraction = exact - exact.floor()
        allowed = 5 * (fraction * (1 - fraction) / draws).sqrt() + 10 / draws
        assert bool(((steps.mean(0) - exact).abs() <= allowed).all())


def test_the_largest_value_of_a_row_never_wraps_around(device: str) -> None:
    x = torch.linspace(1, 2, 512, device=device)[:, None]
    for noise in (1 - 2.0**-24, 1 - 2.0**-reference.NOISE_BITS, 0.0):
        for sign in (1, -1):
            values = sign * quantize(sign * x, torch.full_like(x, noise)).values.int()
            assert 126 <= int(values.min()) <= int(values.max()) <= 127, (noise, sign)


def test_random_bits_are_those_of_the_published_hash_and_look_independent(device: str) -> None:
    seed = 123456789

    def mixed(h: int) -> int:
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        return h ^ h >> 16

    bits = random_bits(512, 512, torch.tensor(seed, dtype=torch.int32, device=device))
    for row, column in [(0, 0), (1, 0), (0, 1), (77, 300), (511, 511)]:
        assert int(bits[row, column]) % 2**32 == mixed(((mixed(row) ^ mixed(seed)) + column) % 2**32)
    # A GPU's int32 wraps around to what a CPU's int64 is cut off to.
    numbers = torch.tensor([0, 1, 2**31 - 1, -(2**31), -1, seed], dtype=torch.int32, device=device)
    wide = reference._mix(numbers.long() & 0xFFFFFFFF)
    assert torch.equal(reference._mix(numbers).long() & 0xFFFFFFFF, wide)
    high, low = noises(bits)
    other = noises(random_bits(512, 512, torch.tensor(seed + 1, dtype=torch.int32, device=device)))[0]
    sides = [high, low, high.roll(1, 0), high.roll(1, 1), other]
    correlations = torch.corrcoef(torch.stack([side.flatten() for side in sides]).double())
    # 5 standard errors of a correlation, and of a mean
    assert float((correlations - torch.eye(len(sides), device=device)).abs().max()) < 5 / 512
    for noise in (high, low):
        assert abs(float(noise.double().mean()) - 0.5) < 5 * 12**-0.5 / 512
        assert abs(float(noise.double().var()) * 12 - 1) < 0.02


def _largest_error(left: Tensor, right: Tensor, of_left: float, of_right: float) -> Tensor:
    """The bound on left · rightᵀ where the values of each row are off by these fractions of the row's step."""
    steps = [side.abs().amax(1, keepdim=True) / 127 for side in (left, right)]
    off_left, off_right = steps[0] * of_left, steps[1] * of_right
    sums = [side.abs().sum(1, keepdim=True) for side in (left, right)]
    inner = left.shape[1]
    return off_left * sums[1].t() + sums[0] * off_right.t() + inner * off_left * off_right.t()


def test_errors_are_within_what_rounding_by_rows_can_make(device: str) -> None:
    """Half a step of each operand's row, a whole step of the output's gradient."""
    for shape in [*SHAPES, (256, 128, 192)] if device == "cpu" else OF_GPU:
        given = inputs(device, shape, torch.float32)
        x, weight, dout = (one.double() for one in given)
        bounds = (
            _largest_error(x, weight, 0.5, 0.5),
            _largest_error(dout, weight.t(), 1.0, 0.5),
            _largest_error(dout.t(), x.t(), 1.0, 0.5),
        )
        for mine, truth, bound in zip(results(*given), exact_results(*given), bounds, strict=True):
            # The scaling itself is in fp32.
            assert bool(((mine.double() - truth).abs() <= bound * (1 + 1e-3) + 1e-6 * truth.abs()).all())


def test_it_is_a_linear_layer_up_to_int8_rounding(
    device: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    """Rows of normal numbers have an amax of 3 to 4 deviations: 0.8 % from rounding either operand, 2 to 3 times that from
    gradients with a few large values. So near that nothing was rounded would be as wrong."""
    given = inputs(device, (256, 256, 192))
    found = [error(mine, truth) for mine, truth in zip(results(*given), exact_results(*given), strict=True)]
    assert 0.005 < found[0] < 0.02, found
    assert all(0.01 < one < 0.06 for one in found[1:]), found


def test_matmuls_are_those_of_the_int8_operands(
    device: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    """Against float64 matmuls of the same int8 operands: int32 sums are exact, so what is left is the output's rounding."""
    for shape in SHAPES if device == "cpu" else OF_GPU:
        x, weight, dout = inputs(device, shape)
        ours, seed = results(x, weight, dout), drawn(device)
        exact, plain = (
            [
                reference.int8_linear(x, weight, dtype),
                *reference.int8_linear_gradients(dout, x, weight, seed, dtype),
            ]
            for dtype in (torch.float64, torch.bfloat16)
        )
        for mine, theirs, truth in zip(ours, plain, exact, strict=True):
            assert mine.dtype == torch.bfloat16
            assert error(mine, truth) <= 2 * error(theirs, truth) + 1e-6, shape


def test_gradients_are_right_on_average_also_where_each_is_below_half_a_step(device: str) -> None:
    x, weight, dout = inputs(device, (32, 32, 32), torch.float32)
    dout = torch.full_like(dout, 1e-3)
    dout[:, 0] = 1.0  # a step of a row is 1/127, and of a column, too
    dout[0] = 1.0
    draws = [results(x, weight, dout, seed)[1:] for seed in range(100)]
    rounded = [columns(weight), columns(x)]
    rights = [(one.values.double() * one.inv_scale.double()).t() for one in rounded]
    for which, left in enumerate((dout.double(), dout.double().t())):
        found = torch.stack([draw[which] for draw in draws]).double()
        allowed = 6 * found.std(0) / len(draws) ** 0.5 + 1e-6
        assert bool(((found.mean(0) - left @ rights[which]).abs() <= allowed).all())
        assert bool((found.std(0) > 0).any()), "nothing was random"
    small = quantize(dout[1:2])
    assert not bool(small.values[:, 1:].any()), "rounded to nearest they all become zero"


def test_the_generators_state_gives_the_bits_back(device: str) -> None:
    given = inputs(device)
    first, other = results(*given, seed=1), results(*given, seed=2)
    assert all(torch.equal(mine, again) for mine, again in zip(first, results(*given, seed=1), strict=True))
    assert torch.equal(first[0], other[0]), "nothing is random in the forward pass"
    assert not torch.equal(first[1], other[1])
    assert not torch.equal(first[2], other[2])


def test_sums_as_long_as_int32_holds_are_exact_and_longer_ones_refused(device: str) -> None:
    if device == "cuda":
        length = LONGEST // 16 * 16
        ones = torch.ones(32, length, device=device, dtype=torch.bfloat16)
        assert bool((int8_linear(ones.float(), ones.float()) == length).all())
        return
    ones = torch.ones(1, LONGEST)
    assert float(int8_linear(ones, ones)) == LONGEST
    with pytest.raises(KernelRefusal, match="up to 133,144 terms in int32"):
        int8_linear(torch.ones(1, LONGEST + 1), torch.ones(1, LONGEST + 1))


def test_the_weight_is_untouched_and_gets_a_gradient_in_its_own_dtype(device: str) -> None:
    x, weight, dout = inputs(device)
    master = weight.float().requires_grad_()
    before = master.detach().clone()
    int8_linear(x, master).backward(dout)
    assert torch.equal(master.detach(), before)
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    int8_linear(x.requires_grad_(), weight).backward(dout)
    assert weight.grad is None
    assert x.grad is not None


def test_it_compiles_without_a_graph_break_and_means_the_same(
    device: str, backend: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    x, weight, dout = inputs(device)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return int8_linear(torch.nn.functional.silu(x), weight) * 2

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaf, master = x.detach().requires_grad_(), weight.detach().requires_grad_()
        torch.manual_seed(0)
        out = function(leaf, master)
        return [out.detach(), *torch.autograd.grad(out, (leaf, master), dout)]

    compiled = run(torch.compile(layer, fullgraph=True, backend=backend))
    # Inductor draws another seed: another stochastic rounding.
    limits = (0.02, 0.1, 0.1) if device == "cuda" else (1e-6,) * 3
    for mine, eager, limit in zip(compiled, run(layer), limits, strict=True):
        assert error(mine, eager.double()) <= limit


def test_it_works_on_tokens_of_any_shape_and_can_be_recomputed(device: str) -> None:
    x, weight, dout = inputs(device)
    flat = results(x, weight, dout)
    leaf = x.view(2, 32, 96).requires_grad_()
    torch.manual_seed(0)
    again = checkpoint(lambda x: int8_linear(x, weight), leaf, use_reentrant=False)
    assert torch.equal(again.view(64, 32), flat[0])
    (dx,) = torch.autograd.grad(again, leaf, dout.view(2, 32, 32))
    assert torch.equal(dx.view(64, 96), flat[1])


def test_operands_are_contiguous_whatever_the_strides(device: str) -> None:
    given = inputs(device)
    transposed = [one.t().contiguous().t() for one in given]
    assert not any(one.is_contiguous() for one in transposed)
    assert all(map(torch.equal, results(*given), results(*transposed)))
    for one in transposed:
        assert quantize(one).values.is_contiguous()
        assert columns(one).values.is_contiguous()


def test_what_it_does_not_support_is_refused(device: str) -> None:
    x, weight, _ = inputs(device)
    with pytest.raises(KernelRefusal, match="takes fp32, bf16 and fp16"):
        int8_linear(x.double(), weight)
    with pytest.raises(KernelRefusal, match="outputs, inputs"):
        int8_linear(x, weight.t())
    for short in ((x[:30], weight), (x[:16], weight), (x, weight[:10])):
        if device == "cuda":
            with pytest.raises(KernelRefusal, match="in multiples of 16, at least 32"):
                int8_linear(*short)


def test_three_int8_matmuls_are_seen_in_a_profile(device: str) -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        results(*inputs(device))
    assert [event.name for event in profile.events() or []].count("aten::_int_mm") == 3


def test_a_frozen_weight_needs_no_input(device: str) -> None:
    x = torch.randn(32, 64, device=device, requires_grad=True)
    weight = torch.randn(48, 64, device=device)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = int8_linear(x, weight)
    assert sorted(saved) == [(), (48, 64)]
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.gpu
@pytest.mark.alone
def test_int8_units_are_faster_than_bf16(device: str) -> None:
    if device != "cuda":
        pytest.skip("about GPUs")
    rates = {}
    for dtype in ("bfloat16", "int8"):
        samples = matmul("cuda", dtype)
        assert not isinstance(samples, str), samples
        rates[dtype] = max(sample.rate for sample in samples)
    # Not the datasheet's factor of two: 949 against 793 TFLOP/s is what cuBLAS reaches on an H200.
    assert rates["int8"] > 1.1 * rates["bfloat16"], rates
