"""What follows a layer with a bias: values and both gradients against float64 and plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.bias_grad import gelu_bias_grad, reference, split_bias_grad
from rush.kernels.bias_grad import triton as kernels

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 33), (5, 21), (2, 3, 48), (513, 6), (2, 300)]
LARGE = [(3000, 768), (8, 1024, 2304)]


def values(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    product = 2 * torch.randn(shape, generator=generator, device=device)
    return product.to(dtype), torch.randn(shape[-1:], generator=generator, device=device).to(dtype)


def gelu(product: Tensor, bias_o: Tensor) -> Tensor:
    """As it is used: the sum is made with a bias that takes no gradient from it."""
    return gelu_bias_grad(product + bias_o.detach(), bias_o)


def weighted(parts: tuple[Tensor, ...]) -> Tensor:
    """Tell the parts apart."""
    return torch.cat([parts[0].square(), 2 * parts[1], parts[2].sin()], dim=-1)


def parts(product: Tensor, bias_o: Tensor) -> Tensor:
    return weighted(split_bias_grad(product + bias_o.detach(), bias_o))


def plain_parts(product: Tensor, bias_o: Tensor) -> Tensor:
    return weighted(reference.split_bias_grad(product, bias_o, 3))


@pytest.mark.parametrize("width", [768, 2048, 3072, 8192])
def test_there_are_programs_for_every_multiprocessor(width: int) -> None:
    strips = -(-width // kernels.COLUMNS)
    rows = kernels.program_rows(16384, strips)
    # Whole tiles of rows; and no more rows than leave a thousand programs, where the least stretch allows it.
    assert rows % kernels.ROWS == 0
    assert strips * 16384 // rows >= 1000 or rows == kernels.MIN_ROWS
    assert kernels.program_rows(1, strips) == kernels.MIN_ROWS


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_as_near_to_float64_as_plain_torch(
    device: str, dtype: torch.dtype, compare: Callable[..., None]
) -> None:
    for shape in [*SHAPES, *LARGE] if device == "cuda" else SHAPES:
        compare(gelu, reference.gelu_bias_grad, *values(device, shape, dtype))
        compare(parts, plain_parts, *values(device, shape, dtype))


def test_a_bias_may_have_another_dtype_and_its_gradient_has_it(device: str) -> None:
    product, bias_o = values(device, (700, 96), torch.bfloat16)
    wide_o = bias_o.float().requires_grad_()
    for function in (gelu_bias_grad, lambda x, bias: weighted(split_bias_grad(x, bias))):
        (found,) = torch.autograd.grad(function(product, wide_o).float().sum(), wide_o)
        exact = product.double().requires_grad_()
        made = (
            torch.nn.functional.gelu(exact, approximate="tanh")
            if function is gelu_bias_grad
            else weighted(torch.chunk(exact, 3, dim=-1))
        )
        (expected,) = torch.autograd.grad(made.sum(), exact)
        assert found.dtype == torch.float32
        # Sums of 700 numbers of which each may be rounded to bf16 before it comes here.
        torch.testing.assert_close(found.double(), expected.sum(0), rtol=1e-2, atol=0.3)


def test_parts_are_views_and_gradients_of_any_strides_are_joined(device: str) -> None:
    product, bias_o = values(device, (2, 5, 24), torch.float32)
    x = product.requires_grad_()
    first, second, third = split_bias_grad(x, bias_o.requires_grad_())
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    # As attention gives them back: heads before positions.
    turned = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (first, second, third)]
    loss = sum((number + 1) * part.square().sum() for number, part in enumerate(turned))
    dx, d_bias = torch.autograd.grad(loss, (x, bias_o))
    factors = torch.tensor([2.0, 4.0, 6.0], device=device).repeat_interleave(8)
    torch.testing.assert_close(dx, factors * product)
    torch.testing.assert_close(d_bias, (factors * product).sum((0, 1)))


def test_they_compile_without_a_graph_break(device: str, backend: str, compare: Callable[..., None]) -> None:
    for mine, theirs in ((gelu, reference.gelu_bias_grad), (parts, plain_parts)):
        compiled = torch.compile(mine, fullgraph=True, backend=backend)
        compare(compiled, theirs, *values(device, (5, 48), torch.float32))


def test_they_can_be_recomputed_and_have_the_same_bits_every_time(device: str, repeats: int) -> None:
    product, bias_o = (value.requires_grad_() for value in values(device, (1100, 30), torch.bfloat16))

    def body(product: Tensor, bias_o: Tensor) -> Tensor:
        return gelu(product, bias_o).float().square().sum() + parts(product, bias_o).float().sum()

    first = torch.autograd.grad(body(product, bias_o), (product, bias_o))
    for _ in range(repeats):
        made = checkpoint(body, product, bias_o, use_reentrant=False)
        again = torch.autograd.grad(made, (product, bias_o))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))


def test_torch_finds_the_operators_well_formed(device: str) -> None:
    x, bias_o = (value.requires_grad_() for value in values(device, (3, 12), torch.float32))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.rush.gelu_bias_grad.default, (x, bias_o), test_utils=checks)
    three = [x.detach().clone() for _ in range(3)]
    torch.library.opcheck(
        torch.ops.rush.concat_bias_grad.default,
        (*three, torch.float32),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_they_do_not_support_is_refused(device: str) -> None:
    x, bias_o = values(device, (4, 8), torch.float32)
    with pytest.raises(KernelRefusal, match="takes fp32, bf16 and fp16"):
        gelu_bias_grad(x.double(), bias_o)
    with pytest.raises(KernelRefusal, match="a bias as long as the last dim"):
        gelu_bias_grad(x, bias_o[:4])
    with pytest.raises(KernelRefusal, match="a multiple of three"):
        split_bias_grad(x, bias_o)


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count() -> None:
    x = torch.randn(2**31 // 3072 + 7, 3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias_o = torch.zeros(3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (dx,) = torch.autograd.grad(gelu_bias_grad(x, bias_o).sum(), x)
    tail = x[-3:].detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(reference.gelu_bias_grad(tail, bias_o.float()).sum(), tail)
    torch.testing.assert_close(dx[-3:].float(), expected, rtol=2e-2, atol=1e-2)
