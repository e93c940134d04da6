"""cuDNN's attention: the same tiled algorithm as FlashAttention, another kernel.

cuDNN generates its kernel for the card at hand; on Hopper it uses the asynchronous units that
FlashAttention 2 does not know. It wins there at long sequences, and costs a plan to be built for each
new shape. torch's dispatcher may fall back to another backend without a word, so this calls the cuDNN
operator itself: it runs or it fails.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rush.recipe import Knob
from rush.techniques.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Parity,
    Requirement,
    Setting,
    Stage,
    Technique,
    WorkEffect,
    half_precision,
    used,
)
from rush.techniques.evidence import attention_ran
from rush.techniques.seams import repeat_heads, set_attention_core, to_autocast_dtype

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim.


class CudnnCore(nn.Module):
    """The attention core through torch's cuDNN operator."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        """Whether the kernel finds the key/value head of each query head by itself."""

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents: Tensor | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        assert documents is None, "packed documents need variable-length attention"
        assert query_offset == 0, "decoding with a cache uses the plain core"
        q_bhtd, k_bktd, v_bktd = to_autocast_dtype(q_bhtd, k_bktd, v_bktd)
        k_bhtd, v_bhtd = (k_bktd, v_bktd) if self.grouped else repeat_heads(q_bhtd, k_bktd, v_bktd)
        # The backward pass needs the sums of exponentials, so they are asked for.
        out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_bhtd, k_bhtd, v_bhtd, None, True, 0.0, True
        )[0]
        return out


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    grouped = knobs["heads"] == "grouped"
    set_attention_core(build.model, lambda: CudnnCore(grouped))


technique = Technique(
    name="cudnn_attention",
    stage=Stage.MODEL,
    apply=apply,
    requires=(
        Requirement(
            "it needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer",
            lambda machine, recipe: (
                machine.device == "cuda" and machine.hip is None and (machine.capability or (0, 0)) >= (8, 0)
            ),
        ),
        half_precision,
        Requirement(
            "torch does not offer cuDNN's kernel for documents packed into one row (pack_best_fit, flatten); use "
            "flash_attention, triton_attention or flex_attention with them",
            lambda machine, recipe: not used(recipe, "flatten", "pack_best_fit"),
        ),
    ),
    conflicts=("cpu_attention", "flash_attention", "flex_attention", "triton_attention"),
    knobs={
        "heads": KnobRange(
            ("repeated", "grouped"),
            "keys and values of a group copied for each of its query heads, or read by them all where they are",
        )
    },
    claim=Claim(
        "attention rate",
        0.75,
        regime="up to, on an H100, over FlashAttention 2",
        source="PyTorch 2.5 release notes, October 2024",
    ),
    parity=Parity.CLOSE,
    evidence=attention_ran(kernels=("cudnn",), ops=("scaled_dot_product_cudnn_attention",)),
    memory=(
        MemoryEffect("scores", 0.0, "only one number per query and head is kept"),
        MemoryEffect(
            "attention.output",
            1.0,
            "the kernel keeps its result, which the next layer reads as it is, and a number per head",
        ),
        MemoryEffect(
            "heads.repeated",
            1.0,
            "unless heads = grouped",
            by_knob=lambda knobs: float(knobs["heads"] == "repeated"),
        ),
    ),
    worth=(Setting(), Setting({"heads": "grouped"})),
    work=(WorkEffect("attention", 0.38, "as measured on an H200"),),
)
