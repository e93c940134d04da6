# mypy: allow-untyped-decorators
"""SwiGLU between fp8 matmuls: 16-bit inputs, fp8 outputs in the layouts the matmuls need.

One scale per tensor depends on the tensor's amax. So the forward result is computed twice, for the amax and for the
cast: recomputing on chip moves no more than writing 16 bits and reading them back. The backward pass uses a bound: the
first forward pass stores, for each row and SEGMENT columns, the largest derivative of SwiGLU, and that times the amax of
dh there bounds every gradient. A scale from a bound is never too large and may be some powers of two too small; e5m2
has thirty, so only gradients far below the largest lose precision. The last kernel also writes h transposed, which the
gradient of the down projection needs.

    forward    2 tensors read; 2 read, ½ written (h in fp8)
    backward   1 read; 3 read, 2½ written (dgate and dup in both layouts, h transposed)

Values are computed in fp32 and rounded once, to fp8. Gate and up are the halves of one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.fast_math import LOG2_E, exp2, reciprocal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Shapes: m tokens, i width of the MLP, j = 2i (gate and up concatenated), s segments of a row.

SEGMENT = 256


@dataclass(frozen=True)
class Fp8Tile:
    """The tile of one program. Stored transposed, a row of memory is as long as the tile has rows."""

    rows: int
    columns: int
    num_warps: int

    def programs(self, num_rows: int, width: int) -> int:
        return -(-num_rows // self.rows) * -(-width // self.columns)


REDUCED = Fp8Tile(16, SEGMENT, 4)
"""Tile of the amax kernels: one row of a tile is a segment."""
STREAMED = Fp8Tile(8, 512, 8)
"""Tile of the kernel that casts h in row-major order."""
TRANSPOSED = Fp8Tile(64, 64, 8)
"""Tile of the kernel that writes transposes: 64 bytes of fp8 in either direction, two full sectors."""


@triton.jit
def tile_of(num_rows: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's first row and column, and the mask of its tile."""
    across = tl.cdiv(width, COLUMNS)
    first_row = tl.program_id(0) // across * ROWS
    first_column = tl.program_id(0) % across * COLUMNS
    inside = (first_row + tl.arange(0, ROWS) < num_rows)[:, None] & (
        first_column + tl.arange(0, COLUMNS) < width
    )[None, :]
    return first_row.to(tl.int64), first_column, inside


