# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The attention kernels: three of them, each a loop over tiles that stay on chip.

Plain attention writes a score for every pair of positions to device memory and reads it back three times. Here a program
keeps one tile of queries, streams tiles of keys and values, and holds for each query a running maximum, a running sum
and the output so far, rescaled when a tile raises the maximum (online softmax). Exponentials are exp2, with log2(e)
folded into the scale. One number per query is saved for the backward pass: log2 of its sum.

Forward: one program per tile of queries (as in FlashAttention 2), so nothing is summed across programs. Backward: scores
are recomputed from that number. One kernel owns a tile of queries and loops over the keys for dq; another owns a tile of
keys and loops over the queries, of every query head that shares them, for dk and dv. That computes two of five matmuls
twice, and buys a fixed summation order: no atomics, deterministic. delta = Σ o·do is computed by the first kernel.

Tiles below the diagonal (and inside one document) need no mask and have a loop without one; the diagonal and document
boundaries have a masked loop; tiles above it or in other documents are never loaded. Work per program grows along the
sequence, so the longest start first, and heads are processed in sections whose keys and values fit into L2 together.

Shapes: m queries of a tile, n keys of a tile, d head dim, b batch, h query heads, k key/value heads, t positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rush.kernels.flash_attention.tiles import Tiles, choose
from rush.kernels.support import INTERPRETED, empty_bthd

LOG2E = math.log2(math.e)
# The interpreter multiplies the bit patterns of bf16 instead of its values; in fp32 the products are the same.
_WIDEN = tl.constexpr(INTERPRETED)
# Numbers that change from batch to batch, and that a kernel need not be compiled anew for.
_PLAIN = ["num_batch_heads", "num_heads", "num_kv_heads", "num_tokens", "section"]
SECTION_BYTES = 24 * 2**20
"""Keys and values read concurrently: half of the 50 MiB L2 of a Hopper GPU."""


@triton.jit
def _share(num_tiles, num_heads, section, LONGEST_LAST: tl.constexpr):
    """The tile and head of this program: sections of heads, and in each the longest tiles first."""
    program = tl.program_id(0)
    begin = program // (section * num_tiles) * section
    width = tl.minimum(section, num_heads - begin)
    within = program - begin * num_tiles
    tile = within // width
    if LONGEST_LAST:
        tile = num_tiles - 1 - tile
    return tile, begin + within % width


@triton.jit
def _tile(
    source, strides, batch, head, start, num_tokens,
    SIZE: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """SIZE positions of a head from `start`; positions past the end are zeros (BOUNDED: there may be some)."""
    if TMA:
        tile = source.load([batch, head, start, 0]).reshape(SIZE, D)
    else:
        # 64 bits for what can be large, where the tile begins; inside of it 32 are enough.
        begin = (
            batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + start.to(tl.int64) * strides[2]
        )
        position = tl.arange(0, SIZE)
        pointers = source + begin + (position[:, None] * strides[2] + tl.arange(0, D)[None, :])
        if BOUNDED:
            tile = tl.load(pointers, mask=(start + position < num_tokens)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _put(target, strides, batch, head, start, num_tokens, tile, SIZE: tl.constexpr, D: tl.constexpr):
    """Write SIZE positions of a head from `start`, as far as they exist."""
    begin = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + start.to(tl.int64) * strides[2]
    position = tl.arange(0, SIZE)
    pointers = target + begin + (position[:, None] * strides[2] + tl.arange(0, D)[None, :])
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=(start + position < num_tokens)[:, None])


@triton.jit
def _dot(left, right, so_far, PRECISION: tl.constexpr):
    """so_far + left · right, summed in fp32."""
    if _WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, so_far, input_precision=PRECISION)


