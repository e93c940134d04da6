# mypy: allow-untyped-decorators
"""NF4 dequantization: 4 bits in, one value out, with the second-level scales applied on the way.

Four fifths of the traffic is the result, so it must be written in 16-byte vectors and nothing else may take longer. A
thread reads a 4-byte word with eight weights and writes those eight. Eight threads share a block of 64 and its scale.
The 16 values are looked up in a 64-byte table in L1: selecting by comparisons takes 15 instructions per weight, too
many. Two words per thread are in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS, NUM_WARPS = 256, 8
"""int32 words per tile: one per thread."""
TILES = 2

WEIGHTS_OF_WORD = tl.constexpr(8)
LOG_WORDS_OF_BLOCK, LOG_WORDS_OF_SCALES = tl.constexpr(3), tl.constexpr(11)
"""A block of 64 weights is 8 words; the 256 blocks of a second-level scale are 2048."""


@triton.jit
def write_word(
    bits: tl.tensor,
    largest: tl.tensor,
    word: tl.tensor,
    inside: tl.tensor,
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
) -> None:
    """Eight weights per word: little-endian bytes, the high nibble of each first."""
    place = tl.arange(0, WEIGHTS_OF_WORD)
    code = (bits[:, None] >> ((place ^ 1) * 4)[None, :]) & 15
    weight = tl.load(values_ptr + code) * largest[:, None]
    at = word[:, None] * WEIGHTS_OF_WORD + place[None, :]
    tl.store(out_ptr + at, weight.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def dequantize_nf4_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    scale_scales_ptr: tl.tensor,
    scale_table_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_words: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * (2 * WORDS) + tl.arange(0, WORDS)
    second = first + WORDS
    in_first, in_second = first < num_words, second < num_words
    # Issue all loads before the first table lookup.
    first_bits = tl.load(words_ptr + first, mask=in_first, other=0)
    second_bits = tl.load(words_ptr + second, mask=in_second, other=0)
    first_code = tl.load(scales_ptr + (first >> LOG_WORDS_OF_BLOCK), mask=in_first, other=0)
    second_code = tl.load(scales_ptr + (second >> LOG_WORDS_OF_BLOCK), mask=in_second, other=0)
    first_of = tl.load(scale_scales_ptr + (first >> LOG_WORDS_OF_SCALES), mask=in_first, other=0.0)
    second_of = tl.load(scale_scales_ptr + (second >> LOG_WORDS_OF_SCALES), mask=in_second, other=0.0)
    offset = tl.load(offset_ptr)
    # Two roundings, as in bitsandbytes: the launch disables FMA contraction.
    first_scale = tl.load(scale_table_ptr + first_code.to(tl.int32)) * first_of + offset
    second_scale = tl.load(scale_table_ptr + second_code.to(tl.int32)) * second_of + offset
    write_word(first_bits, first_scale, first, in_first, values_ptr, out_ptr)
    write_word(second_bits, second_scale, second, in_second, values_ptr, out_ptr)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    scale_scales: Tensor,
    scale_table: Tensor,
    offset: Tensor,
    values: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """All weights, flat."""
    if codes.data_ptr() % 4:  # a view into a larger buffer; words must be aligned
        codes = codes.clone()
    words = codes.view(torch.int32)
    out = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
    if count := words.numel():
        grid = (triton.cdiv(count, TILES * WORDS),)
        dequantize_nf4_kernel[grid](
            words, scales, scale_scales, scale_table, offset, values, out, count,
            WORDS=WORDS, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
