"""Pure bf16: weights, gradients and optimizer state in bf16.

Half the memory of everything, and no casts. But bf16 has 8 bits of mantissa: an update smaller than about
1/256 of a weight is rounded away, so runs at small learning rates stall, and so does the warm-up of any
run; `rush train` reports before the first step how many weights can move. Stochastic rounding
(`fused_update` with stochastic_rounding) fixes that; without it, prefer `amp_bf16` for pretraining.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rush.recipe import Knob
from rush.techniques.api.contract import (
    Alternative,
    Build,
    Claim,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Setting,
    Stage,
    Technique,
)
from rush.techniques.api.evidence import describe_dtypes, matmuls_took, state_per_parameter


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.weight_dtype = torch.bfloat16


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Weights and matmul inputs are bf16, and the optimizer state is 4 bytes per parameter (plain: 8), or what the
    optimizer technique declares."""
    per_parameter = state_per_parameter(seen)
    # Two moments of 2 bytes; an optimizer technique may declare more.
    most = (seen.facts.state_bytes_per_parameter or 4) + 0.5
    took_effect = (
        seen.weight_dtypes == {"bfloat16"} and matmuls_took(seen, "bfloat16") and per_parameter < most
    )
    weights = ", ".join(sorted(seen.weight_dtypes))
    return Proof(
        took_effect,
        f"weights are {weights}, {describe_dtypes(seen)}, optimizer state {per_parameter:.1f} bytes per parameter",
    )


technique = Technique(
    name="pure_bf16",
    alternative=Alternative.PRECISION,
    relative_error=2**-8,
    half_dtype="bfloat16",
    stage=Stage.MODEL,
    apply=apply,
    conflicts=("amp_bf16", "amp_fp16", "bf16_master", "fp16_matmul"),
    claim=Claim(
        "model state bytes",
        -0.5,
        regime="weights, gradients and both Adam moments at 2 bytes instead of 4",
        source="arithmetic: 8 bytes per parameter instead of 16",
        of_memory=True,
    ),
    parity=Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        MemoryEffect("parameters", 1.0, "2 bytes each", size=2),
        MemoryEffect("gradients", 1.0, "2 bytes each", size=2),
        MemoryEffect("optimizer", 1.0, "2 bytes a moment", size=4),
        MemoryEffect("stream", 1.0, "2 bytes an element", size=2),
        MemoryEffect("compute", 1.0, "2 bytes an element", size=2),
    ),
    settings=(
        Setting(together_with={"fused_update": {"stochastic_rounding": True, "state": "bfloat16"}}),
        Setting(together_with={"adam8bit": {"backend": "rush", "stochastic_rounding": True}}),
        Setting(),
    ),
)
