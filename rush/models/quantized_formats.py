"""How frozen weights are stored in fewer bits, and what the codes stand for: NF4 and int8, by two libraries.

NF4 is a table of 16 values with equal probability under a normal curve; a weight is the nearest one times the
largest magnitude of its block of 64. These magnitudes are quantized in turn (8 bits in blocks of 256: "double
quantization"), which makes 4.13 bits a weight in all. int8 has one scale for each row: 8 bits, nearly no error.
Quantizing and unpacking are the libraries' (bitsandbytes, torchao), imported when they are used; who has another
way to unpack a form offers it here under a name of its own.

Shapes: i inputs, o outputs; codes are flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rush.libraries import load_library

BLOCK, SCALE_BLOCK = 64, 256


@dataclass(frozen=True)
class Form:
    """How frozen weights are stored: `nf4` or `int8`, quantized by which library."""

    kind: str
    backend: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.backend}"


Parts = dict[str, Tensor]


# --- NF4 by bitsandbytes --------------------------------------------------------------------------------


def _pack_bitsandbytes(weight: Tensor) -> Parts:
    functional: Any = load_library("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return {
        "codes": codes.flatten(),
        "scales": state.absmax,
        "scale_scales": state.state2.absmax,
        "scale_table": state.state2.code,
        "offset": state.offset.reshape(1),
    }


def _layout_bitsandbytes(out_features: int, in_features: int) -> dict[str, tuple[int, torch.dtype]]:
    count = out_features * in_features
    blocks = math.ceil(count / BLOCK)
    return {
        "codes": (math.ceil(count / 2), torch.uint8),
        "scales": (blocks, torch.uint8),
        "scale_scales": (math.ceil(blocks / SCALE_BLOCK), torch.float32),
        "scale_table": (256, torch.float32),
        "offset": (1, torch.float32),
    }


def _unpack_bitsandbytes(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    load_library("bitsandbytes")  # registers the operators
    codes, scales, scale_scales, scale_table, offset = parts
    ops = torch.ops.bitsandbytes
    largest = ops.dequantize_blockwise.default(scales, scale_scales, scale_table, SCALE_BLOCK, torch.float32)
    largest += offset
    # Blocks run on from row to row. The library's x86 kernel (0.50) takes rows that end inside a block for rows of whole
    # blocks, and dequantizes wrongly: it is given the blocks as rows.
    whole = math.prod(dims) % BLOCK == 0 and dims[1] % BLOCK != 0
    shape = (math.prod(dims) // BLOCK, BLOCK) if whole else dims
    weight: Tensor = ops.dequantize_4bit.default(codes[:, None], largest, BLOCK, "nf4", shape, dtype)
    return weight.view(dims)


# --- NF4 by torchao -------------------------------------------------------------------------------------


def _scale_block(count: int) -> int:
    """torchao wants whole blocks of scales: 256, or for small layers the largest power of two that divides them."""
    return math.gcd(count // BLOCK, SCALE_BLOCK)


def _pack_torchao(weight: Tensor) -> Parts:
    to_nf4: Any = load_library("torchao.quantization").to_nf4
    packed = to_nf4(weight.float().contiguous(), BLOCK, _scale_block(weight.numel()))
    return {
        "codes": packed.quantized_data,
        "scales": packed.quantized_scalers,
        "scale_scales": packed.quantization_factor,
        "scale_table": packed.nf4,
        "offset": packed.scaler_mean.reshape(1),
    }


def _layout_torchao(out_features: int, in_features: int) -> dict[str, tuple[int, torch.dtype]]:
    count = out_features * in_features
    blocks = count // BLOCK
    return {
        "codes": (count // 2, torch.uint8),
        "scales": (blocks, torch.int8),
        "scale_scales": (blocks // _scale_block(count), torch.float32),
        "scale_table": (16, torch.float32),
        "offset": (1, torch.float32),
    }


def _unpack_torchao(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The formula of torchao's own `get_original_weight`, in plain torch; on a GPU compiled into one kernel."""
    unpack: Callable[..., Tensor] = _compiled_unpack() if parts[0].is_cuda else _unpack_formula
    return unpack(*parts, dtype).view(dims)


