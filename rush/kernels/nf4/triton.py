# mypy: allow-untyped-decorators
"""Unpacking NF4: 4 bits in, one number out, with the scales of the scales worked in on the way.

Four fifths of what moves is the result, so what counts is that it is written in vectors of 16 bytes and that nothing
else takes longer. A thread takes a word of four bytes, which holds eight neighbouring weights, and writes those eight.
Eight threads share a block of 64 and read its scale from one place. The 16 values are looked up in a table of 64 bytes
that stays in the cache nearest to the threads: choosing by comparisons instead takes 15 instructions a weight, more
than there is time for. Two words for each thread are under way before the first is looked at.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS, NUM_WARPS = 256, 8
"""Words of a tile: one for each thread."""
TILES = 2

WEIGHTS_OF_WORD = tl.constexpr(8)
LOG_WORDS_OF_BLOCK, LOG_WORDS_OF_SCALES = tl.constexpr(3), tl.constexpr(11)
"""A block of 64 weights is 8 words, the 256 blocks that share a scale of scales are 2048."""


@triton.jit
def write_word(
    bits: tl.tensor,
    largest: tl.tensor,
    word: tl.tensor,
    inside: tl.tensor,
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
) -> None:
    """Eight weights of a word. Its bytes lie in order, lowest first; within a byte the high half comes first."""
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
    # All reads of memory before the first look into a table.
    first_bits = tl.load(words_ptr + first, mask=in_first, other=0)
    second_bits = tl.load(words_ptr + second, mask=in_second, other=0)
    first_code = tl.load(scales_ptr + (first >> LOG_WORDS_OF_BLOCK), mask=in_first, other=0)
    second_code = tl.load(scales_ptr + (second >> LOG_WORDS_OF_BLOCK), mask=in_second, other=0)
    first_of = tl.load(scale_scales_ptr + (first >> LOG_WORDS_OF_SCALES), mask=in_first, other=0.0)
    second_of = tl.load(scale_scales_ptr + (second >> LOG_WORDS_OF_SCALES), mask=in_second, other=0.0)
    offset = tl.load(offset_ptr)
    # Two roundings, as bitsandbytes has them: the launch forbids to make one operation of both.
    first_scale = tl.load(scale_table_ptr + first_code.to(tl.int32)) * first_of + offset
    second_scale = tl.load(scale_table_ptr + second_code.to(tl.int32)) * second_of + offset
    write_word(first_bits, first_scale, first, in_first, values_ptr, out_ptr)
    write_word(second_bits, second_scale, second, in_second, values_ptr, out_ptr)


def unpack(
    codes: Tensor,
    scales: Tensor,
    scale_scales: Tensor,
    scale_table: Tensor,
    offset: Tensor,
    values: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """All weights, one after another."""
    if codes.data_ptr() % 4:  # a part of a larger memory; words must begin at a multiple of their size
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
