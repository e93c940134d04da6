# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""AdamW for a list of tensors in one launch, every value read once and written once.

As separate operations, each of the dozen steps of the update is a round trip to device memory. Here a program loads its
piece of parameter, gradient and both moments, computes in fp32 registers and stores three of them: 28 bytes per
parameter in fp32, memory-bound. See table.py for multi-tensor launches.

bf16 weights lose small updates: next to a weight of 1 the nearest values are 0.004 below and 0.008 above, and an update
of 1e-4 is rounded away every time. Stochastic rounding rounds up with a probability equal to the remainder, so the
result is unbiased. The second moment, which changes by a thousandth per step, needs it too; the first changes by a tenth
and is rounded to nearest. Random bits come from Philox, a counter-based generator keyed by seed, step, tensor and
element, so a resumed run draws the same. One draw gives four 32-bit numbers, each enough for the weight and second
moment of one element: hence four blocks per piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.adamw.table import Division

BLOCK = 1024
PIECE = 4 * BLOCK
"""Elements per program."""
COLUMNS = 6
"""Table columns: parameter, gradient, first moment, second moment, number of elements, number for the generator."""

ROUNDS = tl.constexpr(7)
"""Rounds of Philox: the fewest that pass BigCrush (Salmon et al. 2011)."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def draw(seed, step, tensor, index):
    """Four random numbers of 32 bits for each index (int64) of a tensor at a step."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, high, (zero + tensor).to(tl.uint32), (zero + step).to(tl.uint32), ROUNDS)


@triton.jit
def round_stochastic(x, bits):
    """fp32 to bf16: add random lower bits, then truncate. NaN stays NaN."""
    carried = (x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return tl.where(x == x, carried.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


# The step changes every time: no recompilation when it is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["seed", "step"])
def adamw_kernel(
    table_ptr,
    rows_ptr,
    starts_ptr,
    lr_or_ptr,
    found_inf_ptr,
    grad_scale_ptr,
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
    MOMENT: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    SKIPPABLE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = table_ptr + tl.load(rows_ptr + program) * COLUMNS
    start = tl.load(starts_ptr + program)
    p_ptr = tl.load(entry).to(tl.pointer_type(PARAMETER))
    g_ptr = tl.load(entry + 1).to(tl.pointer_type(GRADIENT))
    m_ptr = tl.load(entry + 2).to(tl.pointer_type(MOMENT))
    v_ptr = tl.load(entry + 3).to(tl.pointer_type(MOMENT))
    size = tl.load(entry + 4)
    factor = 1.0
    if SCALED:
        factor = 1.0 / tl.load(grad_scale_ptr)
    if SKIPPABLE:
        # With a size of zero all loads and stores are masked.
        size = tl.where(tl.load(found_inf_ptr) != 0, 0, size)
    if ALIGNED:
        # The compiler vectorizes only if it knows that loaded addresses are aligned.
        p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
        size, start = tl.multiple_of(size, 16), tl.multiple_of(start, 16)
    lr = tl.load(lr_or_ptr).to(tl.float32) if LR_ON_DEVICE else lr_or_ptr
    lane = tl.arange(0, BLOCK)
    r0 = lane.to(tl.uint32)
    r1 = r0
    r2 = r0
    r3 = r0
    if STOCHASTIC:
        r0, r1, r2, r3 = draw(seed, step, tl.load(entry + 5), start // 4 + lane)
    for block in tl.static_range(4):
        at = start + block * BLOCK + lane
        inside = at < size
        bits = r0
        if block == 1:
            bits = r1
        if block == 2:
            bits = r2
        if block == 3:
            bits = r3
        p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        p = p * (1.0 - lr * weight_decay) - lr / correction1 * (m / (tl.sqrt(v) / root_correction2 + eps))
        if STOCHASTIC and p_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(p_ptr + at, round_stochastic(p, bits), mask=inside)
        else:
            tl.store(p_ptr + at, p.to(PARAMETER), mask=inside)
        if STOCHASTIC and v_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(v_ptr + at, round_stochastic(v, bits >> 16), mask=inside)
        else:
            tl.store(v_ptr + at, v.to(MOMENT), mask=inside)
        tl.store(m_ptr + at, m.to(MOMENT), mask=inside)


def update(
    table: Tensor,
    division: Division,
    lr: Tensor | float,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
    hyperparameters: list[float],
    *,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    step: int,
    stochastic_rounding: bool,
    seed: int,
    is_aligned: bool,
) -> None:
    """One launch over the tensors of a table, all of the same dtypes (parameter, gradient, moments)."""
    adamw_kernel[(len(division.rows),)](
        table,
        division.rows,
        division.starts,
        lr,
        found_inf,
        grad_scale,
        *hyperparameters,
        seed,
        step,
        PARAMETER=TYPES[dtypes[0]],
        GRADIENT=TYPES[dtypes[1]],
        MOMENT=TYPES[dtypes[2]],
        LR_ON_DEVICE=isinstance(lr, Tensor),
        SKIPPABLE=found_inf is not None,
        SCALED=grad_scale is not None,
        ALIGNED=is_aligned,
        STOCHASTIC=stochastic_rounding,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        num_warps=4,
    )


def hyperparameters(betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> list[float]:
    """The kernel's scalars, computed in float64: fp32 would lose digits of 1 − beta."""
    beta1, beta2 = map(float, betas)
    corrections = 1 - beta1**step, (1 - beta2**step) ** 0.5
    return [beta1, 1 - beta1, beta2, 1 - beta2, float(eps), float(weight_decay), *corrections]
