"""Fused bias gradients: a bias's gradient is summed by the kernel that makes its layer's gradient.

GPT-2's layers have biases. Forward they cost nothing, a matmul adds them on its way out. Backward each asks for the sum of
its layer's gradient over all tokens, and that is one more trip over a tensor as wide as the layer: with a compiler, whose
fusions cannot turn from rows to columns, a fifth of what a block's backward pass moves between its matmuls goes to
the two widest. Here the kernel of GELU's gradient sums what it writes, and so does the kernel that lays the gradients of
queries, keys and values side by side, which is a trip that has to be made anyway. The matmuls stay the library's.
It wins beside `compile` at large batches, where memory decides. Llama has no biases, so it has nothing to gain.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from rush.models.gpt2 import FusedAttention, Split
from rush.models.layers import GeluMLP, GeluTanh, Widen
from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    MemoryEffect,
    Parity,
    Requirement,
    Stage,
    Technique,
    WorkEffect,
    used,
)
from rush.techniques.api.seams import needs_triton, rush_kernels_ran

# Shapes: b batch, t position, d input width, o output width.


class BiasSplit(Split):
    """Queries, keys and values, whose gradients are joined and summed in one kernel."""

    def __init__(self) -> None:
        from rush.kernels.bias_grad import split_bias_grad

        super().__init__()
        self.parts = split_bias_grad

    def forward(self, x_btd: Tensor, layer: nn.Module) -> tuple[Tensor, ...]:
        return self.parts(*_total_and_bias(x_btd, layer))


class BiasGelu(Widen):
    """A layer and its GELU, whose gradient is made and summed in one kernel."""

    def __init__(self) -> None:
        from rush.kernels.bias_grad import gelu_bias_grad

        super().__init__()
        self.gelu = gelu_bias_grad

    def forward(self, x_btd: Tensor, layer: nn.Module, activation: nn.Module) -> Tensor:
        assert isinstance(activation, GeluTanh), type(activation)
        return self.gelu(*_total_and_bias(x_btd, layer))


def _total_and_bias(x_btd: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The layer's output, which asks nothing of the bias, and the bias, whose gradient comes from elsewhere."""
    assert isinstance(layer, nn.Linear)
    own = getattr(layer, "multiply", None)  # 8-bit factors, say; such a product adds no bias by itself
    if own is None:
        return F.linear(x_btd, layer.weight, layer.bias.detach()), layer.bias
    product: Tensor = own(x_btd, layer.weight)
    return product + layer.bias.detach().to(product.dtype), layer.bias


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    for block in build.model.blocks:
        assert isinstance(block.attention, FusedAttention), type(block.attention)
        assert isinstance(block.mlp, GeluMLP), type(block.mlp)
        block.attention.split = BiasSplit()
        block.mlp.widen = BiasGelu()


technique = Technique(
    name="fused_bias",
    stage=Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        Requirement(
            "it needs a model whose layers have biases (GPT-2); Llama's have none",
            lambda machine, recipe: recipe.shape().family == "gpt2",
        ),
        Requirement(
            "it needs biases that are trained; with adapters they are frozen, so leave it out there",
            lambda machine, recipe: not used(recipe, "lora", "qlora", "int8_base"),
        ),
    ),
    # tp cuts the layers whose outputs are taken whole here.
    conflicts=("fused_mlp", "tp"),
    claim=Claim(
        "bytes moved between the matmuls of a block's backward pass",
        -0.19,
        regime="GPT-2 124M, compiled by blocks: 57 kB a token become 46",
        source="arithmetic over the kernels that torch's compiler makes",
    ),
    parity=Parity.CLOSE,
    evidence=rush_kernels_ran(
        kernels=("gelu_bias_grad_backward_kernel", "concat_bias_grad_kernel"),
        ops=("rush::gelu_bias_grad_backward", "rush::concat_bias_grad"),
    ),
    memory=(MemoryEffect("mlp.opaque", 1.0, "beside fp8: a cast of what GELU writes is kept"),),
    work=(
        WorkEffect("sums.fused", 0.78, "of queries, keys and values and of the wide layer: 7 of 9 widths"),
    ),
)
