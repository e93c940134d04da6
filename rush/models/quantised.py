"""Frozen weights in fewer bits: stored as codes, unpacked where they are used, and forgotten again.

NF4 is a table of 16 values with equal probability under a normal curve; a weight is the nearest one times the
largest magnitude of its block of 64. These magnitudes are quantised in turn (8 bits in blocks of 256: "double
quantisation"), which makes 4.13 bits a weight in all. int8 has one scale for each row: 8 bits, nearly no error.

The forward pass unpacks a weight and multiplies; nothing unpacked is kept, the backward pass unpacks it again.
Both are single operators to a compiler, because it would otherwise see the same unpacking twice, do it once and
keep the result: the whole model in full precision. Quantising and unpacking are the libraries' (bitsandbytes,
torchao), imported when they are used.

Shapes: i inputs, o outputs; codes are flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.models.adapters import See, autocast_input
from rush.models.decoder import Decoder
from rush.models.fingerprints import base_fingerprint, fingerprint

BLOCK, SCALE_BLOCK = 64, 256
# Table of NF4 (Dettmers et al. 2023, arXiv:2305.14314, appendix E), to the digits both libraries use.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How frozen weights are stored: `nf4` or `int8`, quantised by which library."""

    kind: str
    backend: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.backend}"


Parts = dict[str, Tensor]


# --- NF4 by bitsandbytes --------------------------------------------------------------------------------


def _pack_bitsandbytes(weight: Tensor) -> Parts:
    functional: Any = import_module("bitsandbytes.functional")
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
    import_module("bitsandbytes")  # registers the operators
    codes, scales, scale_scales, scale_table, offset = parts
    ops = torch.ops.bitsandbytes
    largest = ops.dequantize_blockwise.default(scales, scale_scales, scale_table, SCALE_BLOCK, torch.float32)
    largest += offset
    weight: Tensor = ops.dequantize_4bit.default(codes[:, None], largest, BLOCK, "nf4", dims, dtype)
    return weight


# --- NF4 by torchao -------------------------------------------------------------------------------------


