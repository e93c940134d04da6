"""FlashAttention 1's order: the same attention as exactly, though its outputs are divided and rescaled again and again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal

pytest.importorskip("triton")

from rush.kernels.flash_attention.first_order import COLUMNS, first_order_attention
from rush.kernels.flash_attention.reference import attention

Check = Callable[..., None]
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")


def drawn(
    batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    return [
        torch.randn(batch, heads, length, head_dim, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        for seed in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, COLUMNS, 2 * COLUMNS + 37])
def test_it_is_as_exact_as_plain_attention(
    length: int, dtype: torch.dtype, causal: bool, device: str, check_errors: Check
) -> None:
    q, k, v = drawn(2, 2, length, 32, dtype, device)
    exact = attention(q.double(), k.double(), v.double(), causal=causal)
    plain = attention(q, k, v, causal=causal)
    check_errors(first_order_attention(q, k, v, causal=causal), plain, exact, 2.0)


def test_scores_that_grow_from_tile_to_tile_rescale_what_came_before(
    device: str, check_errors: Check
) -> None:
    """Keys whose later tiles win: without rescaling the first tiles would stay in the output."""
    q, k, v = drawn(1, 1, 3 * COLUMNS, 16, torch.float32, device)
    k = k * torch.linspace(0.1, 12.0, 3 * COLUMNS, device=device)[:, None]
    exact = attention(q.double(), k.double(), v.double(), causal=False)
    check_errors(first_order_attention(q, k, v, causal=False), attention(q, k, v, causal=False), exact, 3.0)


def test_what_it_does_not_support_it_refuses(device: str) -> None:
    q, k, v = drawn(1, 1, 4, 16, torch.float32, device)
    with pytest.raises(KernelRefusal, match="of one shape"):
        first_order_attention(q, k[:, :, :2], v)
    with pytest.raises(KernelRefusal, match="contiguous"):
        first_order_attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    with pytest.raises(KernelRefusal, match="head dims"):
        first_order_attention(q[..., :8].contiguous(), k[..., :8].contiguous(), v[..., :8].contiguous())
