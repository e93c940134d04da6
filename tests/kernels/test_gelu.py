"""GELU (tanh approximation) against float64 and plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.gelu import gelu, reference
from rush.models.layers import GeluTanh

CPP = True
# exp(-x) may be infinite, which is what 1 / (1 + exp(-x)) needs; numpy, in the interpreter, remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (3, 7), (2, 5, 64), (4097,), (2, 8192)]
LARGE = [(1000, 8192), (333, 3072)]


def values(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return (2 * torch.randn(shape, generator=generator, device=device)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_as_near_to_float64_as_plain_torch(
    device: str, dtype: torch.dtype, compare: Callable[..., None]
) -> None:
    for shape in [*SHAPES, *LARGE] if device == "cuda" else SHAPES:
        compare(gelu, reference.gelu, values(device, shape, dtype))


def test_the_reference_is_the_model_s_own(device: str) -> None:
    x = values(device, (4, 64), torch.bfloat16)
    assert torch.equal(reference.gelu(x), GeluTanh()(x))


def test_extreme_values_stay_finite(device: str) -> None:
    x = torch.tensor([-1e4, -100.0, -10.0, 0.0, 10.0, 100.0, 1e4], device=device, requires_grad=True)
    out = gelu(x)
    torch.testing.assert_close(out, x.relu(), rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(
        slope, torch.tensor([0, 0, 0, 0.5, 1, 1, 1], device=device), rtol=1e-6, atol=1e-6
    )


def test_other_strides_are_copied(device: str, compare: Callable[..., None]) -> None:
    x = values(device, (6, 64), torch.float32)
    compare(gelu, reference.gelu, x[:, ::2])
    compare(gelu, reference.gelu, x.t())


def test_it_compiles_without_a_graph_break(device: str, backend: str, compare: Callable[..., None]) -> None:
    compiled = torch.compile(lambda x: gelu(x * 2) + 1, fullgraph=True, backend=backend)
    compare(compiled, lambda x: reference.gelu(x * 2) + 1, values(device, (5, 64), torch.float32))


def test_it_can_be_recomputed_and_has_the_same_bits_every_time(device: str, repeats: int) -> None:
    x = values(device, (5, 999), torch.bfloat16).requires_grad_()

    def body(x: Tensor) -> Tensor:
        return gelu(x).float().square().sum()

    first = [gelu(x), *torch.autograd.grad(body(x), x)]
    for _ in range(repeats):
        again = [gelu(x), *torch.autograd.grad(checkpoint(body, x, use_reentrant=False), x)]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))


def test_torch_finds_the_operator_well_formed(device: str) -> None:
    x = values(device, (3, 8), torch.float32).requires_grad_()
    torch.library.opcheck(
        torch.ops.rush.gelu.default,
        (x,),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_what_it_does_not_support_is_refused(device: str) -> None:
    with pytest.raises(KernelRefusal, match="takes fp32, bf16 and fp16"):
        gelu(torch.zeros(3, dtype=torch.float64, device=device))


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count() -> None:
    x = torch.randn(2**31 + 4099, device="cuda", dtype=torch.bfloat16)
    tail = slice(x.numel() - 5, x.numel())
    torch.testing.assert_close(gelu(x)[tail], reference.gelu(x[tail]), rtol=2e-2, atol=1e-3)
