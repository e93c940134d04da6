"""AdamW over a list of tensors: against float64 and torch's own, stochastic rounding, and the optimizer around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels.adamw import RushAdamW, adamw_
from rush.kernels.adamw import triton as kernels
from rush.kernels.adamw.reference import adamw_ as reference_
from rush.kernels.adamw.reference import round_stochastically
from rush.kernels.adamw.table import divide

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(1,), (7,), (3, 5), (64, 64), (kernels.PIECE + 1,)]
BFLOAT16_NOTCH = 2**-7  # above 1


def made(device: str, parameter: torch.dtype, state: torch.dtype, seed: int = 0) -> list[list[Tensor]]:
    """Parameters, gradients and moments as in the middle of a run, of all shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if device == "cpu" else [*SHAPES, (1000, 333)]
    values = [torch.randn(4, *shape, generator=generator) for shape in shapes]
    parameters = [value[0].to(device, parameter) for value in values]
    gradients = [value[1].to(device, parameter) for value in values]
    exp_avgs = [(0.3 * value[2]).to(device, state) for value in values]
    exp_avg_sqs = [(0.2 * value[3].square()).to(device, state) for value in values]
    return [parameters, gradients, exp_avgs, exp_avg_sqs]


def copies(lists: list[list[Tensor]], dtype: torch.dtype | None = None) -> list[list[Tensor]]:
    return [[tensor.to(dtype or tensor.dtype, copy=True) for tensor in tensors] for tensors in lists]


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [1, 16, 1000])
def test_an_update_is_as_exact_as_plain_torch_in_the_same_dtype(
    parameter: torch.dtype, state: torch.dtype, step: int, device: str, check_errors: Any
) -> None:
    start = made(device, parameter, state)
    ours, plain, exact = copies(start), copies(start), copies(start, torch.float64)
    adamw_(*ours, **SETTINGS, step=step)
    for lists in (plain, exact):
        for tensors in zip(*lists, strict=True):
            reference_(*tensors, **SETTINGS, step=step)
    for what, found, theirs, true in zip(
        ("parameter", "gradient", "exp_avg", "exp_avg_sq"), ours, plain, exact, strict=True
    ):
        for tensors in zip(found, theirs, true, strict=True):
            check_errors(*tensors, 2, what)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], start[1], strict=True))


