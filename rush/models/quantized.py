"""Quantized frozen weights: dequantized for each matmul, and freed again.

The backward pass dequantizes a weight again; nothing dequantized is saved. Forward and backward are one operator each,
because torch.compile would otherwise dequantize once and save the result: the whole model in full precision. With an
adapter both are part of `rush.models.adapted_linears`.

Shapes: i inputs, o outputs; quantized weights are flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.models.adapters import Gather, autocast_input
from rush.models.decoder import Decoder
from rush.models.fingerprints import base_fingerprint, fingerprint
from rush.models.quantized_formats import Form, Parts, dequantize, quantize, stored_parts


@torch.library.custom_op("rush::quantized_linear", mutates_args=())
def _quantized_linear(x: Tensor, parts: list[Tensor], dequantizer: str, out_features: int) -> Tensor:
    weight_oi = dequantize(dequantizer, parts, (out_features, x.shape[-1]), x.dtype)
    return F.linear(x, weight_oi)


@_quantized_linear.register_fake
def _(x: Tensor, parts: list[Tensor], dequantizer: str, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("rush::quantized_linear_backward", mutates_args=())
def _input_gradient(d_out: Tensor, parts: list[Tensor], dequantizer: str, in_features: int) -> Tensor:
    weight_oi = dequantize(dequantizer, parts, (d_out.shape[-1], in_features), d_out.dtype)
    return d_out @ weight_oi


@_input_gradient.register_fake
def _(d_out: Tensor, parts: list[Tensor], dequantizer: str, in_features: int) -> Tensor:
    return d_out.new_empty((*d_out.shape[:-1], in_features))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, parts, ctx.dequantizer, _ = inputs
    ctx.in_features = x.shape[-1]
    # The quantized weight is stored anyway; neither the input nor the dequantized weight is saved.
    ctx.save_for_backward(*parts)


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    return (
        _input_gradient(d_out.contiguous(), parts, ctx.dequantizer, ctx.in_features),
        [None] * len(parts),
        None,
        None,
    )


_quantized_linear.register_autograd(_gradient, setup_context=_setup_context)


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized, frozen weight. Loading quantizes full-precision weights, one layer at a time."""

    def __init__(self, plain: nn.Linear, form: Form) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.form = form
        self.dequantizer = str(form)
        """Which dequantizer matmuls use: the form's library, or a registered one (`register_dequantizer`)."""
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
        """Register quantized weights and 8-bit scales as frozen parameters, so that FSDP shards them. Tables and second-level
        scales are small and stay buffers."""
        for name in self.part_names:
            part = getattr(self, name)
            if not part.is_floating_point():
                delattr(self, name)
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        x = autocast_input(x)
        out: Tensor = _quantized_linear(x, self.parts, self.dequantizer, self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def set_weight(self, weight_oi: Tensor) -> None:
        """Quantize this weight on the device of the quantized one."""
        for name, value in self.stored(weight_oi).items():
            getattr(self, name).copy_(value)

    @torch.no_grad()
    def stored(self, weight_oi: Tensor) -> Parts:
        """The quantized parts of this weight; its fingerprints are recorded."""
        assert weight_oi.shape == (self.out_features, self.in_features), weight_oi.shape
        here = weight_oi.to(self.parts[0].device).float()
        self.source, self.base_source = fingerprint(here), base_fingerprint(here)
        packed = quantize(self.form, here)
        return {name: packed[name].view(getattr(self, name).shape) for name in self.part_names}

    def dense_weight(self, dtype: torch.dtype | None = None, gather: Gather = Tensor.detach) -> Tensor:
        """The dequantized weight."""
        dims = (self.out_features, self.in_features)
        parts = [gather(part) for part in self.parts]
        # By the library, which runs on any device.
        return dequantize(str(self.form), parts, dims, dtype or torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # Scales stay in fp32 when the model is cast.
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


def quantize_linears(model: Decoder, form: Form) -> None:
    """Replace every linear layer of the blocks by a quantized one. For a model on meta: the weights come afterwards,
    through `load_state_dict` or `init_weights`, and are quantized one by one."""
    for role, layers in model.linears().items():
        for name, plain in layers if role != "head" else []:
            model.set_submodule(name, QuantizedLinear(plain, form))


def stored_values(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights as this model stores them: those of quantized layers as their parts."""
    for name, value in values:
        owner, _, own = name.rpartition(".")
        layer = model.get_submodule(owner)
        if own == "weight" and isinstance(layer, QuantizedLinear):
            yield from ((f"{owner}.{part}", tensor) for part, tensor in layer.stored(value).items())
        else:
            yield name, value


def form_of(model: nn.Module) -> Form | None:
    """The format of this model's quantized layers; None without any."""
    return next((module.form for module in model.modules() if isinstance(module, QuantizedLinear)), None)