@triton.jit
def load_tile(
    pointer: tl.tensor, stride: tl.tensor, inside: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    place = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_transposed(
    pointer: tl.tensor,
    values: tl.tensor,
    stride: tl.tensor,
    inside: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    place = tl.arange(0, COLUMNS)[None, :] * stride + tl.arange(0, ROWS)[:, None]
    tl.store(pointer + place, values, mask=inside)


@triton.jit
def nan_to_inf(magnitude: tl.tensor) -> tl.tensor:
    """A maximum ignores NaN, and a diverged run must stay visible."""
    return tl.where(magnitude == magnitude, magnitude, float("inf"))


@triton.jit
def derivatives(gate: tl.tensor, up: tl.tensor):  # type: ignore[no-untyped-def]
    """Derivatives of silu(gate) · up by gate and by up; the latter is silu(gate)."""
    sigmoid = reciprocal(1.0 + exp2(-gate * LOG2_E))
    silu = gate * sigmoid
    return up * (sigmoid + silu * (1.0 - sigmoid)), silu


@triton.jit
def fp8_swiglu_amax_kernel(
    gate_up_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    max_derivative_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    gate_up_ptr += row * 2 * width + column
    gate = load_tile(gate_up_ptr, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(gate_up_ptr + width, 2 * width, inside, ROWS, COLUMNS)
    by_gate, by_up = derivatives(gate, up)
    tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(nan_to_inf(tl.abs(by_up * up)), axis=1), axis=0))
    max_derivative = tl.max(tl.maximum(nan_to_inf(tl.abs(by_gate)), nan_to_inf(tl.abs(by_up))), axis=1)
    own_row = row + tl.arange(0, ROWS)
    place = own_row * tl.cdiv(width, COLUMNS) + column // COLUMNS
    tl.store(max_derivative_ptr + place, max_derivative, mask=own_row < num_rows)


@triton.jit
def fp8_swiglu_kernel(
    gate_up_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    gate_up_ptr += row * 2 * width + column
    gate = load_tile(gate_up_ptr, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(gate_up_ptr + width, 2 * width, inside, ROWS, COLUMNS)
    h = gate * reciprocal(1.0 + exp2(-gate * LOG2_E)) * up
    place = tl.arange(0, ROWS)[:, None] * width + tl.arange(0, COLUMNS)[None, :]
    cast = (h * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column + place, cast, mask=inside)


@triton.jit
def fp8_swiglu_bound_kernel(
    dh_ptr: tl.tensor,
    max_derivative_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    dh = load_tile(dh_ptr + row * width + column, width, inside, ROWS, COLUMNS)
    own_row = row + tl.arange(0, ROWS)
    place = own_row * tl.cdiv(width, COLUMNS) + column // COLUMNS
    max_derivative = tl.load(max_derivative_ptr + place, mask=own_row < num_rows, other=0.0)
    bound = nan_to_inf(tl.max(nan_to_inf(tl.abs(dh)), axis=1) * max_derivative)
    tl.store(bound_ptr + tl.program_id(0), tl.max(bound, axis=0))


@triton.jit
def fp8_swiglu_backward_kernel(
    dh_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    same_scale_ptr: tl.tensor,
    h_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    transposed_ptr: tl.tensor,
    h_transposed_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    start = row * 2 * width + column
    dh = load_tile(dh_ptr + row * width + column, width, inside, ROWS, COLUMNS)
    gate = load_tile(gate_up_ptr + start, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(gate_up_ptr + start + width, 2 * width, inside, ROWS, COLUMNS)
    by_gate, by_up = derivatives(gate, up)
    dgate, dup = dh * by_gate, dh * by_up
    h = (by_up * up * tl.load(h_scale_ptr)).to(h_transposed_ptr.dtype.element_ty)
    place = tl.arange(0, ROWS)[:, None] * (2 * width) + tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(scale_ptr)
    tl.store(out_ptr + start + place, (dgate * scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + start + width + place, (dup * scale).to(out_ptr.dtype.element_ty), mask=inside)
    # Cast again for the other layout, with a scale that ptxas cannot know to be the same. It miscompiles casts that are stored
    # both as vectors and byte by byte: ptxas 12.8, bundled with Triton 3.6, reads the upper byte of every other pair before it is
    # written.
    scale = tl.load(same_scale_ptr)
    transposed_dgate = (dgate * scale).to(transposed_ptr.dtype.element_ty)
    transposed_dup = (dup * scale).to(transposed_ptr.dtype.element_ty)
    start_transposed = column.to(tl.int64) * num_rows + row
    store_transposed(transposed_ptr + start_transposed, transposed_dgate, num_rows, inside, ROWS, COLUMNS)
    second_half = transposed_ptr + width.to(tl.int64) * num_rows
    store_transposed(second_half + start_transposed, transposed_dup, num_rows, inside, ROWS, COLUMNS)
    store_transposed(h_transposed_ptr + start_transposed, h, num_rows, inside, ROWS, COLUMNS)


def amax(gate_up_mj: Tensor, tile: Fp8Tile = REDUCED) -> tuple[Tensor, Tensor]:
    """The amax of silu(gate) · up; and of its derivatives, for each row and segment."""
    num_rows, width = gate_up_mj.shape[0], gate_up_mj.shape[1] // 2
    found = gate_up_mj.new_empty(tile.programs(num_rows, width), dtype=torch.float32)
    max_derivative_ms = gate_up_mj.new_empty(num_rows, segments(width), dtype=torch.float32)
    _launch(fp8_swiglu_amax_kernel, tile, num_rows, width, gate_up_mj, found, max_derivative_ms)
    return found.amax(), max_derivative_ms


def forward(gate_up_mj: Tensor, scale: Tensor, tile: Fp8Tile = STREAMED) -> Tensor:
    """silu(gate) · up · scale in e4m3."""
    num_rows, width = gate_up_mj.shape[0], gate_up_mj.shape[1] // 2
    out_mi = gate_up_mj.new_empty(num_rows, width, dtype=E4M3)
    _launch(fp8_swiglu_kernel, tile, num_rows, width, gate_up_mj, scale, out_mi)
    return out_mi


def bound(dh_mi: Tensor, max_derivative_ms: Tensor, tile: Fp8Tile = REDUCED) -> Tensor:
    """An upper bound on the amax of the gradients of gate and up."""
    num_rows, width = dh_mi.shape
    found = dh_mi.new_empty(tile.programs(num_rows, width), dtype=torch.float32)
    _launch(fp8_swiglu_bound_kernel, tile, num_rows, width, dh_mi, max_derivative_ms, found)
    return found.amax()


def backward(
    dh_mi: Tensor, gate_up_mj: Tensor, scale: Tensor, h_scale: Tensor, tile: Fp8Tile = TRANSPOSED
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, concatenated, times scale in e5m2; their transpose; the transpose of `forward`."""
    num_rows, width = dh_mi.shape
    out_mj = gate_up_mj.new_empty(num_rows, 2 * width, dtype=E5M2)
    transposed_jm = gate_up_mj.new_empty(2 * width, num_rows, dtype=E5M2)
    h_transposed_im = gate_up_mj.new_empty(width, num_rows, dtype=E4M3)
    tensors = dh_mi, gate_up_mj, scale, scale, h_scale, out_mj, transposed_jm, h_transposed_im
    _launch(fp8_swiglu_backward_kernel, tile, num_rows, width, *tensors)
    return out_mj, transposed_jm, h_transposed_im


def segments(width: int) -> int:
    return -(-width // SEGMENT)


def _launch(kernel: triton.JITFunction, tile: Fp8Tile, num_rows: int, width: int, *tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)
    kernel[(tile.programs(num_rows, width),)](
        *tensors, num_rows, width, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps
    )
