# mypy: allow-untyped-decorators
"""Dequantize NF4 weights of bitsandbytes with double quantization, in one kernel.

bitsandbytes dequantizes the scales into memory, adds their offset and then dequantizes the weights: three kernels. This
is one, bit-identical. Takes the output of `quantize_4bit` with blocks of 64 (scales in blocks of 256), contiguous, and
writes fp32, bf16 or fp16. No gradient: such weights are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rush.kernels.nf4 import triton as kernels
from rush.kernels.nf4.reference import BLOCK, SCALE_BLOCK, VALUES
from rush.kernels.support import FLOATS, op, require, require_device

__all__ = ["dequantize_nf4", "dequantize_nf4_unchecked"]


def dequantize_nf4(
    codes: Tensor,
    scales: Tensor,
    scale_scales: Tensor,
    scale_table: Tensor,
    offset: Tensor,
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """The dequantized weight of size `dims`; `reference.py` has the formula."""
    parts = (codes, scales, scale_scales, scale_table, offset)
    require_device("dequantize_nf4", *parts)
    require(dtype in FLOATS, "dequantize_nf4 writes fp32, bf16 and fp16.")
    require(all(part.is_contiguous() for part in parts), "dequantize_nf4 takes contiguous tensors.")
    count = dims[0] * dims[1]
    require(
        count % BLOCK == 0,
        f"dequantize_nf4 takes weights in whole blocks of {BLOCK}; found {dims[0]} × {dims[1]}.",
    )
    blocks = count // BLOCK
    expected = (
        (codes, count // 2, torch.uint8, "half a byte for each weight"),
        (scales, blocks, torch.uint8, "a byte for each block"),
        (scale_scales, -(-blocks // SCALE_BLOCK), torch.float32, "an fp32 number for 256 blocks"),
        (scale_table, 256, torch.float32, "a table of 256 fp32 numbers"),
        (offset, 1, torch.float32, "one fp32 offset"),
    )
    for part, size, kind, what in expected:
        require(part.numel() == size and part.dtype == kind, f"dequantize_nf4 needs {what}.")
    weight: Tensor = _dequantize(*parts, dims[0], dims[1], dtype)
    return weight


def dequantize_nf4_unchecked(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The same without checks, for callers that are operators themselves: a step dequantizes hundreds of weights, and
    checks and dispatch take longer than the launch. A profile still shows its name."""
    codes, scales, scale_scales, scale_table, offset = parts
    with record_function("rush::dequantize_nf4") if torch._C._autograd._profiler_enabled() else nullcontext():
        values = _values(codes.device)
        return kernels.dequantize(codes, scales, scale_scales, scale_table, offset, values, dtype).view(dims)


@op("dequantize_nf4")
def _dequantize(
    codes: Tensor,
    scales: Tensor,
    scale_scales: Tensor,
    scale_table: Tensor,
    offset: Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    parts = (codes, scales, scale_scales, scale_table, offset)
    return dequantize_nf4_unchecked(parts, (rows, columns), dtype)


@_dequantize.register_fake
def _(codes: Tensor, *others: Any) -> Tensor:
    *_, rows, columns, dtype = others
    return codes.new_empty((rows, columns), dtype=dtype)


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)
