"""Rotary positions against float64, plain torch and the model's own turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.rope import reference, rope
from rush.models.rotary import PlainRotate, Rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# batch, query heads, key heads, positions, head dim
SHAPES = [(1, 1, 1, 1, 2), (2, 3, 1, 5, 6), (1, 4, 2, 7, 16), (2, 2, 2, 3, 64)]
LARGE = [(2, 32, 8, 129, 64), (1, 32, 8, 65, 128), (1, 12, 12, 33, 80)]


def inputs(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, own_positions: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as the linear layers leave them: the heads of a token side by side."""
    batch, q_heads, k_heads, tokens, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    q_bhtd, k_bktd = (
        torch.randn(batch, tokens, heads, head_dim, generator=generator, device=device)
        .to(dtype)
        .transpose(1, 2)
        for heads in (q_heads, k_heads)
    )
    positions_bt = torch.arange(tokens, device=device)[None]
    if own_positions:
        positions_bt = positions_bt + 3 * torch.arange(batch, device=device)[:, None]
    rotary = Rotary(head_dim, 10000.0, None).to(device)
    return q_bhtd, k_bktd, *rotary(positions_bt)


def against_float64(
    compare: Callable[..., None], q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor
) -> None:
    """Angles are fp32 data, the same numbers for everyone; only queries and keys have gradients."""

    def plain(q_bhtd: Tensor, k_bktd: Tensor) -> tuple[Tensor, Tensor]:
        angles = (x.to(torch.promote_types(q_bhtd.dtype, torch.float32)) for x in (cos_btd, sin_btd))
        return reference.rope(q_bhtd, k_bktd, *angles)

    compare(lambda q, k: rope(q, k, cos_btd, sin_btd), plain, q_bhtd, k_bktd)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_positions", [False, True])
def test_turn_and_gradients_are_as_near_to_float64_as_plain_torch(
    device: str, dtype: torch.dtype, own_positions: bool, compare: Callable[..., None]
) -> None:
    for shape in [*SHAPES[1:3], *LARGE] if device == "cuda" else SHAPES:
        against_float64(compare, *inputs(device, shape, dtype, own_positions))


def test_the_reference_is_the_model_s_own_turn(device: str) -> None:
    given = inputs(device, (2, 4, 2, 7, 16), torch.bfloat16)
    for mine, theirs in zip(reference.rope(*given), PlainRotate()(*given), strict=True):
        assert torch.equal(mine, theirs)


def test_any_strides_will_do(device: str, compare: Callable[..., None]) -> None:
    q, k, cos, sin = inputs(device, (2, 4, 4, 6, 16), torch.float32)
    against_float64(compare, q.contiguous(), k.contiguous(), cos, sin)
    against_float64(compare, q[:, ::2], k[:, 1:3], cos, sin)
    wide = torch.randn(2, 6, 3, 4, 16, device=device).transpose(
        1, 3
    )  # as one fused linear layer would leave them
    against_float64(compare, wide[:, :, 0], wide[:, :, 1], cos, sin)
    against_float64(compare, q[..., ::2], k[..., ::2], cos[..., ::2], sin[..., ::2])


def test_results_lie_as_the_linear_layers_leave_their_outputs(device: str) -> None:
    q, k, cos, sin = inputs(device, (2, 4, 2, 6, 16), torch.float32)
    for out in rope(q, k, cos, sin):
        assert out.transpose(1, 2).is_contiguous()
    leaf = q.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(rope(leaf, k, cos, sin)[0].sum(), leaf)
    assert gradient.transpose(1, 2).is_contiguous()


def test_the_backward_pass_turns_back(device: str) -> None:
    """A turn keeps lengths and is undone by its transpose: the gradient of ½‖turned‖² is the input itself."""
    q, k, cos, sin = inputs(device, (2, 4, 2, 6, 16), torch.float32)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    turned = rope(q, k, cos, sin)
    gradients = torch.autograd.grad(sum(x.square().sum() / 2 for x in turned), (q, k))
    for gradient, x in zip(gradients, (q, k), strict=True):
        torch.testing.assert_close(gradient, x.detach(), rtol=1e-5, atol=1e-6)


def test_keys_alone_get_a_gradient(device: str) -> None:
    q, k, cos, sin = inputs(device, (1, 2, 2, 4, 8), torch.float32)
    leaf = k.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(rope(q, leaf, cos, sin)[1].sum(), leaf)
    (plain,) = torch.autograd.grad(reference.rope(q, leaf, cos, sin)[1].sum(), leaf)
    torch.testing.assert_close(gradient, plain)


def test_it_compiles_without_a_graph_break(device: str, backend: str, compare: Callable[..., None]) -> None:
    q, k, cos, sin = inputs(device, (2, 4, 2, 6, 16), torch.float32)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = (x.to(torch.promote_types(q.dtype, torch.float32)) for x in (cos, sin))
        turned_q, turned_k = reference.rope(q * 2, k, *angles)
        return turned_q + 1, turned_k

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = rope(q * 2, k, cos, sin)
        return turned_q + 1, turned_k

    compare(torch.compile(ours, fullgraph=True, backend=backend), plain, q, k)


def test_it_can_be_recomputed_and_has_the_same_bits_every_time(device: str, repeats: int) -> None:
    q, k, cos, sin = inputs(device, (2, 4, 2, 6, 16), torch.bfloat16)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()

    def body(q: Tensor) -> Tensor:
        turned_q, turned_k = rope(q, k, cos, sin)
        return turned_q.float().square().sum() + turned_k.float().pow(3).sum()

    first = [*rope(q, k, cos, sin), *torch.autograd.grad(body(q), (q, k))]
    for _ in range(repeats):
        again = [
            *rope(q, k, cos, sin),
            *torch.autograd.grad(checkpoint(body, q, use_reentrant=False), (q, k)),
        ]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))


def test_torch_finds_the_operator_well_formed(device: str) -> None:
    q, k, cos, sin = inputs(device, (1, 2, 1, 3, 4), torch.float32)
    given = (q.detach().requires_grad_(), k.detach().requires_grad_(), cos, sin)
    torch.library.opcheck(
        torch.ops.rush.rope.default,
        given,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_what_it_does_not_support_is_refused(device: str) -> None:
    q, k, cos, sin = inputs(device, (2, 4, 2, 6, 16), torch.float32)
    with pytest.raises(KernelRefusal, match="in one dtype"):
        rope(q, k.half(), cos, sin)
    with pytest.raises(KernelRefusal, match="batch, heads, positions, head dim"):
        rope(q[0], k[0], cos, sin)
    with pytest.raises(KernelRefusal, match="one even head dim"):
        rope(q[..., :15], k[..., :15], cos[..., :15], sin[..., :15])
    with pytest.raises(KernelRefusal, match="cosines and sines"):
        rope(q, k, cos[:, :3], sin[:, :3])
    with pytest.raises(KernelRefusal, match="at most 32768 elements"):
        rope(
            q.new_zeros(1, 600, 1, 64),
            k.new_zeros(1, 1, 1, 64),
            cos.new_zeros(1, 1, 64),
            sin.new_zeros(1, 1, 64),
        )
