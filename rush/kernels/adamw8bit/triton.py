# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""AdamW whose moments live in 8-bit codes: unpacked, updated and packed again inside one kernel.

Moments are two thirds of what AdamW reads and writes. As codes with one scale for 256 of them they take 2.03
bytes a parameter instead of 8, and never exist in full anywhere but in registers. A program takes some blocks
of 256: it looks the codes up in a table of 256 values (1 KiB, always in cache), does the update in fp32, finds
each block's new largest magnitude and encodes. A scale for every 256 keeps one outlier from flattening a
whole tensor.

Encoding needs the nearest of 256 values. A search would be eight dependent reads a number; but the values are
seven decades of equal steps, so seven comparisons tell the decade and one multiplication the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.adamw.table import Division
from rush.kernels.adamw.triton import TYPES, adamw_values, by_chance, draw, hyperparameters

BLOCK = 256
ROWS = 8
PIECE = ROWS * BLOCK
"""Elements of a program."""
COLUMNS = 8
"""Of the table: parameter, gradient, codes and scales of the first moment, of the second, elements, number."""


@triton.jit
def encode(x, SIGNED: tl.constexpr):
    """The code of the value nearest to each x, of magnitude at most 1."""
    size = tl.abs(x)
    # From the lowest decade up: where x reaches into a decade, its steps are the ones that count.
    steps = tl.zeros_like(x)
    slope = tl.zeros_like(x)
    for decade in tl.static_range(7):
        count = (2.0 if not SIGNED else 1.0) * 2.0**decade
        top = 10.0 ** (decade - 6.0)
        # Half-way between the last value of the decade below and the first one here (below the lowest: zero).
        first = 0.5 * top * (0.1 + 0.45 / count) if decade == 0 else 0.1 * top * (1.0 + 1.8 / count)
        steps = tl.where(size >= first, count, steps)
        slope = tl.where(size >= first, count / (0.9 * top), slope)
    step = tl.minimum(tl.maximum(tl.floor(size * slope - steps / 9.0), 0.0), tl.maximum(steps - 1.0, 0.0))
    if SIGNED:
        place = steps + step  # 1, 2 and 3, 4 to 7, …: as many values lie below a decade as it has steps
        place = tl.where(x >= 0.5 + 0.5 * (1.0 - 0.45 / 64.0), 128.0, place)
        code = tl.where(x < 0, 127.0 - place, 127.0 + place)
    else:
        code = tl.where(steps > 0, steps - 1.0 + step, 0.0)
        code = tl.where(x >= 0.5 + 0.5 * (1.0 - 0.45 / 128.0), 255.0, code)
    return code.to(tl.int32).to(tl.uint8)


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x), axis=1, keep_dims=True)


@triton.jit
def _normal(x, scale):
    return tl.where(scale > 0, x / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit(do_not_specialize=["seed", "step"])
def adamw8bit_kernel(
    table_ptr,
    rows_ptr,
    starts_ptr,
    signed_ptr,
    unsigned_ptr,
    lr_or_ptr,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    weight_decay,
    correction1,
    root_correction2,
    seed,
    step,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = table_ptr + tl.load(rows_ptr + program) * COLUMNS
    start = tl.load(starts_ptr + program)
    p_ptr = tl.load(entry).to(tl.pointer_type(PARAMETER))
    g_ptr = tl.load(entry + 1).to(tl.pointer_type(GRADIENT))
    m_ptr = tl.load(entry + 2).to(tl.pointer_type(tl.uint8))
    m_scale_ptr = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    v_ptr = tl.load(entry + 4).to(tl.pointer_type(tl.uint8))
    v_scale_ptr = tl.load(entry + 5).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 6)
    if ALIGNED:
        p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
        size, start = tl.multiple_of(size, 16), tl.multiple_of(start, 16)
    lr = tl.load(lr_or_ptr).to(tl.float32) if LR_ON_DEVICE else lr_or_ptr
    row = tl.arange(0, ROWS)[:, None]
    at = start + row * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < size
    block = start // BLOCK + row
    has_block = block * BLOCK < size

    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m_code = tl.load(m_ptr + at, mask=inside, other=127).to(tl.int32)
    v_code = tl.load(v_ptr + at, mask=inside, other=0).to(tl.int32)
    m_scale = tl.load(m_scale_ptr + block, mask=has_block, other=0.0)
    v_scale = tl.load(v_scale_ptr + block, mask=has_block, other=0.0)
    m = tl.load(signed_ptr + m_code) * m_scale
    v = tl.load(unsigned_ptr + v_code) * v_scale
    p, m, v = adamw_values(
        p, g, m, v, lr, beta1, rest1, beta2, rest2, eps, weight_decay, correction1, root_correction2
    )
    if STOCHASTIC:
        bits, _, _, _ = draw(seed, step, tl.load(entry + 7), at)
        tl.store(p_ptr + at, by_chance(p, bits), mask=inside)
    else:
        tl.store(p_ptr + at, p.to(PARAMETER), mask=inside)
    m_scale, v_scale = _largest(m), _largest(v)
    tl.store(m_ptr + at, encode(_normal(m, m_scale), True), mask=inside)
    tl.store(v_ptr + at, encode(_normal(v, v_scale), False), mask=inside)
    tl.store(m_scale_ptr + block, m_scale, mask=has_block)
    tl.store(v_scale_ptr + block, v_scale, mask=has_block)


def update(
    table: Tensor,
    division: Division,
    values: tuple[Tensor, Tensor],
    lr: Tensor | float,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    stochastic_rounding: bool,
    seed: int,
    is_aligned: bool,
) -> None:
    """One launch over the tensors of a table, all of the same dtypes (parameter, gradient).

    `values` are what the codes of the signed and of the unsigned moment stand for.
    """
    adamw8bit_kernel[(len(division.rows),)](
        table,
        division.rows,
        division.starts,
        *values,
        lr,
        *hyperparameters(betas, eps, weight_decay, step),
        seed,
        step,
        PARAMETER=TYPES[dtypes[0]],
        GRADIENT=TYPES[dtypes[1]],
        LR_ON_DEVICE=isinstance(lr, Tensor),
        ALIGNED=is_aligned,
        STOCHASTIC=stochastic_rounding,
        COLUMNS=COLUMNS,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=8,
    )
