"""Pure bf16: weights, gradients and optimizer state in bf16.

Half the memory of everything, and no casts. But bf16 has 8 bits of mantissa: an update smaller than about
1/256 of a weight is rounded away, so runs at small learning rates stall, and so does the warm-up of any
run; `rush train` reports before the first step how many weights can move. Stochastic rounding
(`fused_update` with stochastic_rounding) fixes that; without it, prefer `amp_bf16` for pretraining.
"""

from __future__ import annotations

import torch

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import describe_dtypes, matmuls_took, state_per_parameter


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.weight_dtype = torch.bfloat16


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Weights and matmul inputs are bf16, and the optimizer state is 4 bytes per parameter (plain: 8), or what the
    optimizer technique declares."""
    per_parameter = state_per_parameter(seen)
    # Two moments of 2 bytes; an optimizer technique may declare more.
    most = (seen.facts.state_bytes_per_parameter or 4) + 0.5
    took_effect = (
        seen.weight_dtypes == {"bfloat16"} and matmuls_took(seen, "bfloat16") and per_parameter < most
    )
    weights = ", ".join(sorted(seen.weight_dtypes))
    return api.Proof(
        took_effect,
        f"weights are {weights}, {describe_dtypes(seen)}, optimizer state {per_parameter:.1f} bytes per parameter",
    )


technique = api.Technique(
    name="pure_bf16",
    alternative=api.Alternative.PRECISION,
    relative_error=2**-8,
    half_dtype="bfloat16",
    stage=api.Stage.MODEL,
    apply=apply,
    conflicts=("amp_bf16", "amp_fp16", "bf16_master", "fp16_matmul"),
    claim=api.Claim(
        "model state bytes",
        -0.5,
        regime="weights, gradients and both Adam moments at 2 bytes instead of 4",
        source="arithmetic: 8 bytes per parameter instead of 16",
        of_memory=True,
    ),
    parity=api.Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        api.MemoryEffect("parameters", 1.0, "2 bytes each", size=2),
        api.MemoryEffect("gradients", 1.0, "2 bytes each", size=2),
        api.MemoryEffect("optimizer", 1.0, "2 bytes a moment", size=4),
        api.MemoryEffect("stream", 1.0, "2 bytes an element", size=2),
        api.MemoryEffect("compute", 1.0, "2 bytes an element", size=2),
    ),
    settings=(
        api.Setting(together_with={"fused_update": {"stochastic_rounding": True, "state": "bfloat16"}}),
        api.Setting(together_with={"adam8bit": {"backend": "rush", "stochastic_rounding": True}}),
        api.Setting(),
    ),
)
