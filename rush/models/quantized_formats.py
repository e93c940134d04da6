"""Formats of quantized frozen weights: NF4 and int8, by two libraries.

NF4 is a table of 16 values with equal probability under a normal distribution; a weight is the nearest one times the
absmax of its block of 64. The absmax values are quantized in turn (8 bits in blocks of 256: "double quantization"), in
total 4.13 bits per weight. int8 has one scale per row: 8 bits, nearly no error. Quantization and dequantization are the
libraries' (bitsandbytes, torchao), imported on first use; `register_dequantizer` adds another dequantizer.

Shapes: i inputs, o outputs; quantized weights ("codes") are flat.
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


def _quantize_bitsandbytes(weight: Tensor) -> Parts:
    functional: Any = load_library("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    # The scales are quantized on the host: the library's CUDA kernel rounds 0.2 % of them differently from
    # its CPU kernel, and a base must be the same wherever it is trained, merged and served.
    absmax = state.absmax.cpu()
    offset = absmax.double().mean().float()
    scales, second = functional.quantize_blockwise(absmax - offset, blocksize=SCALE_BLOCK)
    parts = {
        "codes": codes.flatten(),
        "scales": scales,
        "scale_scales": second.absmax,
        "scale_table": second.code,
        "offset": offset.reshape(1),
    }
    return {name: part.to(weight.device) for name, part in parts.items()}


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


def _dequantize_bitsandbytes(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    load_library("bitsandbytes")  # registers the operators
    codes, scales, scale_scales, scale_table, offset = parts
    ops = torch.ops.bitsandbytes
    absmax = ops.dequantize_blockwise.default(scales, scale_scales, scale_table, SCALE_BLOCK, torch.float32)
    absmax += offset
    # Blocks continue across rows. The library's x86 kernel (0.50) dequantizes wrongly where rows end inside a block, so it
    # gets the blocks as rows.
    whole = math.prod(dims) % BLOCK == 0 and dims[1] % BLOCK != 0
    shape = (math.prod(dims) // BLOCK, BLOCK) if whole else dims
    weight: Tensor = ops.dequantize_4bit.default(codes[:, None], absmax, BLOCK, "nf4", shape, dtype)
    return weight.view(dims)


# --- NF4 by torchao -------------------------------------------------------------------------------------


def _scale_block(count: int) -> int:
    """torchao needs whole blocks of scales: 256, or for small layers the greatest power of two that divides them."""
    return math.gcd(count // BLOCK, SCALE_BLOCK)


def _quantize_torchao(weight: Tensor) -> Parts:
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


def _dequantize_torchao(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The formula of torchao's own `get_original_weight`, in plain torch; on a GPU compiled into one kernel."""
    formula: Callable[..., Tensor] = _compiled_dequantize() if parts[0].is_cuda else _dequantize_formula
    return formula(*parts, dtype).view(dims)


def _dequantize_formula(
    codes: Tensor, scales: Tensor, scale_scales: Tensor, table: Tensor, offset: Tensor, dtype: torch.dtype
) -> Tensor:
    absmax = (scales.view(scale_scales.shape[0], -1) / scale_scales[:, None]).flatten() + offset
    values = table[torch.stack((codes >> 4, codes & 15), dim=-1).int()]
    return (values.view(absmax.shape[0], -1) * absmax[:, None]).to(dtype)


@cache
def _compiled_dequantize() -> Callable[..., Tensor]:
    return torch.compile(_dequantize_formula, dynamic=False)


# --- int8 ------------------------------------------------------------------------------------------------


def _quantize_int8_bitsandbytes(weight: Tensor) -> Parts:
    functional: Any = load_library("bitsandbytes.functional")
    codes, absmax_o, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
    return {"codes": codes, "scales": absmax_o.float() / 127}


def _quantize_int8_torchao(weight: Tensor) -> Parts:
    quantization: Any = load_library("torchao.quantization")
    holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    holder.weight = nn.Parameter(weight.float(), requires_grad=False)
    quantization.quantize_(holder, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    packed: Any = holder.weight
    return {"codes": packed.qdata, "scales": packed.scale.float().flatten()}


def _layout_int8(out_features: int, in_features: int) -> dict[str, tuple[int, torch.dtype]]:
    return {"codes": (out_features * in_features, torch.int8), "scales": (out_features, torch.float32)}


def _dequantize_int8(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    codes, scales_o = parts
    weight = torch.empty(dims, dtype=dtype, device=codes.device)
    # One kernel: multiplied in fp32, rounded once as it is written.
    return torch.mul(codes.view(dims), scales_o[:, None], out=weight)


# --- backends --------------------------------------------------------------------------------------------


Dequantize = Callable[[Sequence[Tensor], tuple[int, int], torch.dtype], Tensor]
"""From the parts of a weight, its size and a dtype to a new dense matrix."""


@dataclass(frozen=True)
class _Backend:
    quantize: Callable[[Tensor], Parts]
    dequantize: Dequantize
    layout: Callable[[int, int], Mapping[str, tuple[int, torch.dtype]]]


_BACKENDS = {
    "nf4/bitsandbytes": _Backend(_quantize_bitsandbytes, _dequantize_bitsandbytes, _layout_bitsandbytes),
    "nf4/torchao": _Backend(_quantize_torchao, _dequantize_torchao, _layout_torchao),
    "int8/bitsandbytes": _Backend(_quantize_int8_bitsandbytes, _dequantize_int8, _layout_int8),
    "int8/torchao": _Backend(_quantize_int8_torchao, _dequantize_int8, _layout_int8),
}  # fmt: skip


def known_form(kind: str, backend: str) -> bool:
    """Whether weights can be stored so."""
    return str(Form(kind, backend)) in _BACKENDS


def stored_parts(form: Form, out_features: int, in_features: int) -> Mapping[str, tuple[int, torch.dtype]]:
    """Number of elements and dtype of each stored part of a weight of this size."""
    return _BACKENDS[str(form)].layout(out_features, in_features)


def quantize(form: Form, weight: Tensor) -> Parts:
    """Quantize a weight into its stored parts."""
    return _BACKENDS[str(form)].quantize(weight)


_DEQUANTIZERS: dict[str, Dequantize] = {form: backend.dequantize for form, backend in _BACKENDS.items()}


def register_dequantizer(name: str, dequantize: Dequantize) -> None:
    """Register another implementation that dequantizes a form, under a name of its own."""
    assert _DEQUANTIZERS.setdefault(name, dequantize) is dequantize, f"{name} is taken"


def dequantize(
    dequantizer: str, parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The dense weight; by default by the format's own library."""
    return _DEQUANTIZERS[dequantizer](parts, dims, dtype)
