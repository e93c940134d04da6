# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention in the order of FlashAttention 1, to compare with ours, which has that of FlashAttention 2.

One program per head. The outer loop is over tiles of keys and values, the inner one over tiles of queries. A tile of
queries is visited once for every tile of keys, so its output, maxima and sums cannot stay on chip: they are read from
device memory, rescaled, divided and written again at every visit. Programs cannot share a head, because all tiles of
keys change the same outputs; with fewer heads than multiprocessors most of the device is idle. FlashAttention 2 swaps
the loops: `triton.py` beside this file. (Dao et al. 2022, arXiv:2205.14135, algorithm 1; Dao 2023, arXiv:2307.08691.)

A study, forward only: nothing trains with it. `rush explain flash-attention` times both.

Shapes: m queries of a tile, n keys of a tile, d head dim.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.flash_attention.triton import _dot
from rush.kernels.support import require, require_device

LOG2E = math.log2(math.e)
ROWS, COLUMNS = 64, 64
HEAD_DIMS = (16, 32, 64, 128)


@triton.jit
def first_order_kernel(
    q, k, v, o, running, maxima, sums, num_tokens, scale2,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of one head; `running` is the output so far, in fp32, always divided by the sum so far."""
    head = tl.program_id(0).to(tl.int64)
    at = head * num_tokens * D
    lane_d = tl.arange(0, D)
    for start_n in tl.range(0, num_tokens, COLUMNS):
        key_n = start_n + tl.arange(0, COLUMNS)
        there_n = key_n < num_tokens
        keys = at + key_n[:, None] * D + lane_d[None, :]
        k_nd = tl.load(k + keys, mask=there_n[:, None], other=0.0)
        v_nd = tl.load(v + keys, mask=there_n[:, None], other=0.0)
        begin = start_n * 0
        if CAUSAL:
            begin = start_n // ROWS * ROWS
        for start_m in tl.range(begin, num_tokens, ROWS):
            query_m = start_m + tl.arange(0, ROWS)
            there_m = query_m < num_tokens
            queries = at + query_m[:, None] * D + lane_d[None, :]
            q_md = tl.load(q + queries, mask=there_m[:, None], other=0.0)
            s_mn = _dot(q_md, tl.trans(k_nd), None, PRECISION) * scale2
            seen = there_n[None, :]
            if CAUSAL:
                seen = seen & (key_n[None, :] <= query_m[:, None])
            s_mn = tl.where(seen, s_mn, -float("inf"))
            # A finite maximum, so that a query that sees none of these keys gives powers of minus infinity, not NaN.
            tile_max_m = tl.maximum(tl.max(s_mn, 1), -1e30)
            p_mn = tl.exp2(s_mn - tile_max_m[:, None])
            tile_sum_m = tl.sum(p_mn, 1)
            pv_md = _dot(p_mn.to(v_nd.dtype), v_nd, None, PRECISION)
            # What the tiles of keys before this one left; nothing yet for the first.
            visited_m = there_m & (start_n > 0)
            statistics = head * num_tokens + query_m
            max_m = tl.load(maxima + statistics, mask=visited_m, other=-1e30)
            sum_m = tl.load(sums + statistics, mask=visited_m, other=0.0)
            acc_md = tl.load(running + queries, mask=visited_m[:, None], other=0.0)
            new_max_m = tl.maximum(max_m, tile_max_m)
            old_m = tl.exp2(max_m - new_max_m) * sum_m
            new_m = tl.exp2(tile_max_m - new_max_m)
            new_sum_m = old_m + new_m * tile_sum_m
            acc_md = (acc_md * old_m[:, None] + pv_md * new_m[:, None]) / new_sum_m[:, None]
            tl.store(running + queries, acc_md, mask=there_m[:, None])
            tl.store(maxima + statistics, new_max_m, mask=there_m)
            tl.store(sums + statistics, new_sum_m, mask=there_m)
            end_m = num_tokens
            if CAUSAL:
                end_m = tl.minimum(start_m + ROWS, num_tokens)
            if start_n + COLUMNS >= end_m:
                tl.store(o + queries, acc_md.to(o.dtype.element_ty), mask=there_m[:, None])
        # The next tile of keys reads what other threads of this program wrote.
        tl.debug_barrier()


def first_order_attention(q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, *, causal: bool = True) -> Tensor:
    """softmax(q kᵀ / √d) v in FlashAttention 1's order: contiguous tensors of one shape, as many keys as queries."""
    require_device("first_order_attention", q_bhtd, k_bhtd, v_bhtd)
    require(
        q_bhtd.shape == k_bhtd.shape == v_bhtd.shape and q_bhtd.dim() == 4,
        f"first_order_attention takes three tensors [batch, heads, positions, head dim] of one shape; found "
        f"{tuple(q_bhtd.shape)}, {tuple(k_bhtd.shape)} and {tuple(v_bhtd.shape)}.",
    )
    batch, heads, length, head_dim = q_bhtd.shape
    require(head_dim in HEAD_DIMS, f"first_order_attention supports head dims {HEAD_DIMS}; found {head_dim}.")
    require(
        all(x.is_contiguous() for x in (q_bhtd, k_bhtd, v_bhtd)),
        "first_order_attention takes contiguous tensors.",
    )
    o_bhtd = torch.empty_like(q_bhtd)
    running = torch.empty(q_bhtd.shape, dtype=torch.float32, device=q_bhtd.device)
    maxima, sums = (
        torch.empty(batch * heads, length, dtype=torch.float32, device=q_bhtd.device) for _ in range(2)
    )
    precision = "ieee" if q_bhtd.dtype == torch.float32 else "tf32"
    first_order_kernel[(batch * heads,)](
        q_bhtd, k_bhtd, v_bhtd, o_bhtd, running, maxima, sums, length, head_dim**-0.5 * LOG2E,
        D=head_dim, ROWS=ROWS, COLUMNS=COLUMNS, CAUSAL=causal, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return o_bhtd
