"""GeGLU against float64 and plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.geglu import geglu, reference
from rush.models.layers import GeGLU

CPP = True
# The power in 1 / (1 + power) may be infinite, and must; numpy, in the interpreter, remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (3, 7), (2, 5, 64), (4097,), (2, 8192)]
LARGE = [(1000, 8192), (333, 5461)]


def inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    gate, up = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    return 3 * gate, up


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_and_gradients_are_as_near_to_float64_as_plain_torch(
    device: str, dtype: torch.dtype, compare: Callable[..., None]
) -> None:
    for shape in [*SHAPES, *LARGE] if device == "cuda" else SHAPES:
        compare(geglu, reference.geglu, *inputs(device, shape, dtype))


def test_the_reference_is_the_model_s_own(device: str) -> None:
    gate, up = inputs(device, (4, 64), torch.bfloat16)
    assert torch.equal(reference.geglu(gate, up), GeGLU()(gate, up))


def test_extreme_gates_stay_finite(device: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 1e4], device=device, requires_grad=True)
    up = torch.ones_like(gate).requires_grad_()
    out = geglu(gate, up)
    torch.testing.assert_close(out, gate.relu(), rtol=1e-5, atol=1e-5)
    dgate, dup = torch.autograd.grad(out.sum(), (gate, up))
    torch.testing.assert_close(dgate, torch.tensor([0, 0, 0, 0.5, 1, 1], device=device), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dup, out.detach())


def test_other_strides_are_copied(device: str, compare: Callable[..., None]) -> None:
    wide, _ = inputs(device, (6, 64), torch.float32)
    compare(geglu, reference.geglu, *wide.chunk(2, dim=-1))
    compare(geglu, reference.geglu, wide.t()[:32], wide.t()[32:])


def test_it_compiles_without_a_graph_break(device: str, backend: str, compare: Callable[..., None]) -> None:
    compiled = torch.compile(lambda gate, up: geglu(gate * 2, up) + 1, fullgraph=True, backend=backend)
    plain = lambda gate, up: reference.geglu(gate * 2, up) + 1  # noqa: E731
    compare(compiled, plain, *inputs(device, (5, 64), torch.float32))


def test_it_can_be_recomputed_and_has_the_same_bits_every_time(device: str, repeats: int) -> None:
    gate, up = (x.requires_grad_() for x in inputs(device, (5, 999), torch.bfloat16))

    def body(gate: Tensor) -> Tensor:
        return geglu(gate, up).float().square().sum()

    first = [geglu(gate, up), *torch.autograd.grad(body(gate), (gate, up))]
    for _ in range(repeats):
        again = [
            geglu(gate, up),
            *torch.autograd.grad(checkpoint(body, gate, use_reentrant=False), (gate, up)),
        ]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))


def test_torch_finds_the_operator_well_formed(device: str) -> None:
    given = tuple(x.requires_grad_() for x in inputs(device, (3, 8), torch.float32))
    torch.library.opcheck(
        torch.ops.rush.geglu.default,
        given,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_an_empty_tensor_works(device: str) -> None:
    assert geglu(torch.zeros(0, 4, device=device), torch.zeros(0, 4, device=device)).shape == (0, 4)


def test_what_it_does_not_support_is_refused(device: str) -> None:
    gate, up = inputs(device, (3, 16), torch.float32)
    with pytest.raises(KernelRefusal, match="in one dtype"):
        geglu(gate.double(), up.double())
    with pytest.raises(KernelRefusal, match="in one dtype"):
        geglu(gate, up.half())
    with pytest.raises(KernelRefusal, match="of one shape"):
        geglu(gate, up[:1])


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count() -> None:
    gate = torch.randn(2**31 + 4099, device="cuda", dtype=torch.bfloat16)
    tail = slice(gate.numel() - 5, gate.numel())
    expected = reference.geglu(gate[tail].float(), gate[tail].float()).to(torch.bfloat16)
    torch.testing.assert_close(geglu(gate, gate)[tail], expected, rtol=2e-2, atol=1e-3)