def _unpack_formula(
    codes: Tensor, scales: Tensor, scale_scales: Tensor, table: Tensor, offset: Tensor, dtype: torch.dtype
) -> Tensor:
    largest = (scales.view(scale_scales.shape[0], -1) / scale_scales[:, None]).flatten() + offset
    values = table[torch.stack((codes >> 4, codes & 15), dim=-1).int()]
    return (values.view(largest.shape[0], -1) * largest[:, None]).to(dtype)


@cache
def _compiled_unpack() -> Callable[..., Tensor]:
    return torch.compile(_unpack_formula, dynamic=False)


# --- int8 ------------------------------------------------------------------------------------------------


def _pack_int8_bitsandbytes(weight: Tensor) -> Parts:
    functional: Any = load_library("bitsandbytes.functional")
    codes, largest_o, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
    return {"codes": codes, "scales": largest_o.float() / 127}


def _pack_int8_torchao(weight: Tensor) -> Parts:
    quantization: Any = load_library("torchao.quantization")
    holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    holder.weight = nn.Parameter(weight.float(), requires_grad=False)
    quantization.quantize_(holder, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    packed: Any = holder.weight
    return {"codes": packed.qdata, "scales": packed.scale.float().flatten()}


def _layout_int8(out_features: int, in_features: int) -> dict[str, tuple[int, torch.dtype]]:
    return {"codes": (out_features * in_features, torch.int8), "scales": (out_features, torch.float32)}


def _unpack_int8(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    codes, scales_o = parts
    weight = torch.empty(dims, dtype=dtype, device=codes.device)
    # One kernel: multiplied in fp32, rounded once as it is written.
    return torch.mul(codes.view(dims), scales_o[:, None], out=weight)


# --- which is which --------------------------------------------------------------------------------------


Unpack = Callable[[Sequence[Tensor], tuple[int, int], torch.dtype], Tensor]
"""Of the parts of a weight, its size and the dtype wanted makes a matrix of its own."""


@dataclass(frozen=True)
class _Way:
    pack: Callable[[Tensor], Parts]
    unpack: Unpack
    layout: Callable[[int, int], Mapping[str, tuple[int, torch.dtype]]]


_WAYS = {
    "nf4/bitsandbytes": _Way(_pack_bitsandbytes, _unpack_bitsandbytes, _layout_bitsandbytes),
    "nf4/torchao": _Way(_pack_torchao, _unpack_torchao, _layout_torchao),
    "int8/bitsandbytes": _Way(_pack_int8_bitsandbytes, _unpack_int8, _layout_int8),
    "int8/torchao": _Way(_pack_int8_torchao, _unpack_int8, _layout_int8),
}  # fmt: skip


def stored_parts(form: Form, out_features: int, in_features: int) -> Mapping[str, tuple[int, torch.dtype]]:
    """What a weight of this size is stored as: number and dtype of the elements of each part."""
    return _WAYS[str(form)].layout(out_features, in_features)


def pack(form: Form, weight: Tensor) -> Parts:
    """A weight in full precision as the parts that stand for it."""
    return _WAYS[str(form)].pack(weight)


_DEQUANTIZERS: dict[str, Unpack] = {form: way.unpack for form, way in _WAYS.items()}


def register_dequantizer(name: str, unpack: Unpack) -> None:
    """Let layers name another way to unpack what they store. A name means the same for good."""
    assert _DEQUANTIZERS.setdefault(name, unpack) is unpack, f"{name} is taken"


def unpack(dequantizer: str, parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight that codes stand for, as a matrix of its own; a form's name is its library's way."""
    return _DEQUANTIZERS[dequantizer](parts, dims, dtype)
