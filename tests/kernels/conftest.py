"""What the kernels' tests share: where they run, and how an error is held against the one plain torch makes.

One test body serves all places: `device` is "cpu" in `make test`, once for Triton's interpreter and, where a kernel has one, once for the
kernel in C++, and "cuda" in `make test-gpu`. `error` and `check_errors` are fixtures that hand out the functions below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rush.kernels import cpu, support
from rush.kernels.support import INTERPRETED

FP32_ULP = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _round_as_the_hardware_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts fp32 off to bf16 and carries wrongly into fp8; a GPU rounds to nearest even.

    With the interpreter's own cast every 16-bit result would be off by twice what the kernel is: a test of the
    interpreter, not of the kernel. Torch's casts stand in.
    """
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    rounded = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    own = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source != tl.float32 or target not in rounded:
            return own(data, source, target, rounding_mode)
        wide = torch.from_numpy(np.array(data, dtype=np.float32))
        narrow = wide.to(rounded[target])
        bits = narrow.view(torch.uint16 if narrow.itemsize == 2 else torch.uint8)
        return bits.numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A kernel that has no C++ is not asked for one: modules whose kernel has say `CPP = True`."""

    def wanted(item: pytest.Item) -> bool:
        called = getattr(item, "callspec", None)
        of_cpp = called is not None and called.params.get("device") == "c++"
        return not of_cpp or getattr(item.module, "CPP", False)  # type: ignore[attr-defined]

    items[:] = filter(wanted, items)


@pytest.fixture(params=["cpu", "c++", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where this test's tensors live: on a CPU, where Triton interprets its kernels or those in C++ are taken, or on a GPU."""
    if request.param == "c++":
        if reason := cpu.cannot_run():
            pytest.skip(f"kernels for a CPU cannot run here: {reason}")
        monkeypatch.setattr(support, "INTERPRETED", False)
        return "cpu"
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("kernels are compiled on this machine, and the CPU has only the interpreter")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


def size(exact: Tensor) -> float:
    """Root mean square: the scale that errors are relative to."""
    return max(float(exact.double().square().mean().sqrt()), 1e-30)


def rms_error(actual: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference, relative to that of the exact values. Infinite if anything is not finite."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual.double() - exact).square().mean().sqrt()) / size(exact)


def worst_error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the root mean square of the exact values."""
    return float((actual.double() - exact).abs().max()) / size(exact)


def hold_errors(ours: Tensor, plain: Tensor, exact: Tensor, factor: float, what: str = "the result") -> None:
    """Our error is at most `factor` times plain torch's in the same dtype: on average, and at the worst element.

    Where plain torch is exact by luck (a single element, a sum that happens to round well), the bound is what no
    implementation can avoid: rounding the exact value once to the dtype, and two roundings in fp32.
    """
    assert ours.dtype == plain.dtype, (ours.dtype, plain.dtype)
    assert exact.dtype == torch.float64
    if exact.numel() == 0:
        assert ours.shape == exact.shape
        return
    ulp = torch.finfo(ours.dtype).eps
    largest = float(exact.abs().max()) / size(exact)
    once = rms_error(exact.to(ours.dtype), exact)
    bounds = {
        "on average": (
            rms_error(ours, exact),
            max(factor * rms_error(plain, exact), once) + 2 * FP32_ULP,
        ),
        "at the worst": (
            worst_error(ours, exact),
            max(factor * worst_error(plain, exact), ulp / 2 * largest) + 4 * FP32_ULP * largest,
        ),
    }
    for where, (found, allowed) in bounds.items():
        assert found <= allowed, (
            f"{what} {tuple(ours.shape)} {ours.dtype}: {where} off by {found:.3g}, allowed {allowed:.3g} "
            f"({factor:g} times plain torch)"
        )


def outputs_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], douts: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """What a function returns, and the gradients of its inputs for these gradients of its outputs."""
    # Not cloned: a copy would not have the strides that the test is about.
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    gradients = torch.autograd.grad(outs, leaves, list(douts))
    return [x.detach() for x in outs], list(gradients)


def compare_with_float64(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: Tensor,
) -> None:
    """Our outputs are within twice plain torch's error, our gradients within three times, both against float64.

    `plain` is run on the inputs as they are and, for the exact values, on the same numbers in float64.
    """
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    with torch.no_grad():
        shaped = plain(*inputs)
    douts = [
        torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
        for x in ([shaped] if isinstance(shaped, Tensor) else shaped)
    ]
    our_outs, our_gradients = outputs_and_gradients(ours, inputs, douts)
    plain_outs, plain_gradients = outputs_and_gradients(plain, inputs, douts)
    exact_outs, exact_gradients = outputs_and_gradients(
        plain, [x.double() for x in inputs], [x.double() for x in douts]
    )
    for number, found in enumerate(zip(our_outs, plain_outs, exact_outs, strict=True)):
        hold_errors(*found, factor=2, what=f"output {number}")
    for number, found in enumerate(zip(our_gradients, plain_gradients, exact_gradients, strict=True)):
        hold_errors(*found, factor=3, what=f"gradient {number}")


@pytest.fixture
def compare() -> Callable[..., None]:
    """compare(ours, plain, *inputs): outputs and gradients held against plain torch and float64."""
    return compare_with_float64


@pytest.fixture
def backend(device: str) -> str:
    """The compiler for this device; on a CPU only what traces, since generated code would not touch our kernels."""
    return "inductor" if device == "cuda" else "aot_eager"


@pytest.fixture
def repeats(device: str) -> int:
    """How often a result must come out with the same bits: the interpreter is slow and has one thread anyway."""
    return 100 if device == "cuda" else 3


@pytest.fixture
def error() -> Callable[[Tensor, Tensor], float]:
    """error(actual, exact64): the relative root mean square error."""
    return rms_error


@pytest.fixture
def check_errors() -> Callable[..., None]:
    """check_errors(ours, plain, exact64, factor, what=""): fails if our error is more than factor times plain torch's."""
    return hold_errors
