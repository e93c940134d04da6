# mypy: allow-untyped-decorators
"""SwiGLU between 8-bit products: read in 16 bits, written in 8, in the layouts that the products want.

One scale serves a whole tensor, and it hangs on the largest magnitude in it: so each result is made twice, first to
find that, then to be cast. Making it again from gate and up, on chip, moves fewer bytes than writing it down in 16 bits
and reading it back, and takes no memory. What a pass has in registers anyway goes out with it: the first pass backward
also writes the forward result turned over, which the gradient of the last layer wants.

    forward    largest of h: 2 wide tensors read     h in 8 bits: 2 read, ½ written
    backward   largest of dgate and dup: 3 read, h turned: ½ written     both cast, both layouts: 3 read, 2 written

Values are made in fp32 and rounded once, to 8 bits. Each program leaves the largest magnitude of its tile; the end of
that search is torch's. Gate and up are the halves of one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Shapes: m tokens, i width of the MLP, j its double (gate and up side by side).


@dataclass(frozen=True)
class Tile:
    """What a program works on. Turned over, a row of memory is as long as the tile has rows."""

    rows: int
    columns: int
    num_warps: int

    def programs(self, num_rows: int, width: int) -> int:
        return -(-num_rows // self.rows) * -(-width // self.columns)


STREAMED = Tile(8, 512, 8)
"""Of the forward kernels, which turn nothing over: long rows."""
TURNED = Tile(64, 64, 8)
"""Of the backward kernels: in either direction 64 bytes of fp8, two whole sectors of memory."""


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
def largest_in(magnitude: tl.tensor) -> tl.tensor:
    """Of a whole tile. What is no number counts as infinite: a maximum would pass it over, and it must be seen."""
    seen = tl.where(magnitude == magnitude, magnitude, float("inf"))
    return tl.max(tl.max(seen, axis=1), axis=0)


@triton.jit
def gradients(dh: tl.tensor, gate: tl.tensor, up: tl.tensor):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return dh * up * (sigmoid + silu * (1.0 - sigmoid)), dh * silu, silu * up


@triton.jit
def fp8_swiglu_largest_kernel(
    joined_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    joined_ptr += row * 2 * width + column
    gate = load_tile(joined_ptr, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(joined_ptr + width, 2 * width, inside, ROWS, COLUMNS)
    h = gate * tl.sigmoid(gate) * up
    tl.store(largest_ptr + tl.program_id(0), largest_in(tl.abs(h)))


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
    h = gate * tl.sigmoid(gate) * up
    place = tl.arange(0, ROWS)[:, None] * width + tl.arange(0, COLUMNS)[None, :]
    cast = (h * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column + place, cast, mask=inside)


@triton.jit
def fp8_swiglu_backward_largest_kernel(
    dh_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column, inside = tile_of(num_rows, width, ROWS, COLUMNS)
    joined_ptr += row * 2 * width + column
    dh = load_tile(dh_ptr + row * width + column, width, inside, ROWS, COLUMNS)
    gate = load_tile(joined_ptr, 2 * width, inside, ROWS, COLUMNS)
    up = load_tile(joined_ptr + width, 2 * width, inside, ROWS, COLUMNS)
    dgate, dup, h = gradients(dh, gate, up)
    larger = tl.maximum(tl.abs(dgate), tl.abs(dup), propagate_nan=tl.PropagateNan.ALL)
    tl.store(largest_ptr + tl.program_id(0), largest_in(larger))
    cast = (h * tl.load(scale_ptr)).to(turned_ptr.dtype.element_ty)
    turned_ptr += column.to(tl.int64) * num_rows + row
    store_turned(turned_ptr, cast, num_rows, inside, ROWS, COLUMNS)


@triton.jit
def fp8_swiglu_backward_kernel(
    dh_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    turned_ptr: tl.tensor,
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
    dgate, dup, _ = gradients(dh, gate, up)
    scale = tl.load(scale_ptr)
    dgate_cast = (dgate * scale).to(out_ptr.dtype.element_ty)
    dup_cast = (dup * scale).to(out_ptr.dtype.element_ty)
    place = tl.arange(0, ROWS)[:, None] * (2 * width) + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + start + place, dgate_cast, mask=inside)
    tl.store(out_ptr + start + width + place, dup_cast, mask=inside)
    turned_ptr += column.to(tl.int64) * num_rows + row
    store_turned(turned_ptr, dgate_cast, num_rows, inside, ROWS, COLUMNS)
    turned_ptr += width.to(tl.int64) * num_rows
    store_turned(turned_ptr, dup_cast, num_rows, inside, ROWS, COLUMNS)


def largest(joined_mj: Tensor, tile: Tile = STREAMED) -> Tensor:
    """The largest magnitude of silu(gate) · up."""
    num_rows, width = joined_mj.shape[0], joined_mj.shape[1] // 2
    found = joined_mj.new_empty(tile.programs(num_rows, width), dtype=torch.float32)
    _launch(fp8_swiglu_largest_kernel, tile, num_rows, width, joined_mj, found)
    return found.amax()


def forward(joined_mj: Tensor, scale: Tensor, tile: Tile = STREAMED) -> Tensor:
    """silu(gate) · up · scale in e4m3."""
    num_rows, width = joined_mj.shape[0], joined_mj.shape[1] // 2
    out_mi = joined_mj.new_empty(num_rows, width, dtype=E4M3)
    _launch(fp8_swiglu_kernel, tile, num_rows, width, joined_mj, scale, out_mi)
    return out_mi


def backward_largest(
    dh_mi: Tensor, joined_mj: Tensor, scale: Tensor, tile: Tile = TURNED
) -> tuple[Tensor, Tensor]:
    """The largest magnitude of the gradients of gate and up; and what `forward` gives, turned over."""
    num_rows, width = dh_mi.shape
    found = joined_mj.new_empty(tile.programs(num_rows, width), dtype=torch.float32)
    turned_im = joined_mj.new_empty(width, num_rows, dtype=E4M3)
    _launch(
        fp8_swiglu_backward_largest_kernel, tile, num_rows, width, dh_mi, joined_mj, scale, found, turned_im
    )
    return found.amax(), turned_im


def backward(dh_mi: Tensor, joined_mj: Tensor, scale: Tensor, tile: Tile = TURNED) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, side by side, times scale in e5m2; and the same turned over."""
    num_rows, width = dh_mi.shape
    out_mj = joined_mj.new_empty(num_rows, 2 * width, dtype=E5M2)
    turned_jm = joined_mj.new_empty(2 * width, num_rows, dtype=E5M2)
    _launch(fp8_swiglu_backward_kernel, tile, num_rows, width, dh_mi, joined_mj, scale, out_mj, turned_jm)
    return out_mj, turned_jm


def _launch(kernel: triton.JITFunction, tile: Tile, num_rows: int, width: int, *tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)
    kernel[(tile.programs(num_rows, width),)](
        *tensors, num_rows, width, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps
    )
