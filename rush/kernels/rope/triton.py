# mypy: allow-untyped-decorators
"""Rotary position embeddings for queries and keys in one launch.

Plain torch makes an fp32 copy, two concatenations and three more temporaries of queries and keys, for four
multiplications per pair. Here a program takes a token with all its query and key heads: it reads each half of every head
and the token's cosines and sines once, and writes both halves rotated. The kernel follows strides, so the output of the
linear layers is not copied. The inverse rotation negates the sine, so the backward pass is the same kernel, and only
cosines and sines are saved.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.support import INTERPRETED, empty_bthd, next_power_of_2

# Shapes: b batch, h query heads, k key heads, t positions, d head dim.


@triton.jit
def _halves(
    x_ptr: tl.tensor,
    x_place: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    inside: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    head = tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, HALF)[None, None, :]
    mask = inside & (head < num_heads) & (pair < half)
    source = x_ptr + x_place + (head.to(tl.int64) * head_stride + pair)
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + half, mask=mask, other=0.0)
    return first, second


@triton.jit
def _store_rotated(
    first: tl.tensor,
    second: tl.tensor,
    out_ptr: tl.tensor,
    place: tl.tensor,
    num_heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    half: tl.tensor,
    inside: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    head = tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, HALF)[None, None, :]
    mask = inside & (head < num_heads) & (pair < half)
    first, second = first.to(tl.float32), second.to(tl.float32)
    out = out_ptr + place.to(tl.int64) * (num_heads * 2 * half) + (head * (2 * half) + pair)
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_batch_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_token_stride: tl.tensor,
    k_batch_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    angle_batch_stride: tl.tensor,
    angle_token_stride: tl.tensor,
    num_positions: tl.tensor,
    num_tokens: tl.tensor,
    num_q_heads: tl.tensor,
    num_k_heads: tl.tensor,
    half: tl.tensor,
    INVERSE: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    # 32-bit division (64-bit takes a hundred instructions), 64-bit multiplication.
    place = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    batch, token = (place // num_tokens).to(tl.int64), (place % num_tokens).to(tl.int64)
    inside = place < num_positions
    # Issue all loads before the first is used.
    q_place = batch * q_batch_stride + token * q_token_stride
    q_first, q_second = _halves(q_ptr, q_place, q_head_stride, num_q_heads, half, inside, Q_HEADS, HALF)
    k_place = batch * k_batch_stride + token * k_token_stride
    k_first, k_second = _halves(k_ptr, k_place, k_head_stride, num_k_heads, half, inside, K_HEADS, HALF)
    pair = tl.arange(0, HALF)[None, None, :]
    angle = batch * angle_batch_stride + token * angle_token_stride + pair
    cos = tl.load(cos_ptr + angle, mask=inside & (pair < half), other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside & (pair < half), other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    _store_rotated(q_first, q_second, q_out_ptr, place, num_q_heads, cos, sin, half, inside, Q_HEADS, HALF)
    _store_rotated(k_first, k_second, k_out_ptr, place, num_k_heads, cos, sin, half, inside, K_HEADS, HALF)


def rotate(
    q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by their angles, or by the inverse; the results have memory layout [b, t, h, d]."""
    q_bhtd, k_bktd, cos_btd, sin_btd = (_dense(x) for x in (q_bhtd, k_bktd, cos_btd, sin_btd))
    if cos_btd.stride() != sin_btd.stride():
        cos_btd, sin_btd = cos_btd.contiguous(), sin_btd.contiguous()
    batch, num_q_heads, num_tokens, head_dim = q_bhtd.shape
    q_out, k_out = empty_bthd(q_bhtd), empty_bthd(k_bktd)
    num_k_heads, half = k_bktd.shape[1], head_dim // 2
    if batch * num_tokens:
        places, num_warps = tile(next_power_of_2(num_q_heads) * next_power_of_2(half))
        rope_kernel[(triton.cdiv(batch * num_tokens, places),)](
            q_bhtd,
            k_bktd,
            cos_btd,
            sin_btd,
            q_out,
            k_out,
            q_bhtd.stride(0),
            q_bhtd.stride(1),
            q_bhtd.stride(2),
            k_bktd.stride(0),
            k_bktd.stride(1),
            k_bktd.stride(2),
            0 if cos_btd.shape[0] == 1 else cos_btd.stride(0),
            cos_btd.stride(1),
            batch * num_tokens,
            num_tokens,
            num_q_heads,
            num_k_heads,
            half,
            INVERSE=inverse,
            TOKENS=places,
            Q_HEADS=next_power_of_2(num_q_heads),
            K_HEADS=next_power_of_2(num_k_heads),
            HALF=next_power_of_2(half),
            num_warps=num_warps,
        )
    return q_out, k_out


def tile(token_size: int) -> tuple[int, int]:
    """Tokens and warps per program, given the query pairs of a token.

    Small models put several tokens into a program; the interpreter many, since each program is slow. Up to 1024 pairs two
    warps are best, so that more programs are resident; beyond, eight (`scripts/tune_rows.py`, an H200).
    """
    places = next_power_of_2(max(1, (16384 if INTERPRETED else 1024) // token_size))
    return places, 2 if places * token_size <= 1024 else 8


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
