# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sums of squares over a list of tensors in one launch: every element is read once, one number per piece is written.

Each thread accumulates its own sums, reduced at the end of the piece. The pieces' sums, some ten thousand numbers for a
billion elements, are added by torch. Fixed order, no atomics: deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.adamw.table import Division
from rush.kernels.adamw.triton import TYPES

BLOCK, BLOCKS = 4096, 8
"""With 256 threads, two 16-byte vectors per thread in bf16."""
PIECE = BLOCK * BLOCKS
"""Elements per program."""
COLUMNS = 2
"""Table columns: address and number of elements."""


@triton.jit
def sum_of_squares_kernel(
    table_ptr,
    rows_ptr,
    starts_ptr,
    squares_ptr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    entry = table_ptr + tl.load(rows_ptr + program) * COLUMNS
    start = tl.load(starts_ptr + program)
    x_ptr = tl.load(entry).to(tl.pointer_type(ELEMENT))
    size = tl.load(entry + 1)
    if ALIGNED:
        # The compiler vectorizes only if it knows that loaded addresses are aligned.
        x_ptr, size, start = tl.multiple_of(x_ptr, 16), tl.multiple_of(size, 16), tl.multiple_of(start, 16)
    sums = tl.zeros((BLOCK,), tl.float32)
    for block in tl.static_range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        sums += x * x
    tl.store(squares_ptr + program, tl.sum(sums, axis=0))


def squares(table: Tensor, division: Division, dtype: torch.dtype, is_aligned: bool) -> Tensor:
    """Σ x² of each piece of the tensors in a table, all of one dtype."""
    out = torch.empty(division.rows.shape, dtype=torch.float32, device=table.device)
    sum_of_squares_kernel[(len(division.rows),)](
        table,
        division.rows,
        division.starts,
        out,
        ELEMENT=TYPES[dtype],
        ALIGNED=is_aligned,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS,
        num_warps=8,
    )
    return out
