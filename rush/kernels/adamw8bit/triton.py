# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""AdamW with 8-bit moments: dequantized, updated and quantized again inside one kernel.

Moments are two thirds of AdamW's traffic. As 8-bit codes with one scale per 256 they take 2.03 bytes per parameter
instead of 8, and exist in full precision only in registers. A program takes some blocks of 256, whose own scales confine
outliers: it looks the codes up in a 256-entry table (1 KiB, always in L1), updates in fp32, reduces each block's new
absmax and quantizes.

So little is moved that instructions become the limit: about sixty per element. Hence all arrays are one-dimensional, with
the same eight elements per thread everywhere, and only a block's absmax crosses threads, within one warp; one Philox
draw serves eight elements; and quantization, the nearest of 256 values, is neither a search nor a comparison with every
decade, but arithmetic on the bits of floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.adamw.table import Division
from rush.kernels.adamw.triton import TYPES, draw, hyperparameters, round_stochastic

BLOCK = 256
ROWS = 8
PIECE = ROWS * BLOCK
"""Elements per program."""
NUM_WARPS = 4
COLUMNS = 8
"""Table columns: parameter, gradient, codes and scales of the first moment, of the second, elements, number."""

ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to a float, it leaves the nearest integer in the lowest bits."""
DECADE = tl.constexpr(3.3375 * 2.0**23)
"""How far the bits of a number and of its tenfold are apart, nearly."""
LOG2_SLOPE = tl.constexpr(4.609375)
STRETCH = tl.constexpr(64 / 0.9 / 2**4.609375)
"""What a block's absmax is scaled to before encoding. With this value, and few others, the bits give the decade: borders
come out between 1 and no more than 1 − 1.8 / steps of a power of ten, where the formulas of both decades hold."""


@triton.jit
def encode(x, inverse, SIGNED: tl.constexpr):
    """The code of the value nearest to each x · inverse / STRETCH, of magnitude at most 1 (below it for negative ones).

    Either of two neighbors may win within 2·10⁻⁶ of the middle between them.
    """
    MORE: tl.constexpr = 0 if SIGNED else 1  # twice the steps, where no code is needed for a sign
    size = tl.abs(x) * inverse
    # What is nearer to the smallest value than to zero becomes as large as is needed below; and nothing is zero.
    size = tl.maximum(size, 0.5 * size + STRETCH * (1.425e-7 if SIGNED else 1.0875e-7))
    # A float's bits, read as an integer, are nearly its logarithm. Rounded they give the decade, from −6 up to 0, and put
    # into an exponent the number of its steps, a power of two; the slope falls to a fifth with each decade.
    bits = size.to(tl.int32, bitcast=True).to(tl.float32)
    whole = bits * (1 / DECADE) + (ROUND + 127 + MORE - 32)
    steps = (whole.to(tl.uint32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    decade = whole - (ROUND + 127 + MORE + 6)
    slope = tl.exp2(decade * -2.321928094887362 + (LOG2_SLOPE + MORE))
    # As many values lie below a decade as it has steps; so its first is number `steps`, and a number's place among the values
    # is steps · (1 + (x − 0.1) / 0.9), less a half as what follows rounds.
    place = size * slope + (steps * (8.0 / 9.0) - 0.5)
    # A fifth of a decade's first step is nearer to the decade below: in this step the second line is the lower one.
    place = tl.minimum(place, 1.25 * place - (0.25 * steps + 0.125))
    if SIGNED:
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        place = (place.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        # A quarter of the very last step is nearer to 1.
        code = tl.maximum(place, 2.0 * place - 127.0) + (ROUND + 127.0)
    else:
        code = tl.maximum(place, 2.0 * place - 255.0) + (ROUND - 1.0)
    return code.to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def _absmax(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The absmax of each block."""
    own = tl.max(tl.reshape(tl.abs(x), (ROWS, BLOCK // VECTOR, VECTOR)), axis=2)
    # Positive floats order like their bits, and warps have an integer max instruction.
    return tl.max(own.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale, LARGEST: tl.constexpr):
    """The factor that scales a block's absmax to LARGEST · STRETCH; by rsqrt, since a division takes three times the instructions."""
    root = tl.rsqrt(tl.maximum(scale, 2.0**-126))
    return root * root * (STRETCH * LARGEST)


@triton.jit
def _broadcast(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Broadcast one value per block to its elements."""
    return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, BLOCK)), (ROWS * BLOCK,))


@triton.jit
def _random_bits(seed, step, tensor, index):
    """16 random bits per element, eight elements per index."""
    r0, r1, r2, r3 = draw(seed, step, tensor, index)
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (8 * index.shape[0],))


@triton.jit(do_not_specialize=["seed", "step"])
def adamw8bit_kernel(
    table_ptr,
    rows_ptr,
    starts_ptr,
    signed_ptr,
    unsigned_ptr,
    lr_or_ptr,
    kept1,
    rest1,
    kept2,
    rest2,
    eps,
    weight_decay,
    reach,
    root_rest2,
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
    m_scale_ptr = tl.load(entry + 3).to(tl.pointer_type(tl.float32)) + start // BLOCK
    v_ptr = tl.load(entry + 4).to(tl.pointer_type(tl.uint8))
    v_scale_ptr = tl.load(entry + 5).to(tl.pointer_type(tl.float32)) + start // BLOCK
    left = tl.minimum(tl.load(entry + 6) - start, ROWS * BLOCK).to(tl.int32)
    p_ptr, g_ptr, m_ptr, v_ptr = p_ptr + start, g_ptr + start, m_ptr + start, v_ptr + start
    VECTOR: tl.constexpr = 128 // PARAMETER.primitive_bitwidth
    if ALIGNED:
        p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, VECTOR), tl.multiple_of(v_ptr, VECTOR)
        left = tl.multiple_of(left, 16)
    lr = tl.load(lr_or_ptr).to(tl.float32) if LR_ON_DEVICE else lr_or_ptr
    at = tl.arange(0, ROWS * BLOCK)
    inside = at < left
    block = tl.arange(0, ROWS)
    has_block = block * BLOCK < left

    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m_code = tl.load(m_ptr + at, mask=inside, other=127).to(tl.int32)
    v_code = tl.load(v_ptr + at, mask=inside, other=0).to(tl.int32)
    m_scale = tl.load(m_scale_ptr + block, mask=has_block, other=0.0)
    v_scale = tl.load(v_scale_ptr + block, mask=has_block, other=0.0)
    # Issue all loads first: the compiler would delay half of them until after the table lookups.
    tl.debug_barrier()
    # Moments in units of 1 − beta: new gradients enter unscaled.
    m = _broadcast(kept1 * m_scale, ROWS, BLOCK) * tl.load(signed_ptr + m_code) + g
    v = _broadcast(kept2 * v_scale, ROWS, BLOCK) * tl.load(unsigned_ptr + v_code) + g * g
    root = tl.rsqrt(tl.sqrt(v) * root_rest2 + eps)
    p = p * (1.0 - lr * weight_decay) - lr * reach * m * root * root
    if STOCHASTIC:
        index = start // 8 + tl.arange(0, ROWS * BLOCK // 8)
        tl.store(
            p_ptr + at, round_stochastic(p, _random_bits(seed, step, tl.load(entry + 7), index)), mask=inside
        )
    else:
        tl.store(p_ptr + at, p.to(PARAMETER), mask=inside)
    m_scale, v_scale = _absmax(m, ROWS, BLOCK, VECTOR), _absmax(v, ROWS, BLOCK, VECTOR)
    # There is a code for 1 but none for −1.
    tl.store(
        m_ptr + at, encode(m, _broadcast(_inverse(m_scale, 1 - 2.0**-20), ROWS, BLOCK), True), mask=inside
    )
    tl.store(v_ptr + at, encode(v, _broadcast(_inverse(v_scale, 1.0), ROWS, BLOCK), False), mask=inside)
    tl.store(m_scale_ptr + block, rest1 * m_scale, mask=has_block)
    tl.store(v_scale_ptr + block, rest2 * v_scale, mask=has_block)


def update(
    table: Tensor,
    division: Division,
    values: tuple[Tensor, Tensor],
    lr: Tensor | float,
    hyperparameters: list[float],
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    step: int,
    stochastic_rounding: bool,
    seed: int,
    is_aligned: bool,
) -> None:
    """One launch over the tensors of a table, all of the same dtypes (parameter, gradient).

    `values` are the values of the codes of the signed and of the unsigned moment.
    """
    adamw8bit_kernel[(len(division.rows),)](
        table,
        division.rows,
        division.starts,
        *values,
        lr,
        *hyperparameters,
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
        num_warps=NUM_WARPS if is_aligned else 2 * NUM_WARPS,
    )


def scaled_hyperparameters(
    betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> list[float]:
    """The kernel's scalars, computed in float64, for moments in units of 1 − beta."""
    beta1, rest1, beta2, rest2, *others, correction1, root_correction2 = hyperparameters(
        betas, eps, weight_decay, step
    )
    corrections = rest1 / correction1, rest2**0.5 / root_correction2
    return [beta1 / rest1, rest1, beta2 / rest2, rest2, *others, *corrections]
