"""8-bit moments: the code, its encoding, the update, and the optimizer around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels.adamw8bit import QuantizedMoment, RushAdamW8bit, adamw8bit_, dynamic_map, quantized_zeros
from rush.kernels.adamw8bit.quantization_map import code_of_zero
from rush.kernels.adamw8bit.reference import adamw8bit_ as reference_
from rush.kernels.adamw8bit.reference import dequantize, quantize
from rush.kernels.adamw8bit.study import STUDY

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def values(device: str) -> tuple[Tensor, Tensor]:
    return dynamic_map(True).to(device), dynamic_map(False).to(device)


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_has_256_different_values_that_reach_over_seven_decades(signed: bool) -> None:
    found = dynamic_map(signed)
    assert len(found.unique()) == 256
    assert torch.equal(found, found.sort().values)
    assert found[code_of_zero(signed)] == 0
    assert found[-1] == 1
    smallest = float(found[found > 0].min())
    assert 5e-7 < smallest < 6e-7 if signed else 3e-7 < smallest < 4e-7
    if signed:
        torch.testing.assert_close(-found[:127].flip(0), found[128:255])
    # Fine where numbers are large: the steps of the highest decade, and coarse where they are small.
    highest = found[found > 0.1]
    assert float(highest.diff().max()) < (0.0142 if signed else 0.0071)


def test_the_code_is_that_of_the_library_that_introduced_it() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    for signed in (True, False):
        torch.testing.assert_close(
            dynamic_map(signed), functional.create_dynamic_map(signed=signed).float(), rtol=1e-5, atol=1e-9
        )


def updated(moment: Tensor, device: str, signed: bool) -> QuantizedMoment:
    """What the kernel packs when an update makes exactly this the new moment (its square root, unsigned)."""
    parameter = torch.zeros_like(moment)
    packed = [quantized_zeros(parameter, kind) for kind in (True, False)]
    gradient = moment if signed else moment.sqrt()
    adamw8bit_(
        [parameter], [gradient], [packed[0]], [packed[1]], values(device),
        lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, step=1,
    )  # fmt: skip
    return packed[0] if signed else packed[1]


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_gets_the_nearest_code(signed: bool, device: str) -> None:
    table = dynamic_map(signed)
    middles = (table[1:] + table[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    # The codes themselves, both sides of every border between two, numbers of all sizes, and the ends.
    tried = torch.cat(
        [
            table,
            middles * (1 - 4e-6),
            middles * (1 + 4e-6),
            10 ** (-8 * torch.rand(400, generator=generator)),
            torch.tensor([1.0, 0.0]),
        ]
    )
    if signed:
        tried = torch.cat([tried, -tried])
    # Each block begins with a 1, so that its scale is 1 and the numbers are coded as they are.
    blocks = torch.nn.functional.pad(tried, (0, -len(tried) % 255)).view(-1, 255)
    moment = torch.cat([torch.ones(len(blocks), 1), blocks], 1).to(device)
    found = updated(moment, device, signed)
    assert torch.equal(found.scales, torch.ones(len(blocks), device=device))
    true = moment.cpu().double()
    error = (table[found.codes.long().cpu()].double() - true).abs()
    best = (table.double() - true[..., None]).abs().amin(-1)
    # A number in the very middle may go either way, by the last bits of fp32.
    assert float((error - best).max()) < 2e-7
    own = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(found.codes[:, 1:].flatten()[:256].cpu(), own)


def test_a_block_of_zeros_and_a_rest_that_fills_no_block(device: str) -> None:
    moment = torch.zeros(600, device=device)
    moment[512:] = -0.25
    found = updated(moment, device, True)
    assert found.scales.tolist() == [0.0, 0.0, 0.25]
    assert set(found.codes[:512].tolist()) == {127}
    back = dequantize(*found, signed=True)
    torch.testing.assert_close(back, moment, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_follow_the_plain_definition(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [(8, 256), (5000,), (3,)]
    draws = [
        [
            torch.randn(size, generator=generator) * 10 ** (3 * torch.rand(size, generator=generator) - 3)
            for size in sizes
        ]
        for _ in range(5)
    ]
    ours = [draw.to(device, dtype) for draw in draws[0]]
    theirs = [p.clone() for p in ours]
    m, v, m_true, v_true = (
        [quantized_zeros(p, signed) for p in ours] for signed in (True, False, True, False)
    )
    for step in range(1, 5):
        gradients = [draw.to(device, dtype) for draw in draws[step]]
        adamw8bit_(ours, gradients, m, v, values(device), **SETTINGS, step=step)
        for tensors in zip(theirs, gradients, m_true, v_true, strict=True):
            reference_(*tensors, **SETTINGS, step=step)
        for found, true in zip([*m, *v], [*m_true, *v_true], strict=True):
            torch.testing.assert_close(found.scales, true.scales, rtol=1e-5, atol=0)
            # Codes may differ where fp32 rounded the other way at a border, and then by one.
            apart = (found.codes.int() - true.codes.int()).abs()
            assert int(apart.max()) <= 1
            assert float((apart > 0).double().mean()) < 2e-3
            true.codes.copy_(found.codes)
            true.scales.copy_(found.scales)
        for found, true in zip(ours, theirs, strict=True):
            rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-5)
            torch.testing.assert_close(found, true, rtol=rtol, atol=atol)
            true.copy_(found)


def test_quantizing_keeps_the_size_of_small_numbers_and_the_digits_of_large_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256 * 64, generator=generator)
    error = (dequantize(*quantize(x, True), signed=True) - x).norm() / x.norm()
    assert error < 0.02
    spread = 10 ** (-4 * torch.rand(256 * 64, generator=generator))
    back = dequantize(*quantize(spread, False), signed=False)
    assert float(((back - spread) / spread).abs().max()) < 0.5  # four decades, none lost


def test_the_state_takes_two_bytes_a_parameter_and_small_tensors_stay_in_fp32(device: str) -> None:
    large = torch.zeros(100, 200, device=device, requires_grad=True)
    small = torch.zeros(8, 8, device=device, requires_grad=True)
    vector = torch.zeros(20_000, device=device, requires_grad=True)
    optimizer = RushAdamW8bit([large, small, vector])
    for parameter in (large, small, vector):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[large]
    assert state.keys() == {
        "step",
        "exp_avg.codes",
        "exp_avg.scales",
        "exp_avg_sq.codes",
        "exp_avg_sq.scales",
    }
    held = sum(t.numel() * t.element_size() for key, t in state.items() if key != "step")
    assert held / large.numel() < 2.04
    for parameter in (small, vector):
        assert optimizer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_it_learns_what_full_moments_learn(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(32, 64, generator=generator).to(device)
    losses = {}
    for make in (RushAdamW8bit, torch.optim.AdamW):
        weight = torch.zeros(32, 64, device=device, requires_grad=True)
        optimizer = make([weight], lr=0.05, weight_decay=0.0)
        for step in range(60):
            noise = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (weight - target + 0.1 * noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[make] = float(loss.detach())
    assert losses[RushAdamW8bit] == pytest.approx(losses[torch.optim.AdamW], rel=0.1)
    assert losses[RushAdamW8bit] < 0.1


def test_a_saved_optimizer_resumes_with_the_same_bits(device: str) -> None:
    def start() -> tuple[Tensor, RushAdamW8bit]:
        parameter = torch.linspace(-1, 1, 5000, device=device).bfloat16().view(50, 100).requires_grad_()
        return parameter, RushAdamW8bit([parameter], lr=1e-3, stochastic_rounding=True)

    def steps(parameter: Tensor, optimizer: RushAdamW8bit, first: int, last: int) -> None:
        for step in range(first, last):
            parameter.grad = torch.linspace(-1, step, 5000, device=device).bfloat16().view(50, 100)
            optimizer.step()

    parameter, optimizer = start()
    steps(parameter, optimizer, 0, 2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    steps(parameter, optimizer, 2, 4)
    resumed, other = start()
    with torch.no_grad():
        resumed.copy_(weights)
    other.load_state_dict(saved)
    assert other.state[resumed]["exp_avg.codes"].dtype == torch.uint8
    steps(resumed, other, 2, 4)
    assert torch.equal(resumed, parameter)


def test_weights_in_bf16_can_be_rounded_stochastically(device: str) -> None:
    notch, steps = 2**-7, 24
    # Positive gradients, whose moment the code holds exactly: it has a 1, but no -1.
    parameter = torch.full((64, 64), -1.0, device=device, dtype=torch.bfloat16, requires_grad=True)
    optimizer = RushAdamW8bit([parameter], lr=notch / 8, weight_decay=0.0, stochastic_rounding=True)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = -1 - float(parameter.detach().double().mean())
    assert moved == pytest.approx(steps * notch / 8, rel=0.03)


@pytest.mark.parametrize("remainder", [0.03, 0.5, 0.9])
def test_chances_are_the_remainders_and_every_element_has_its_own(remainder: float, device: str) -> None:
    notch, shape = 2**-7, (256, 256)
    parameter = torch.full(shape, -1.0, device=device, dtype=torch.bfloat16)
    gradient = torch.ones_like(parameter)
    m, v = quantized_zeros(parameter, True), quantized_zeros(parameter, False)
    settings = {**SETTINGS, "lr": notch * remainder, "weight_decay": 0.0}
    adamw8bit_(
        [parameter], [gradient], [m], [v], values(device), **settings, step=1, stochastic_rounding=True
    )
    up = ((-1 - parameter.double()) / notch).cpu()
    assert set(up.flatten().tolist()) == {0.0, 1.0}
    deviation = (remainder * (1 - remainder) / up.numel()) ** 0.5
    assert abs(float(up.mean()) - remainder) < 4 * deviation
    # Eight elements share a draw: none of them may tell of another, nor of one in the next eight.
    eights = (up.view(-1, 8) - remainder) / (remainder * (1 - remainder)) ** 0.5
    columns = torch.cat([eights[:-1], eights[1:]], 1)
    related = columns.T @ columns / len(columns) - torch.eye(16, dtype=torch.float64)
    related.diagonal().zero_()
    assert float(related.abs().max()) < 5 / len(columns) ** 0.5


@pytest.mark.parametrize("signed", [True, False])
def test_the_largest_of_a_block_is_restored_exactly_or_as_the_last_code(signed: bool, device: str) -> None:
    """Every scale's reciprocal is rounded otherwise; none may carry a number over the end of the codes."""
    largest = 10 ** torch.linspace(-12, 3, 512, device=device)
    moment = torch.zeros(512, 256, device=device)
    moment[:, 7] = largest
    if signed:
        moment[1::2, 7] *= -1
    codes = updated(moment, device, signed).codes[:, 7]
    assert set(codes[0::2].tolist()) == {255}
    assert set(codes[1::2].tolist()) == ({0} if signed else {255})


def test_the_study_measures_quantized_moments() -> None:
    for size in STUDY.small:  # the others are larger
        parameter = STUDY.make(size, torch.device("cpu"), torch.bfloat16)["parameter_0"]
        assert "exp_avg.codes" in RushAdamW8bit([parameter]).new_state(parameter), size.label


def test_what_it_does_not_support_is_refused_with_a_sentence(device: str) -> None:
    parameter = torch.zeros(300, device=device)
    m, v = quantized_zeros(parameter, True), quantized_zeros(parameter, False)

    def update(p: Tensor = parameter, m: QuantizedMoment = m) -> None:
        adamw8bit_([p], [torch.zeros_like(p)], [m], [v], values(device), **SETTINGS, step=1)

    with pytest.raises(KernelRefusal, match="takes fp32 and bf16"):
        update(parameter.half())
    with pytest.raises(KernelRefusal, match="moments from quantized_zeros"):
        update(m=QuantizedMoment(m.codes, m.scales[:1]))
    with pytest.raises(KernelRefusal, match="moments from quantized_zeros"):
        update(m=QuantizedMoment(m.codes.int(), m.scales))
