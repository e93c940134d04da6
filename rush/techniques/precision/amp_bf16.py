"""Mixed precision in bf16: fp32 weights, bf16 matmuls.

Autocast runs every matmul of the forward and backward pass in bf16, at the full rate of the tensor cores,
and halves the bytes of activations. Weights, gradients, optimizer state, norms and the loss stay fp32.
bf16 has the range of fp32, so no loss scaling is needed. The cost is a cast of every weight in every pass,
which shows at small batches; `pure_bf16` has no such casts.
"""

from __future__ import annotations

import torch

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import matmuls_in


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.autocast_dtype = torch.bfloat16


technique = api.Technique(
    name="amp_bf16",
    alternative=api.Alternative.PRECISION,
    relative_error=2**-8,
    half_dtype="bfloat16",
    stage=api.Stage.MODEL,
    apply=apply,
    conflicts=("amp_fp16", "bf16_master", "fp16_matmul", "pure_bf16"),
    claim=api.Claim(
        "tokens_per_s",
        2.5,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, from plain fp32 (×3.5)",
        source="a widely read hand-made ladder; see docs/sources.md",
        relative_to="plain fp32",
    ),
    parity=api.Parity.CLOSE,
    evidence=matmuls_in("bfloat16", weights="float32"),
    memory=(
        api.MemoryEffect("compute", 1.0, "2 bytes an element", size=2),
        api.MemoryEffect("casts", 1.0, "2 bytes for each weight of a matmul", size=2),
    ),
)