@pytest.mark.parametrize("kind", ["groups", "tensor_lr", "missing_gradients"])
def test_it_follows_torch_over_many_steps(kind: str, device: str) -> None:
    def run(make: Any) -> tuple[list[Tensor], Any]:
        parameters = [p.clone().requires_grad_() for p in made(device, torch.float32, torch.float32)[0]]
        groups = [
            {"params": parameters[::2], "weight_decay": 0.1, "lr": 0.01},
            {"params": parameters[1::2], "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
        ]
        lr: Any = torch.tensor(0.02, device=device) if kind == "tensor_lr" else 0.02
        if kind == "tensor_lr":
            groups[0].pop("lr")
        optimizer = make(groups, lr=lr)
        for step in range(1, 9):
            for index, gradient in enumerate(made(device, torch.float32, torch.float32, step)[1]):
                absent = kind == "missing_gradients" and (step + index) % 3 == 0
                parameters[index].grad = None if absent else gradient
            if kind == "tensor_lr":
                lr.fill_(0.02 / step)
            optimizer.step()
        return parameters, optimizer

    (ours, optimizer), (theirs, torchs) = (
        run(RushAdamW),
        run(lambda *a, **k: torch.optim.AdamW(*a, foreach=False, **k)),
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for found, expected in zip(optimizer.state.values(), torchs.state.values(), strict=True):
        assert found.keys() == expected.keys()
        for key in found:
            torch.testing.assert_close(found[key], expected[key].to(found[key].device), rtol=1e-5, atol=1e-7)


def test_the_pieces_of_all_tensors_cover_every_element_once() -> None:
    sizes = [1, 10, 0, 7, 21]
    division = divide(sizes, 7, torch.device("cpu"))
    covered = [[0] * size for size in sizes]
    for row, start in zip(division.rows.tolist(), division.starts.tolist(), strict=True):
        for at in range(start, min(start + 7, sizes[row])):
            covered[row][at] += 1
    assert covered == [[1] * size for size in sizes]


@pytest.mark.parametrize("offset", [16, 1])
def test_nothing_around_a_tensor_is_touched_whether_its_address_is_round_or_not(
    offset: int, device: str
) -> None:
    def inside() -> list[Tensor]:
        return [torch.ones(offset + size + 40, device=device) for size in (4096, 33)]

    lists = [inside() for _ in range(4)]
    views = [[tensor[offset:-40] for tensor in tensors] for tensors in lists]
    expected = [tensor.clone() for tensor in (view[0] for view in views)]
    reference_(*expected, **SETTINGS, step=3)
    adamw_(*views, **SETTINGS, step=3)
    for tensors in lists:
        for tensor in tensors:
            assert bool((tensor[:offset] == 1).all())
            assert bool((tensor[-40:] == 1).all())
    for found, true in zip((view[0] for view in views), expected, strict=True):
        torch.testing.assert_close(found, true)


def test_all_tensors_of_a_group_are_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    original = kernels.update
    monkeypatch.setattr(kernels, "update", lambda *a, **k: launches.append(len(a[0])) or original(*a, **k))
    parameters = [torch.ones(16 * n, device=device, requires_grad=True) for n in range(1, 9)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = RushAdamW([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}])
    optimizer.step()
    optimizer.step()
    assert launches == [3, 5, 3, 5]
    assert len(optimizer._divisions) == 2


# Stochastic rounding.


def rounded(value: float, count: int, device: str, **settings: Any) -> Tensor:
    """bf16 weights of 1 after an update that takes them to `value` in exact arithmetic."""
    parameter = torch.ones(count, device=device, dtype=torch.bfloat16)
    gradient = torch.full_like(parameter, -1.0 if value > 1 else 1.0)
    moments = [torch.zeros(count, device=device) for _ in range(2)]
    # At step 1 the update is lr in the gradient's direction, whatever its size.
    options = {
        "lr": abs(value - 1),
        "betas": (0.9, 0.999),
        "eps": 1e-30,
        "weight_decay": 0.0,
        "step": 1,
        **settings,
    }
    adamw_([parameter], [gradient], [moments[0]], [moments[1]], stochastic_rounding=True, **options)
    return parameter


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(device: str) -> None:
    count = 40_000
    for share in (0.1, 0.5, 0.77):
        found = rounded(1 + share * BFLOAT16_NOTCH, count, device).double()
        assert set(found.unique().tolist()) == {1.0, 1 + BFLOAT16_NOTCH}
        up = float((found > 1).double().mean())
        deviation = (share * (1 - share) / count) ** 0.5
        assert abs(up - share) < 4.5 * deviation, (up, share)


def test_neighbouring_elements_and_pieces_draw_independently(device: str) -> None:
    up = (rounded(1 + BFLOAT16_NOTCH / 2, 4 * kernels.PIECE, device) > 1).double()
    signs = 2 * up - 1
    for lag in (1, 2, 32, kernels.BLOCK, kernels.PIECE):
        together = float((signs[lag:] * signs[:-lag]).mean())
        assert abs(together) < 4.5 / (len(signs) - lag) ** 0.5, (lag, together)


def test_the_draw_repeats_for_seed_step_and_tensor_and_differs_for_any_other(device: str) -> None:
    def draw(**settings: Any) -> Tensor:
        return rounded(1 + BFLOAT16_NOTCH / 2, 512, device, **settings)

    first = draw()
    assert torch.equal(draw(), first)
    # Without momentum and bias the update is the same at every step.
    still = {"betas": (0.0, 0.0)}
    assert not torch.equal(draw(**still, step=2), draw(**still, step=3))
    assert not torch.equal(draw(seed=1), first)
    assert not torch.equal(draw(seed=2**32), first)
    assert not torch.equal(draw(numbers=[1]), first)


def test_small_updates_add_up_only_when_they_are_rounded_stochastically(device: str) -> None:
    steps, lr = 32, BFLOAT16_NOTCH / 8
    for stochastic, expected in ((False, 0.0), (True, steps * lr)):
        parameter = torch.ones(2048, device=device, dtype=torch.bfloat16, requires_grad=True)
        optimizer = RushAdamW(
            [parameter], lr=lr, weight_decay=0.0, stochastic_rounding=stochastic, state_dtype=torch.float32
        )
        for _ in range(steps):
            parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
        moved = float(parameter.detach().double().mean()) - 1
        assert moved == pytest.approx(expected, rel=0.05)


def test_a_second_moment_in_bf16_decays_only_when_it_is_rounded_stochastically(device: str) -> None:
    """A thousandth less is nearer to where it was than to the next bf16 number."""
    steps = 40
    for stochastic, expected in ((False, 1.0), (True, 0.999**steps)):
        lists = [[torch.ones(512, device=device, dtype=torch.bfloat16)] for _ in range(4)]
        lists[1][0].zero_()
        for step in range(1, steps + 1):
            adamw_(*lists, **SETTINGS, step=step, stochastic_rounding=stochastic)
        assert float(lists[3][0].double().mean()) == pytest.approx(expected, rel=0.005)


def test_what_is_no_number_and_what_is_infinite_stay_so(device: str) -> None:
    # All bits of this one are set below the sign: whatever is added to it must not carry over into a number.
    every_bit = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for given, moment in (
        (float("inf"), 1.0),
        (-float("inf"), 1.0),
        (1.0, float(every_bit)),
        (float("nan"), 1.0),
    ):
        parameter = torch.full((64,), given, device=device, dtype=torch.bfloat16)
        exp_avg = torch.full((64,), moment, device=device)
        if moment != moment:
            exp_avg.copy_(every_bit.expand(64))
        rest = [torch.ones_like(parameter), exp_avg, torch.ones(64, device=device)]
        settings = {**SETTINGS, "weight_decay": 0.0}
        adamw_([parameter], *([tensor] for tensor in rest), **settings, step=1, stochastic_rounding=True)
        expected = given if moment == 1 else float("nan")
        torch.testing.assert_close(
            parameter, torch.full_like(parameter, expected), rtol=0, atol=0, equal_nan=True
        )


def test_the_plain_definition_of_stochastic_rounding_is_right_on_average() -> None:
    x = torch.tensor([1.001, -0.3333, 1e-20, 3e38, float("inf"), float("nan")])
    bits = torch.arange(65536)[:, None]
    every = round_stochastically(
        x.expand(65536, -1).contiguous(), bits.expand(-1, len(x)).contiguous()
    ).double()
    torch.testing.assert_close(every.mean(0)[:4], x[:4].double(), rtol=1e-7, atol=0)
    assert every[:, 4].isinf().all()
    assert every[:, 5].isnan().all()


def test_weights_in_fp32_are_never_rounded_stochastically(device: str) -> None:
    start = made(device, torch.float32, torch.float32)
    chance, nearest = copies(start), copies(start)
    adamw_(*chance, **SETTINGS, step=2, stochastic_rounding=True)
    adamw_(*nearest, **SETTINGS, step=2)
    assert all(torch.equal(a, b) for a, b in zip(chance[0], nearest[0], strict=True))


# The optimizer.


def test_a_saved_optimizer_resumes_with_the_same_bits(device: str) -> None:
    def start() -> tuple[Tensor, RushAdamW]:
        parameter = torch.linspace(-1, 1, 100, device=device).bfloat16().requires_grad_()
        return parameter, RushAdamW(
            [parameter], lr=1e-3, state_dtype=torch.float32, stochastic_rounding=True, seed=3
        )

    def steps(parameter: Tensor, optimizer: RushAdamW, first: int, last: int) -> None:
        for step in range(first, last):
            parameter.grad = torch.linspace(-1, step, 100, device=device).bfloat16()
            optimizer.step()

    parameter, optimizer = start()
    steps(parameter, optimizer, 0, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    assert saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    steps(parameter, optimizer, 3, 6)
    resumed, other = start()
    with torch.no_grad():
        resumed.copy_(weights)
    other.load_state_dict(saved)
    assert other.state[resumed]["exp_avg"].dtype == torch.float32
    steps(resumed, other, 3, 6)
    assert torch.equal(resumed, parameter)
    assert torch.equal(other.state[resumed]["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_found_inf_skips_the_update_and_grad_scale_divides_gradients(dtype: torch.dtype, device: str) -> None:
    def after(**told: float) -> list[Tensor]:
        lists = made(device, dtype, torch.float32)
        tensors: Any = {name: torch.tensor(value, device=device) for name, value in told.items()}
        adamw_(*lists, **SETTINGS, step=3, **tensors)
        return [tensor for index in (0, 2, 3) for tensor in lists[index]]

    def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
        """Interpreted, the same bits. Compiled, another kernel, whose products and sums may be joined into other
        multiply-adds: the last place of a moment may differ, and with it that of a weight."""
        if device == "cpu":
            return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        return all(
            torch.allclose(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-8)
            for a, b in zip(ours, theirs, strict=True)
        )

    before = made(device, dtype, torch.float32)
    held = after(found_inf=1.0, grad_scale=2.0)
    assert all(
        torch.equal(*pair) for pair in zip(held, [t for i in (0, 2, 3) for t in before[i]], strict=True)
    )
    assert same(after(found_inf=0.0, grad_scale=1.0), after())
    halved = made(device, dtype, torch.float32)
    adamw_(halved[0], [gradient / 2 for gradient in halved[1]], halved[2], halved[3], **SETTINGS, step=3)
    assert same(after(grad_scale=2.0), [t for index in (0, 2, 3) for t in halved[index]])
    with pytest.raises(KernelRefusal, match="found_inf is one number in fp32; found 2"):
        adamw_(*before, **SETTINGS, step=3, found_inf=torch.zeros(2, device=device))


def test_repeats_give_the_same_bits(device: str) -> None:
    def once() -> list[list[Tensor]]:
        lists = (
            made(device, torch.bfloat16, torch.bfloat16)
            if device == "cuda"
            else [[tensors[0]] for tensors in made(device, torch.bfloat16, torch.bfloat16)]
        )
        adamw_(*lists, **SETTINGS, step=5, stochastic_rounding=True)
        return lists

    first = once()
    for _ in range(100 if device == "cuda" else 10):
        assert all(
            torch.equal(a, b)
            for ours, theirs in zip(once(), first, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameter": torch.zeros(4, dtype=torch.float16)}, "takes fp32 and bf16"),
        ({"exp_avg": torch.zeros(4, dtype=torch.bfloat16)}, "both moments alike"),
        ({"gradient": torch.zeros(5)}, "of the parameter's shape"),
        ({"parameter": torch.zeros(4, 2)[:, 0]}, "contiguous"),
    ],
)
def test_what_it_does_not_support_is_refused_with_a_sentence(change: dict[str, Tensor], said: str) -> None:
    names = ("parameter", "gradient", "exp_avg", "exp_avg_sq")
    with pytest.raises(KernelRefusal, match=said):
        adamw_(*([change.get(name, torch.zeros(4))] for name in names), **SETTINGS, step=1)


def test_settings_that_make_no_sense_are_refused() -> None:
    parameter = torch.zeros(4, requires_grad=True)
    for settings, said in (
        ({"lr": -1.0}, "lr must not be negative"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"state_dtype": torch.float16}, "state_dtype must be"),
    ):
        with pytest.raises(KernelRefusal, match=said):
            RushAdamW([parameter], **settings)