def _scale_block(count: int) -> int:
    """torchao wants whole blocks of scales: 256, or for small layers the largest power of two that divides them."""
    return math.gcd(count // BLOCK, SCALE_BLOCK)


def _pack_torchao(weight: Tensor) -> Parts:
    to_nf4: Any = import_module("torchao.quantization").to_nf4
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
    functional: Any = import_module("bitsandbytes.functional")
    codes, largest_o, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
    return {"codes": codes, "scales": largest_o.float() / 127}


def _pack_int8_torchao(weight: Tensor) -> Parts:
    quantization: Any = import_module("torchao.quantization")
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


@dataclass(frozen=True)
class _Way:
    pack: Callable[[Tensor], Parts]
    unpack: Callable[[Sequence[Tensor], tuple[int, int], torch.dtype], Tensor]
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


@torch.library.custom_op("rush::quantised_linear", mutates_args=())
def _product(x: Tensor, parts: list[Tensor], form: str, out_features: int) -> Tensor:
    weight_oi = _WAYS[form].unpack(parts, (out_features, x.shape[-1]), x.dtype)
    return F.linear(x, weight_oi)


@_product.register_fake
def _(x: Tensor, parts: list[Tensor], form: str, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("rush::quantised_linear_backward", mutates_args=())
def _input_gradient(d_out: Tensor, parts: list[Tensor], form: str, in_features: int) -> Tensor:
    weight_oi = _WAYS[form].unpack(parts, (d_out.shape[-1], in_features), d_out.dtype)
    return d_out @ weight_oi


@_input_gradient.register_fake
def _(d_out: Tensor, parts: list[Tensor], form: str, in_features: int) -> Tensor:
    return d_out.new_empty((*d_out.shape[:-1], in_features))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, parts, ctx.form, _ = inputs
    ctx.in_features = x.shape[-1]
    # The codes are there anyway; neither the input nor the unpacked weight is kept.
    ctx.save_for_backward(*parts)


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    return (
        _input_gradient(d_out.contiguous(), parts, ctx.form, ctx.in_features),
        [None] * len(parts),
        None,
        None,
    )


_product.register_autograd(_gradient, setup_context=_keep)


class QuantisedLinear(nn.Linear):
    """A linear layer whose frozen weight is stored in codes. It takes weights in full precision, one layer at a time."""

    def __init__(self, plain: nn.Linear, form: Form) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.form = form
        self.bias = plain.bias
        self.source = ""
        self.base_source = ""
        layout = stored_parts(form, self.out_features, self.in_features)
        self.part_names = tuple(layout)
        for name, (size, dtype) in layout.items():
            self.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"), persistent=False)

    @property
    def parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.part_names]

    def hold_as_parameters(self) -> None:
        """Make frozen parameters of codes and 8-bit scales, so that what cuts a model's parameters cuts them too. The rest
        (tables, a scale for 256 others) is next to nothing and stays a buffer."""
        for name in self.part_names:
            part = getattr(self, name)
            if not part.is_floating_point():
                delattr(self, name)
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        x = autocast_input(x)
        out: Tensor = _product(x, self.parts, str(self.form), self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def set_weight(self, weight_oi: Tensor) -> None:
        """Quantise this weight where the codes are; its full precision is there for that moment alone."""
        for name, value in self.stored(weight_oi).items():
            getattr(self, name).copy_(value)

    @torch.no_grad()
    def stored(self, weight_oi: Tensor) -> Parts:
        """This weight as the parts that stand for it; it is noted as what they were made from."""
        assert weight_oi.shape == (self.out_features, self.in_features), weight_oi.shape
        here = weight_oi.to(self.parts[0].device).float()
        self.source, self.base_source = fingerprint(here), base_fingerprint(here)
        packed = _WAYS[str(self.form)].pack(here)
        return {name: packed[name].view(getattr(self, name).shape) for name in self.part_names}

    def dense_weight(self, dtype: torch.dtype | None = None, see: See = Tensor.detach) -> Tensor:
        """The weight the codes stand for."""
        dims = (self.out_features, self.in_features)
        parts = [see(part) for part in self.parts]
        return _WAYS[str(self.form)].unpack(parts, dims, dtype or torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # The scales of the scales stay in fp32 whatever the model becomes.
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        parts = {name: keep_dtype(self.get_buffer(name)) for name in self.part_names if name in self._buffers}
        for name in parts:
            del self._buffers[name]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(parts)
        return self

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state.pop(f"{prefix}weight", None)
        if weight is None:
            missing: list[str] = rest[2]
            missing.append(f"{prefix}weight")
        else:
            self.set_weight(weight)
        super()._load_from_state_dict(state, prefix, *rest)


def quantise_linears(model: Decoder, form: Form) -> None:
    """Put a layer of codes in the place of every linear layer of the blocks. For a model on meta: the weights come
    afterwards, through `load_state_dict` or `init_weights`, and are quantised one by one."""
    for role, layers in model.linears().items():
        for name, plain in layers if role != "head" else []:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, QuantisedLinear(plain, form))


def stored_values(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights as this model stores them, one at a time: a quantised layer's as its parts."""
    for name, value in values:
        owner, _, own = name.rpartition(".")
        layer = model.get_submodule(owner)
        if own == "weight" and isinstance(layer, QuantisedLinear):
            yield from ((f"{owner}.{part}", tensor) for part, tensor in layer.stored(value).items())
        else:
            yield name, value


def form_of(model: nn.Module) -> Form | None:
    """How the linear layers of this model are stored; None for plain ones."""
    return next((module.form for module in model.modules() if isinstance(module, QuantisedLinear)), None)


def nf4_reference(weight: Tensor) -> Tensor:
    """Round to NF4 and back with nothing but torch, in float64 and without double quantisation: what to compare with."""
    table = torch.tensor(NF4_VALUES, dtype=torch.float64)
    blocks = weight.double().cpu().reshape(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
    nearest = (blocks / largest)[..., None].sub(table).abs().argmin(-1)
    return (table[nearest] * largest).view(weight.shape)