@triton.jit
def _within(position, low, high, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Whether positions of the side that is looped over are visible to those of the tile: low <= position < high."""
    if LOW and HIGH:
        seen = (position >= low) & (position < high)
    elif LOW:
        seen = position >= low
    else:
        seen = position < high
    return seen


@triton.jit
def _keys_in_view(
    first, last, row, start, num_tokens,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What a tile of queries loops over: keys with a mask [a, b), without [b, c), with a mask [c, d).

    Also the first visible key of each query, and one past the last. `row` is where the batch row's documents are.
    """
    query_m = start + tl.arange(0, ROWS)
    end = tl.minimum(start + ROWS, num_tokens)
    a = start * 0
    b = a
    low_m = query_m
    high_m = query_m + 1
    if CAUSAL:
        c = start // COLUMNS * COLUMNS
        d = end
    else:
        c = num_tokens // COLUMNS * COLUMNS + a
        d = num_tokens + a
        high_m = query_m * 0 + num_tokens
    if DOCUMENTS:
        low_m = tl.load(first + row + query_m, mask=query_m < num_tokens, other=0)
        a = tl.load(first + row + start) // COLUMNS * COLUMNS
        b = tl.cdiv(tl.load(first + row + end - 1), COLUMNS) * COLUMNS
        if not CAUSAL:
            high_m = tl.load(last + row + query_m, mask=query_m < num_tokens, other=num_tokens)
            c = tl.load(last + row + start) // COLUMNS * COLUMNS
            d = tl.load(last + row + end - 1)
        c = tl.maximum(b, c)
    return a, b, c, d, low_m, high_m


@triton.jit
def _queries_in_view(
    first, last, row, start, num_tokens,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The queries of a tile of keys, as above with queries and keys swapped."""
    key_n = start + tl.arange(0, COLUMNS)
    end = tl.minimum(start + COLUMNS, num_tokens)
    a = start * 0
    b = a
    c = num_tokens + a
    d = c
    low_n = key_n
    high_n = key_n
    if CAUSAL:
        a = start // ROWS * ROWS
        b = tl.cdiv(end, ROWS) * ROWS
    if DOCUMENTS:
        high_n = tl.load(last + row + key_n, mask=key_n < num_tokens, other=0)
        c = tl.load(last + row + start) // ROWS * ROWS
        d = tl.load(last + row + end - 1)
        if not CAUSAL:
            low_n = tl.load(first + row + key_n, mask=key_n < num_tokens, other=0)
            a = tl.load(first + row + start) // ROWS * ROWS
            b = tl.cdiv(tl.load(first + row + end - 1), ROWS) * ROWS
    c = tl.maximum(b, c)
    return a, b, c, d, low_n, high_n


@triton.jit
def _attend(
    acc_md, max_m, sum_m, q_md, k, v, k_strides, v_strides, batch, kv_head, begin, end, num_tokens,
    low_m, high_m, scale2,
    D: tl.constexpr, COLUMNS: tl.constexpr, DOCUMENTS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loop over the keys from begin to end: the running output, maximum and sum of each query."""
    for next_start in tl.range(begin, end, COLUMNS):
        start = tl.multiple_of(next_start, COLUMNS)
        k_nd = _tile(k, k_strides, batch, kv_head, start, num_tokens, COLUMNS, D, TMA, MASKED)
        s_mn = _dot(q_md, tl.trans(k_nd), None, PRECISION)
        if MASKED:
            key_n = start + tl.arange(0, COLUMNS)
            seen = _within(key_n[None, :], low_m[:, None], high_m[:, None], DOCUMENTS, True)
            s_mn = tl.where(seen, s_mn * scale2, -float("inf"))
            new_max_m = tl.maximum(max_m, tl.max(s_mn, 1))
            p_mn = tl.exp2(s_mn - new_max_m[:, None])
        else:
            # The scale is positive, so it can wait until after the maximum: a fused multiply-add an element.
            new_max_m = tl.maximum(max_m, tl.max(s_mn, 1) * scale2)
            p_mn = tl.exp2(s_mn * scale2 - new_max_m[:, None])
        shrink_m = tl.exp2(max_m - new_max_m)
        sum_m = sum_m * shrink_m + tl.sum(p_mn, 1)
        acc_md = acc_md * shrink_m[:, None]
        v_nd = _tile(v, v_strides, batch, kv_head, start, num_tokens, COLUMNS, D, TMA, MASKED)
        acc_md = _dot(p_mn.to(v_nd.dtype), v_nd, acc_md, PRECISION)
        max_m = new_max_m
    return acc_md, max_m, sum_m


@triton.jit(do_not_specialize=_PLAIN)
def flash_forward_tiles(
    q, k, v, o, lse2, first, last,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    num_batch_heads, num_heads, num_tokens, section, scale2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output and log2 of the softmax's sum for one tile of queries of one head."""
    tile, index = _share(tl.cdiv(num_tokens, ROWS), num_batch_heads, section, CAUSAL)
    batch = index // num_heads
    head = index % num_heads
    kv_head = head // GROUP
    start = tile * ROWS
    row = batch.to(tl.int64) * num_tokens
    a, b, c, d, low_m, high_m = _keys_in_view(
        first, last, row, start, num_tokens, ROWS, COLUMNS, CAUSAL, DOCUMENTS
    )
    q_md = _tile(q, (q_b, q_h, q_t), batch, head, start, num_tokens, ROWS, D, TMA, True)
    # A finite start, so that a query whose keys are all masked so far gives powers of minus infinity, not NaN.
    max_m = tl.full([ROWS], -1e30, tl.float32)
    sum_m = tl.zeros([ROWS], tl.float32)
    acc_md = tl.zeros([ROWS, D], tl.float32)
    k_strides = (k_b, k_h, k_t)
    v_strides = (v_b, v_h, v_t)
    if SPLIT:
        if DOCUMENTS:
            acc_md, max_m, sum_m = _attend(
                acc_md, max_m, sum_m, q_md, k, v, k_strides, v_strides, batch, kv_head, a, b, num_tokens,
                low_m, high_m, scale2, D, COLUMNS, DOCUMENTS, TMA, PRECISION, True,
            )  # fmt: skip
        acc_md, max_m, sum_m = _attend(
            acc_md, max_m, sum_m, q_md, k, v, k_strides, v_strides, batch, kv_head, b, c, num_tokens,
            low_m, high_m, scale2, D, COLUMNS, DOCUMENTS, TMA, PRECISION, False,
        )  # fmt: skip
        a = c
    acc_md, max_m, sum_m = _attend(
        acc_md, max_m, sum_m, q_md, k, v, k_strides, v_strides, batch, kv_head, a, d, num_tokens,
        low_m, high_m, scale2, D, COLUMNS, DOCUMENTS, TMA, PRECISION, True,
    )  # fmt: skip
    _put(o, (o_b, o_h, o_t), batch, head, start, num_tokens, acc_md / sum_m[:, None], ROWS, D)
    query_m = start + tl.arange(0, ROWS)
    statistics = lse2 + index.to(tl.int64) * num_tokens + query_m
    tl.store(statistics, max_m + tl.log2(sum_m), mask=query_m < num_tokens)


@triton.jit
def _gather_dq(
    dq_md, q_md, do_md, lse2_m, delta_m, k, v, k_strides, v_strides, batch, kv_head, begin, end, num_tokens,
    low_m, high_m, scale2,
    D: tl.constexpr, COLUMNS: tl.constexpr, DOCUMENTS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the keys from begin to end give to the gradient of a tile of queries (the scale comes last)."""
    for next_start in tl.range(begin, end, COLUMNS):
        start = tl.multiple_of(next_start, COLUMNS)
        k_nd = _tile(k, k_strides, batch, kv_head, start, num_tokens, COLUMNS, D, TMA, MASKED)
        v_nd = _tile(v, v_strides, batch, kv_head, start, num_tokens, COLUMNS, D, TMA, MASKED)
        s_mn = _dot(q_md, tl.trans(k_nd), None, PRECISION)
        dp_mn = _dot(do_md, tl.trans(v_nd), None, PRECISION)
        power_mn = s_mn * scale2 - lse2_m[:, None]
        if MASKED:
            key_n = start + tl.arange(0, COLUMNS)
            seen = _within(key_n[None, :], low_m[:, None], high_m[:, None], DOCUMENTS, True)
            power_mn = tl.where(seen, power_mn, -float("inf"))
        p_mn = tl.exp2(power_mn)
        ds_mn = p_mn * (dp_mn - delta_m[:, None])
        dq_md = _dot(ds_mn.to(k_nd.dtype), k_nd, dq_md, PRECISION)
    return dq_md


@triton.jit(do_not_specialize=_PLAIN)
def flash_dq_tiles(
    q, k, v, o, do, dq, lse2, delta, first, last,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    num_batch_heads, num_heads, num_tokens, section, scale2, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries of one head; and delta, for the kernel that follows."""
    tile, index = _share(tl.cdiv(num_tokens, ROWS), num_batch_heads, section, CAUSAL)
    batch = index // num_heads
    head = index % num_heads
    kv_head = head // GROUP
    start = tile * ROWS
    row = batch.to(tl.int64) * num_tokens
    a, b, c, d, low_m, high_m = _keys_in_view(
        first, last, row, start, num_tokens, ROWS, COLUMNS, CAUSAL, DOCUMENTS
    )
    query_m = start + tl.arange(0, ROWS)
    there_m = query_m < num_tokens
    statistics = index.to(tl.int64) * num_tokens + query_m
    q_md = _tile(q, (q_b, q_h, q_t), batch, head, start, num_tokens, ROWS, D, TMA, True)
    do_md = _tile(do, (do_b, do_h, do_t), batch, head, start, num_tokens, ROWS, D, TMA, True)
    o_md = _tile(o, (o_b, o_h, o_t), batch, head, start, num_tokens, ROWS, D, TMA, True)
    delta_m = tl.sum(o_md.to(tl.float32) * do_md.to(tl.float32), 1)
    tl.store(delta + statistics, delta_m, mask=there_m)
    lse2_m = tl.load(lse2 + statistics, mask=there_m, other=0.0)
    dq_md = tl.zeros([ROWS, D], tl.float32)
    k_strides = (k_b, k_h, k_t)
    v_strides = (v_b, v_h, v_t)
    if SPLIT:
        if DOCUMENTS:
            dq_md = _gather_dq(
                dq_md, q_md, do_md, lse2_m, delta_m, k, v, k_strides, v_strides, batch, kv_head, a, b,
                num_tokens, low_m, high_m, scale2, D, COLUMNS, DOCUMENTS, TMA, PRECISION, True,
            )  # fmt: skip
        dq_md = _gather_dq(
            dq_md, q_md, do_md, lse2_m, delta_m, k, v, k_strides, v_strides, batch, kv_head, b, c,
            num_tokens, low_m, high_m, scale2, D, COLUMNS, DOCUMENTS, TMA, PRECISION, False,
        )  # fmt: skip
        a = c
    dq_md = _gather_dq(
        dq_md, q_md, do_md, lse2_m, delta_m, k, v, k_strides, v_strides, batch, kv_head, a, d,
        num_tokens, low_m, high_m, scale2, D, COLUMNS, DOCUMENTS, TMA, PRECISION, True,
    )  # fmt: skip
    _put(dq, (dq_b, dq_h, dq_t), batch, head, start, num_tokens, dq_md * scale, ROWS, D)


@triton.jit
def _gather_dkdv(
    dk_nd, dv_nd, k_nd, v_nd, q, do, lse2, delta, q_strides, do_strides, batch, kv_head, begin, end, num_heads,
    num_tokens, low_n, high_n, scale2,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Add what the queries from begin to end, of every head that shares these keys, give to their gradients.

    One loop over heads and tiles together: the loads of the next head's first tile are under way while the last
    tile of this one is multiplied. Queries past the end are zeros, and so is what they add.
    """
    num_tiles = tl.maximum(tl.cdiv(end - begin, ROWS), 0)
    for step in tl.range(0, num_tiles * GROUP):
        head = kv_head * GROUP
        start = begin + step * ROWS
        if GROUP > 1:
            head += step // num_tiles
            start = begin + step % num_tiles * ROWS
        start = tl.multiple_of(start, ROWS)
        query_m = start + tl.arange(0, ROWS)
        statistics = (batch * num_heads + head).to(tl.int64) * num_tokens + query_m
        q_md = _tile(q, q_strides, batch, head, start, num_tokens, ROWS, D, TMA, BOUNDED)
        if BOUNDED:
            lse2_m = tl.load(lse2 + statistics, mask=query_m < num_tokens, other=0.0)
        else:
            lse2_m = tl.load(lse2 + statistics)
        s_nm = _dot(k_nd, tl.trans(q_md), None, PRECISION)
        power_nm = s_nm * scale2 - lse2_m[None, :]
        if MASKED:
            seen = _within(query_m[None, :], low_n[:, None], high_n[:, None], True, DOCUMENTS)
            power_nm = tl.where(seen, power_nm, -float("inf"))
        p_nm = tl.exp2(power_nm)
        do_md = _tile(do, do_strides, batch, head, start, num_tokens, ROWS, D, TMA, BOUNDED)
        dv_nd = _dot(p_nm.to(do_md.dtype), do_md, dv_nd, PRECISION)
        if BOUNDED:
            delta_m = tl.load(delta + statistics, mask=query_m < num_tokens, other=0.0)
        else:
            delta_m = tl.load(delta + statistics)
        dp_nm = _dot(v_nd, tl.trans(do_md), None, PRECISION)
        ds_nm = p_nm * (dp_nm - delta_m[None, :])
        dk_nd = _dot(ds_nm.to(q_md.dtype), q_md, dk_nd, PRECISION)
    return dk_nd, dv_nd


@triton.jit(do_not_specialize=_PLAIN)
def flash_dkdv_tiles(
    q, k, v, do, dk, dv, lse2, delta, first, last,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    num_batch_heads, num_kv_heads, num_tokens, section, scale2, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values of one key/value head."""
    tile, index = _share(tl.cdiv(num_tokens, COLUMNS), num_batch_heads, section, False)
    batch = index // num_kv_heads
    kv_head = index % num_kv_heads
    start = tile * COLUMNS
    row = batch.to(tl.int64) * num_tokens
    a, b, c, d, low_n, high_n = _queries_in_view(
        first, last, row, start, num_tokens, ROWS, COLUMNS, CAUSAL, DOCUMENTS
    )
    k_nd = _tile(k, (k_b, k_h, k_t), batch, kv_head, start, num_tokens, COLUMNS, D, TMA, True)
    v_nd = _tile(v, (v_b, v_h, v_t), batch, kv_head, start, num_tokens, COLUMNS, D, TMA, True)
    dk_nd = tl.zeros([COLUMNS, D], tl.float32)
    dv_nd = tl.zeros([COLUMNS, D], tl.float32)
    num_heads = num_kv_heads * GROUP
    q_strides = (q_b, q_h, q_t)
    do_strides = (do_b, do_h, do_t)
    if not SPLIT and (CAUSAL or DOCUMENTS):
        b = d
    if CAUSAL or DOCUMENTS:
        dk_nd, dv_nd = _gather_dkdv(
            dk_nd, dv_nd, k_nd, v_nd, q, do, lse2, delta, q_strides, do_strides, batch, kv_head, a, b, num_heads,
            num_tokens, low_n, high_n, scale2, GROUP, D, ROWS, CAUSAL, DOCUMENTS, TMA, PRECISION, True, not EVEN,
        )  # fmt: skip
    if SPLIT or not (CAUSAL or DOCUMENTS):
        dk_nd, dv_nd = _gather_dkdv(
            dk_nd, dv_nd, k_nd, v_nd, q, do, lse2, delta, q_strides, do_strides, batch, kv_head, b, c, num_heads,
            num_tokens, low_n, high_n, scale2, GROUP, D, ROWS, CAUSAL, DOCUMENTS, TMA, PRECISION, False, not EVEN,
        )  # fmt: skip
        if DOCUMENTS:
            dk_nd, dv_nd = _gather_dkdv(
                dk_nd, dv_nd, k_nd, v_nd, q, do, lse2, delta, q_strides, do_strides, batch, kv_head, c, d,
                num_heads, num_tokens, low_n, high_n, scale2, GROUP, D, ROWS, CAUSAL, DOCUMENTS, TMA, PRECISION,
                True, not EVEN,
            )  # fmt: skip
    _put(dk, (dk_b, dk_h, dk_t), batch, kv_head, start, num_tokens, dk_nd * scale, COLUMNS, D)
    _put(dv, (dv_b, dv_h, dv_t), batch, kv_head, start, num_tokens, dv_nd, COLUMNS, D)


def forward(
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    first_bt: Tensor | None,
    last_bt: Tensor | None,
    causal: bool,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, with heads side by side in memory, and log2 of every query's sum [b, h, t]."""
    batch, num_heads, length, head_dim = q_bhtd.shape
    tiles = tiles or choose("forward", head_dim, q_bhtd.dtype, q_bhtd.device)
    q_bhtd, k_bktd, v_bktd = (_ready(tensor, tiles) for tensor in (q_bhtd, k_bktd, v_bktd))
    o_bhtd = empty_bthd(q_bhtd)
    lse2_bht = q_bhtd.new_empty(batch, num_heads, length, dtype=torch.float32)
    group = num_heads // k_bktd.shape[1]
    grid = (triton.cdiv(length, tiles.rows) * batch * num_heads,)
    flash_forward_tiles[grid](
        _source(q_bhtd, tiles.rows, tiles), _source(k_bktd, tiles.columns, tiles),
        _source(v_bktd, tiles.columns, tiles), o_bhtd, lse2_bht, first_bt, last_bt,
        *_strides(q_bhtd, k_bktd, v_bktd, o_bhtd),
        batch * num_heads, num_heads, length, _section(k_bktd, batch * num_heads, group), scale * LOG2E,
        GROUP=group, **_options(tiles, q_bhtd, causal, first_bt),
    )  # fmt: skip
    return o_bhtd, lse2_bht


def backward(
    do_bhtd: Tensor,
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    o_bhtd: Tensor,
    lse2_bht: Tensor,
    first_bt: Tensor | None,
    last_bt: Tensor | None,
    causal: bool,
    scale: float,
    dq_tiles: Tiles | None = None,
    dkdv_tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, with heads side by side in memory."""
    dq_bhtd, delta_bht = backward_dq(
        do_bhtd, q_bhtd, k_bktd, v_bktd, o_bhtd, lse2_bht, first_bt, last_bt, causal, scale, dq_tiles
    )
    dk_bktd, dv_bktd = backward_dkdv(
        do_bhtd, q_bhtd, k_bktd, v_bktd, lse2_bht, delta_bht, first_bt, last_bt, causal, scale, dkdv_tiles
    )
    return dq_bhtd, dk_bktd, dv_bktd


def backward_dq(
    do_bhtd: Tensor,
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    o_bhtd: Tensor,
    lse2_bht: Tensor,
    first_bt: Tensor | None,
    last_bt: Tensor | None,
    causal: bool,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the queries, and delta [b, h, t]."""
    batch, num_heads, length, head_dim = q_bhtd.shape
    tiles = tiles or choose("dq", head_dim, q_bhtd.dtype, q_bhtd.device)
    do_bhtd, q_bhtd, k_bktd, v_bktd, o_bhtd = (
        _ready(tensor, tiles) for tensor in (do_bhtd, q_bhtd, k_bktd, v_bktd, o_bhtd)
    )
    dq_bhtd = empty_bthd(q_bhtd)
    delta_bht = torch.empty_like(lse2_bht)
    group = num_heads // k_bktd.shape[1]
    grid = (triton.cdiv(length, tiles.rows) * batch * num_heads,)
    flash_dq_tiles[grid](
        _source(q_bhtd, tiles.rows, tiles), _source(k_bktd, tiles.columns, tiles),
        _source(v_bktd, tiles.columns, tiles), _source(o_bhtd, tiles.rows, tiles),
        _source(do_bhtd, tiles.rows, tiles), dq_bhtd, lse2_bht, delta_bht, first_bt, last_bt,
        *_strides(q_bhtd, k_bktd, v_bktd, o_bhtd, do_bhtd, dq_bhtd),
        batch * num_heads, num_heads, length, _section(k_bktd, batch * num_heads, group), scale * LOG2E, scale,
        GROUP=group, **_options(tiles, q_bhtd, causal, first_bt),
    )  # fmt: skip
    return dq_bhtd, delta_bht


def backward_dkdv(
    do_bhtd: Tensor,
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    lse2_bht: Tensor,
    delta_bht: Tensor,
    first_bt: Tensor | None,
    last_bt: Tensor | None,
    causal: bool,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values."""
    batch, num_kv_heads, length, head_dim = k_bktd.shape
    tiles = tiles or choose("dkdv", head_dim, q_bhtd.dtype, q_bhtd.device)
    do_bhtd, q_bhtd, k_bktd, v_bktd = (_ready(tensor, tiles) for tensor in (do_bhtd, q_bhtd, k_bktd, v_bktd))
    dk_bktd, dv_bktd = empty_bthd(k_bktd), empty_bthd(v_bktd)
    group = q_bhtd.shape[1] // num_kv_heads
    grid = (triton.cdiv(length, tiles.columns) * batch * num_kv_heads,)
    flash_dkdv_tiles[grid](
        _source(q_bhtd, tiles.rows, tiles), _source(k_bktd, tiles.columns, tiles),
        _source(v_bktd, tiles.columns, tiles), _source(do_bhtd, tiles.rows, tiles), dk_bktd, dv_bktd,
        lse2_bht, delta_bht, first_bt, last_bt,
        *_strides(q_bhtd, k_bktd, v_bktd, do_bhtd, dk_bktd, dv_bktd),
        batch * num_kv_heads, num_kv_heads, length, _section(q_bhtd, batch * num_kv_heads, 1, group),
        scale * LOG2E, scale,
        GROUP=group, EVEN=length % tiles.rows == 0, **_options(tiles, q_bhtd, causal, first_bt),
    )  # fmt: skip
    return dk_bktd, dv_bktd


def _ready(tensor: Tensor, tiles: Tiles) -> Tensor:
    """The tensor itself if the kernel can read it by its strides; otherwise, rarely, a copy.

    The numbers of a head must lie together; the copy engine also wants every position to begin at a multiple of 16 bytes.
    """
    readable = tensor.stride(-1) == 1
    if tiles.tma and readable:
        size = tensor.element_size()
        steps = [
            stride * size for stride, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1
        ]
        readable = tensor.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps[:-1])
    return tensor if readable else tensor.contiguous()


def _source(tensor: Tensor, positions: int, tiles: Tiles) -> Any:
    """What the kernel reads tiles from: the tensor's memory, or its description for the copy engine."""
    if not tiles.tma:
        return tensor
    # The stride of a dim of one element is never used, and may be anything.
    strides = [
        stride if count > 1 else tensor.shape[-1]
        for stride, count in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, positions, tensor.shape[-1]])


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in range(3)]


def _section(walked: Tensor, num_heads: int, group: int, heads_walked: int = 1) -> int:
    """How many heads run concurrently, so that what they read stays in L2."""
    _, _, length, head_dim = walked.shape
    each = 2 * length * head_dim * walked.element_size() * heads_walked
    return min(num_heads, max(1, SECTION_BYTES // each) * group)


def _options(tiles: Tiles, q_bhtd: Tensor, causal: bool, first_bt: Tensor | None) -> dict[str, Any]:
    return {
        "D": q_bhtd.shape[-1],
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "CAUSAL": causal,
        "DOCUMENTS": first_bt is not None,
        "SPLIT": tiles.split,
        "TMA": tiles.tma,
        # fp32 operands are not rounded to TF32; for 16 bits this changes nothing.
        "PRECISION": "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
