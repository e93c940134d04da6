"""Fused bias gradients: the kernel that computes a layer's gradient also sums the gradient of its bias.

GPT-2's layers have biases. Forward they are free, in the matmul's epilogue. Backward each needs the sum of
its layer's gradient over all tokens, one more pass over a tensor as wide as the layer: with a compiler,
which does not fuse reductions over columns, a fifth of what a block's backward pass moves between its
matmuls goes to the two widest. Here the kernel of GELU's gradient sums what it writes, and so does the
kernel that concatenates the gradients of queries, keys and values. The matmuls stay the library's. It wins
with `compile` at large batches, where memory bandwidth is the limit. Llama has no biases.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.models.gpt2 import FusedAttention, Split
from rush.models.layers import GeluMLP, GeluTanh, Widen
from rush.techniques.api.seams import needs_triton, rush_kernels_ran

# Shapes: b batch, t position, d input width, o output width.


class BiasSplit(Split):
    """Queries, keys and values, whose gradients are concatenated and summed in one kernel."""

    def __init__(self) -> None:
        from rush.kernels.bias_grad import split_bias_grad

        super().__init__()
        self.parts = split_bias_grad

    def forward(self, x_btd: Tensor, layer: nn.Module) -> tuple[Tensor, ...]:
        return self.parts(*_total_and_bias(x_btd, layer))


class BiasGelu(Widen):
    """A layer and its GELU, whose gradient is computed and summed in one kernel."""

    def __init__(self) -> None:
        from rush.kernels.bias_grad import gelu_bias_grad

        super().__init__()
        self.gelu = gelu_bias_grad

    def forward(self, x_btd: Tensor, layer: nn.Module, activation: nn.Module) -> Tensor:
        assert isinstance(activation, GeluTanh), type(activation)
        return self.gelu(*_total_and_bias(x_btd, layer))


def _total_and_bias(x_btd: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The layer's output with a detached bias, and the bias, whose gradient our kernel computes."""
    assert isinstance(layer, nn.Linear)
    own = getattr(layer, "matmul_with", None)  # fp8, for example; without bias
    if own is None:
        return F.linear(x_btd, layer.weight, layer.bias.detach()), layer.bias
    out: Tensor = own(x_btd, layer.weight)
    return out + layer.bias.detach().to(out.dtype), layer.bias


def apply(build: api.Build, knobs: api.Knobs) -> None:
    for block in build.model.blocks:
        assert isinstance(block.attention, FusedAttention), type(block.attention)
        assert isinstance(block.mlp, GeluMLP), type(block.mlp)
        block.attention.split = BiasSplit()
        block.mlp.widen = BiasGelu()


technique = api.Technique(
    name="fused_bias",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        api.Requirement(
            "it needs a model whose layers all have biases, and an MLP without a gate (GPT-2); Llama's have none",
            lambda machine, recipe: recipe.shape().all_biases and not recipe.shape().gated_mlp,
        ),
        api.Requirement(
            "it needs trained biases; with adapters they are frozen, so remove it",
            lambda machine, recipe: not api.used(recipe, "lora", "qlora", "int8_base"),
        ),
    ),
    # tp shards the layers whose full outputs are needed here.
    conflicts=("fused_mlp", "tp"),
    claim=api.Claim(
        "bytes moved between the matmuls of a block's backward pass",
        -0.19,
        regime="GPT-2 124M, compiled by blocks: 57 kB per token become 46",
        source="arithmetic over the kernels that torch.compile generates",
    ),
    parity=api.Parity.CLOSE,
    evidence=rush_kernels_ran(
        kernels=("gelu_bias_grad_backward_kernel", "concat_bias_grad_kernel"),
        ops=("rush::gelu_bias_grad_backward", "rush::concat_bias_grad"),
    ),
    memory=(api.MemoryEffect("mlp.opaque", 1.0, "with fp8: a cast of GELU's output is saved"),),
    work=(
        api.WorkEffect("bias_grad.fused", 0.78, "queries, keys, values and the wide layer: 7 of 9 widths"),
    ),
)
