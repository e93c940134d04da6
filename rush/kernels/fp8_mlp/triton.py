# mypy: allow-untyped-decorators
"""SwiGLU between 8-bit products: read in 16 bits, written in 8, in the layouts that the products want.

One scale serves a whole tensor and hangs on the largest magnitude in it. Forward the result is therefore made twice, to
find that and to be cast: making it again on chip moves no more than writing it in 16 bits and reading it back would.
Backward a bound does: the first pass forward notes, for each row and SEGMENT columns, how steep SwiGLU gets there (the
larger of both derivatives), and that times the largest dh there is no smaller than any gradient. The scale from a
bound is never too large and may be some powers of two too small; e5m2 has thirty, and only what is tiny beside the
largest gradient is rounded more coarsely. What a pass has in registers anyway goes out with it: the last one
also writes the forward result turned over, which the gradient of the last layer wants.

    forward    2 wide tensors read; 2 read, ½ written (in 8 bits: h)
    backward   1 read; 3 read, 2½ written (dgate and dup in both layouts, h turned)

Values are made in fp32 and rounded once, to 8 bits. Gate and up are the halves of one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.fast_math import LOG2_E, exp2, reciprocal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Shapes: m tokens, i width of the MLP, j its double (gate and up side by side), s segments of a row.

SEGMENT = 256


@dataclass(frozen=True)
class Tile:
    """What a program works on. Turned over, a row of memory is as long as the tile has rows."""

    rows: int
    columns: int
    num_warps: int

    def programs(self, num_rows: int, width: int) -> int:
        return -(-num_rows // self.rows) * -(-width // self.columns)


NOTED = Tile(16, SEGMENT, 4)
"""Of the kernels that look for a largest value: a row of a tile is a segment."""
STREAMED = Tile(8, 512, 8)
"""Of the one that casts h, in rows as they lie."""
TURNED = Tile(64, 64, 8)
"""Of the one that does: in either direction 64 bytes of fp8, two whole sectors of memory."""


@triton.jit
def tile_of(num_rows: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's first row and column, and which places of its tile are inside."""
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
def store_turned(
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
def seen(magnitude: tl.tensor) -> tl.tensor:
    """What is no number counts as infinite: a maximum would pass it over, and a run that diverged must be seen to."""
    return tl.where(magnitude == magnitude, magnitude, float("inf"))


@triton.jit
def derivatives(gate: tl.tensor, up: tl.tensor):  # type: ignore[no-untyped-def]
    """Of silu(gate) · up: by gate, and by up (which is silu(gate))."""
    sigmoid = reciprocal(1.0 + exp2(-gate * LOG2_E))
    silu = gate * sigmoid
    return up * (sigmoid + silu * (1.0 - sigmoid)), silu


@triton.jit
def fp8_swiglu_largest_kernel(
    joined_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    steepest_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    joined_ptr += row * 2 * width + column
    gate = load_tile(joined_ptr, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(joined_ptr + width, 2 * width, inside, ROWS, COLUMNS)
    by_gate, by_up = derivatives(gate, up)
    tl.store(largest_ptr + tl.program_id(0), tl.max(tl.max(seen(tl.abs(by_up * up)), axis=1), axis=0))
    steepest = tl.max(tl.maximum(seen(tl.abs(by_gate)), seen(tl.abs(by_up))), axis=1)
    own_row = row + tl.arange(0, ROWS)
    place = own_row * tl.cdiv(width, COLUMNS) + column // COLUMNS
    tl.store(steepest_ptr + place, steepest, mask=own_row < num_rows)


@triton.jit
def fp8_swiglu_kernel(
    joined_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    joined_ptr += row * 2 * width + column
    gate = load_tile(joined_ptr, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(joined_ptr + width, 2 * width, inside, ROWS, COLUMNS)
    h = gate * reciprocal(1.0 + exp2(-gate * LOG2_E)) * up
    place = tl.arange(0, ROWS)[:, None] * width + tl.arange(0, COLUMNS)[None, :]
    cast = (h * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column + place, cast, mask=inside)


@triton.jit
def fp8_swiglu_bound_kernel(
    dh_ptr: tl.tensor,
    steepest_ptr: tl.tensor,
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
    steepest = tl.load(steepest_ptr + place, mask=own_row < num_rows, other=0.0)
    bound = seen(tl.max(seen(tl.abs(dh)), axis=1) * steepest)
    tl.store(bound_ptr + tl.program_id(0), tl.max(bound, axis=0))


@triton.jit
def fp8_swiglu_backward_kernel(
    dh_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    same_scale_ptr: tl.tensor,
    h_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    h_turned_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    start = row * 2 * width + column
    dh = load_tile(dh_ptr + row * width + column, width, inside, ROWS, COLUMNS)
    gate = load_tile(joined_ptr + start, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(joined_ptr + start + width, 2 * width, inside, ROWS, COLUMNS)
    by_gate, by_up = derivatives(gate, up)
    dgate, dup = dh * by_gate, dh * by_up
    h = (by_up * up * tl.load(h_scale_ptr)).to(h_turned_ptr.dtype.element_ty)
    place = tl.arange(0, ROWS)[:, None] * (2 * width) + tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(scale_ptr)
    tl.store(out_ptr + start + place, (dgate * scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + start + width + place, (dup * scale).to(out_ptr.dtype.element_ty), mask=inside)
    # Cast once more for the other layout, with a scale that the assembler cannot know to be the same. Casts that go both into
    # vectors and out byte by byte it gets wrong: ptxas 12.8, which Triton 3.6 brings, reads the upper byte of every other
    # pair before it is made.
    scale = tl.load(same_scale_ptr)
    turned_dgate = (dgate * scale).to(turned_ptr.dtype.element_ty)
    turned_dup = (dup * scale).to(turned_ptr.dtype.element_ty)
    start_turned = column.to(tl.int64) * num_rows + row
    store_turned(turned_ptr + start_turned, turned_dgate, num_rows, inside, ROWS, COLUMNS)
    second_half = turned_ptr + width.to(tl.int64) * num_rows
    store_turned(second_half + start_turned, turned_dup, num_rows, inside, ROWS, COLUMNS)
    store_turned(h_turned_ptr + start_turned, h, num_rows, inside, ROWS, COLUMNS)


def largest(joined_mj: Tensor, tile: Tile = NOTED) -> tuple[Tensor, Tensor]:
    """The largest magnitude of silu(gate) · up; and of its derivatives, for each row and segment."""
    num_rows, width = joined_mj.shape[0], joined_mj.shape[1] // 2
    found = joined_mj.new_empty(tile.programs(num_rows, width), dtype=torch.float32)
    steepest_ms = joined_mj.new_empty(num_rows, segments(width), dtype=torch.float32)
    _launch(fp8_swiglu_largest_kernel, tile, num_rows, width, joined_mj, found, steepest_ms)
    return found.amax(), steepest_ms


def forward(joined_mj: Tensor, scale: Tensor, tile: Tile = STREAMED) -> Tensor:
    """silu(gate) · up · scale in e4m3."""
    num_rows, width = joined_mj.shape[0], joined_mj.shape[1] // 2
    out_mi = joined_mj.new_empty(num_rows, width, dtype=E4M3)
    _launch(fp8_swiglu_kernel, tile, num_rows, width, joined_mj, scale, out_mi)
    return out_mi


def bound(dh_mi: Tensor, steepest_ms: Tensor, tile: Tile = NOTED) -> Tensor:
    """A number that no magnitude of the gradients of gate and up is above."""
    num_rows, width = dh_mi.shape
    found = dh_mi.new_empty(tile.programs(num_rows, width), dtype=torch.float32)
    _launch(fp8_swiglu_bound_kernel, tile, num_rows, width, dh_mi, steepest_ms, found)
    return found.amax()


def backward(
    dh_mi: Tensor, joined_mj: Tensor, scale: Tensor, h_scale: Tensor, tile: Tile = TURNED
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, side by side, times scale in e5m2; the same turned over; what `forward` gives, turned
    over."""
    num_rows, width = dh_mi.shape
    out_mj = joined_mj.new_empty(num_rows, 2 * width, dtype=E5M2)
    turned_jm = joined_mj.new_empty(2 * width, num_rows, dtype=E5M2)
    h_turned_im = joined_mj.new_empty(width, num_rows, dtype=E4M3)
    tensors = dh_mi, joined_mj, scale, scale, h_scale, out_mj, turned_jm, h_turned_im
    _launch(fp8_swiglu_backward_kernel, tile, num_rows, width, *tensors)
    return out_mj, turned_jm, h_turned_im


def segments(width: int) -> int:
    return -(-width // SEGMENT)


def _launch(kernel: triton.JITFunction, tile: Tile, num_rows: int, width: int, *tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)
    kernel[(tile.programs(num_rows, width),)](
        *tensors, num_rows, width, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps
    )
