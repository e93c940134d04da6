"""Mixed precision in bf16: fp32 weights, bf16 matmuls.

Autocast runs every matmul of the forward and backward pass in bf16, at the full rate of the tensor cores,
and halves the bytes of activations. Weights, gradients, optimizer state, norms and the loss stay fp32.
bf16 has the range of fp32, so no loss scaling is needed. The cost is a cast of every weight in every pass,
which shows at small batches; `pure_bf16` has no such casts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rush.recipe import Knob
from rush.techniques.api.contract import Alternative, Build, Claim, MemoryEffect, Parity, Stage, Technique
from rush.techniques.api.evidence import matmuls_in


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.autocast_dtype = torch.bfloat16


technique = Technique(
    name="amp_bf16",
    alternative=Alternative.PRECISION,
    relative_error=2**-8,
    half_dtype="bfloat16",
    stage=Stage.MODEL,
    apply=apply,
    conflicts=("amp_fp16", "bf16_master", "fp16_matmul", "pure_bf16"),
    claim=Claim(
        "tokens_per_s",
        2.5,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, from plain fp32 (×3.5)",
        source="a widely read hand-made ladder; see docs/sources.md",
    ),
    parity=Parity.CLOSE,
    evidence=matmuls_in("bfloat16", weights="float32"),
    memory=(
        MemoryEffect("compute", 1.0, "2 bytes an element", size=2),
        MemoryEffect("casts", 1.0, "2 bytes for each weight of a matmul", size=2),
    ),
)
