"""Fused RoPE: queries and keys are rotated in place by one kernel.

Plain, the rotation of a pair of numbers (four multiplications) becomes an fp32 copy, a negation, two
concatenations, two multiplications, a sum and a cast, each a pass over all queries and keys. The kernel reads every
query and key once, writes it once, and saves only the angles for the backward pass, which is the same kernel
with the inverse rotation. It wins eager; a compiler fuses the plain rotation as well, so with `compile`
expect little.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.techniques.api.seams import FunctionModule, needs_triton, rush_kernels_ran


class PartialRotate(nn.Module):
    """Rotates the first elements of each head, as many as there are angles, by a kernel for whole heads."""

    def __init__(self, rotate: nn.Module) -> None:
        super().__init__()
        self.rotate = rotate

    def forward(
        self, q_bhtd: Tensor, k_bktd: Tensor, cos_btr: Tensor, sin_btr: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = cos_btr.shape[-1]
        rotated = self.rotate(q_bhtd[..., :width], k_bktd[..., :width], cos_btr, sin_btr)
        q, k = (
            # Keep the memory layout: the heads of a position are adjacent.
            torch.cat((part.transpose(1, 2), x[..., width:].transpose(1, 2)), dim=-1).transpose(1, 2)
            for part, x in zip(rotated, (q_bhtd, k_bktd), strict=True)
        )
        return q, k


def apply(build: api.Build, knobs: api.Knobs) -> None:
    from rush.kernels.rope import rope

    for block in build.model.blocks:
        whole = FunctionModule(rope)
        partial = build.model.shape.rotary_dim is not None
        block.get_submodule("attention").rotate = PartialRotate(whole) if partial else whole


technique = api.Technique(
    name="fused_rope",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        api.Requirement(
            "it needs a model with RoPE (Llama); GPT-2 has learned position embeddings",
            lambda machine, recipe: recipe.shape().has_rope,
        ),
    ),
    conflicts=("liger",),
    claim=api.Claim(
        "bytes moved by RoPE",
        -0.93,
        regime="forward, eager, bf16: 60 bytes per element become 4",
        source="arithmetic over the operators of plain RoPE",
    ),
    parity=api.Parity.CLOSE,
    evidence=rush_kernels_ran(kernels=("rope_kernel",), ops=("rush::rope", "rush::rope_backward")),
    memory=(
        api.MemoryEffect("queries", 1.0, "unchanged: rotation saves nothing, fp32 copies are temporary"),
    ),
    work=(api.WorkEffect("rope.fused", 1.0),),
)
