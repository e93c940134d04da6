"""Fused RoPE: queries and keys are rotated in place by one kernel.

Plain, the rotation of a pair of numbers (four multiplications) becomes an fp32 copy, a negation, two
concatenations, two multiplications, a sum and a cast, each a pass over all queries and keys. The kernel reads every
query and key once, writes it once, and saves only the angles for the backward pass, which is the same kernel
with the inverse rotation. It wins eager; a compiler fuses the plain rotation as well, so with `compile`
expect little.
"""

from __future__ import annotations

from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.techniques.api.seams import needs_triton, rush_kernels_ran

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim.


class FusedRotate(nn.Module):
    """RoPE by our kernel."""

    def __init__(self) -> None:
        from rush.kernels.rope import rope

        super().__init__()
        self.rope = rope

    def forward(
        self, q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.rope(q_bhtd, k_bktd, cos_btd, sin_btd)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    for block in build.model.blocks:
        block.get_submodule("attention").rotate = FusedRotate()


technique = api.Technique(
    name="fused_rope",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        api.Requirement(
            "it needs a model with RoPE (Llama); GPT-2 has learned position embeddings",
            lambda machine, recipe: recipe.shape().rope_theta is not None,
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
