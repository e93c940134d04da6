"""Frozen linear layers of one input with their adapters, as one operator that adds the low-rank update in place.

Out of place, adding a low-rank update to a layer's output copies that output, and the input's gradient gets a second
tensor of its size, added afterwards: passes over the widest activations. Here the low-rank matmul is written first and
the frozen matmul accumulates into it, which hides the read.

    forward     down = x Aᵀ;  out_l = s_l down_l B_lᵀ;  out_l += x W_lᵀ
    backward    d_down_l = s_l d_out_l B_l;  dx = d_down A;  dx += Σ d_out_l W_l
                dA = d_downᵀ x;  dB_l = s_l d_out_lᵀ down_l

torch.compile would functionalize in-place operators and copy again, so this is one custom operator, except for the
low-rank matmul with A, whose gradient is computed here nevertheless. Saved activations: the input, once for all layers,
and `rank` values per token and layer. There are two operators: for dense weights, and for quantized weights that are
dequantized for each matmul.

Shapes: n tokens, i inputs, o outputs of a layer, r ranks of all layers concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rush.models.quantized_formats import dequantize

PLAIN = ""


@dataclass(frozen=True)
class Frozen:
    """The frozen tensors of layers with one input: stored weights (`dequantizer` is PLAIN for dense matrices), all in the
    same form, and all or none with a bias."""

    dequantizer: str
    weights: Sequence[Sequence[Tensor]]
    biases: Sequence[Tensor]


def adapted_linears(
    x: Tensor, frozen: Frozen, a_ri: Tensor, bs: Sequence[Tensor], scales: Sequence[float]
) -> Sequence[Tensor]:
    """The output of each layer, adapter included."""
    operator = _plain if frozen.dequantizer == PLAIN else _quantized
    flat = [part for parts in frozen.weights for part in parts]
    # Separate from the wide matmuls: of a recomputed last layer the backward pass needs only this.
    down_nr = x.detach().flatten(0, -2) @ a_ri.detach().t()
    outs: list[Tensor] = operator(
        x, down_nr, a_ri, list(bs), list(scales), flat, list(frozen.biases), frozen.dequantizer
    )
    return outs


def _weight(
    dequantizer: str, weights: Sequence[Tensor], a_ri: Tensor, bs: Sequence[Tensor], layer: int
) -> Tensor:
    """The matrix of one layer. Callers do not name it, so that a dequantized one is freed after its matmul."""
    if dequantizer == PLAIN:
        return weights[layer]
    count = len(weights) // len(bs)
    parts = weights[layer * count : (layer + 1) * count]
    return dequantize(dequantizer, parts, (bs[layer].shape[0], a_ri.shape[1]), a_ri.dtype)


def _columns(of_all_nr: Tensor, bs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each layer's own columns."""
    return torch.split(of_all_nr, [b_or.shape[1] for b_or in bs], dim=1)


def _scaled_mm(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """beta=0 overwrites, and alpha applies the scale without a pass of its own."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)


def _forward(
    x: Tensor, down_nr: Tensor, a_ri: Tensor, bs: list[Tensor], scales: list[float], weights: list[Tensor],
    biases: list[Tensor], dequantizer: str,
) -> list[Tensor]:  # fmt: skip
    x_ni = x.flatten(0, -2)
    outs = []
    for layer, (b_or, scale, own_nr) in enumerate(zip(bs, scales, _columns(down_nr, bs), strict=True)):
        if biases:
            out_no = torch.addmm(biases[layer], own_nr, b_or.t(), alpha=scale)
        else:
            out_no = _scaled_mm(own_nr, b_or.t(), scale)
        out_no.addmm_(x_ni, _weight(dequantizer, weights, a_ri, bs, layer).t())
        outs.append(out_no.view(*x.shape[:-1], b_or.shape[0]))
    return outs


def _forward_shapes(
    x: Tensor, down_nr: Tensor, a_ri: Tensor, bs: list[Tensor], scales: list[float], weights: list[Tensor],
    biases: list[Tensor], dequantizer: str,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty((*x.shape[:-1], b_or.shape[0])) for b_or in bs]


def _backward(
    d_outs: list[Tensor], x: Tensor, down_nr: Tensor, a_ri: Tensor, bs: list[Tensor], scales: list[float],
    weights: list[Tensor], dequantizer: str, with_input: bool,
) -> list[Tensor]:  # fmt: skip
    d_flat = [d_out.reshape(-1, d_out.shape[-1]) for d_out in d_outs]
    d_down_nr = torch.empty_like(down_nr)
    for d_no, b_or, scale, d_own_nr in zip(d_flat, bs, scales, _columns(d_down_nr, bs), strict=True):
        d_own_nr.addmm_(d_no, b_or, beta=0, alpha=scale)
    d_bs = [
        _scaled_mm(d_no.t(), own_nr, scale)
        for d_no, own_nr, scale in zip(d_flat, _columns(down_nr, bs), scales, strict=True)
    ]
    gradients = [d_down_nr.t() @ x.flatten(0, -2), *d_bs]
    if with_input:
        dx_ni = d_down_nr @ a_ri
        for layer, d_no in enumerate(d_flat):
            dx_ni.addmm_(d_no, _weight(dequantizer, weights, a_ri, bs, layer))
        gradients.append(dx_ni.view(x.shape))
    return gradients


def _backward_shapes(
    d_outs: list[Tensor], x: Tensor, down_nr: Tensor, a_ri: Tensor, bs: list[Tensor], scales: list[float],
    weights: list[Tensor], dequantizer: str, with_input: bool,
) -> list[Tensor]:  # fmt: skip
    likes = [a_ri, *bs, *([x] if with_input else [])]
    return [like.new_empty(like.shape) for like in likes]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, down_nr, a_ri, bs, ctx.scales, weights, biases, ctx.dequantizer = inputs
    ctx.num_layers, ctx.num_biases = len(bs), len(biases)
    # Weights are stored anyway; no output and no dequantized weight is saved.
    ctx.save_for_backward(x, down_nr, a_ri, *bs, *weights)


def _define(name: str) -> Any:
    """Define the operator, forward and backward, under this name."""
    forward = torch.library.custom_op(f"rush::{name}", _forward, mutates_args=())
    backward = torch.library.custom_op(f"rush::{name}_backward", _backward, mutates_args=())
    forward.register_fake(_forward_shapes)
    backward.register_fake(_backward_shapes)

    def gradient(ctx: Any, d_outs: list[Tensor]) -> tuple[Any, ...]:
        x, down_nr, a_ri, *rest = ctx.saved_tensors
        bs, weights = rest[: ctx.num_layers], rest[ctx.num_layers :]
        asked = bool(ctx.needs_input_grad[0])
        d_a, *d_rest = backward(d_outs, x, down_nr, a_ri, bs, ctx.scales, weights, ctx.dequantizer, asked)
        d_bs, d_x = d_rest[: ctx.num_layers], d_rest[-1] if asked else None
        return d_x, None, d_a, d_bs, None, [None] * len(weights), [None] * ctx.num_biases, None

    forward.register_autograd(gradient, setup_context=_setup_context)
    return forward


_plain, _quantized = _define("adapted_linears"), _define("adapted_quantized_linears")

OPERATORS = (torch.ops.rush.adapted_linears.default, torch.ops.rush.adapted_quantized_linears.default)
"""As a dispatch mode sees them: for selective checkpointing of matmuls."""
NAMES = frozenset(
    f"rush::{name}{way}"
    for name in ("adapted_linears", "adapted_quantized_linears")
    for way in ("", "_backward")
)
"""Their names in a profile, forward and backward."""
