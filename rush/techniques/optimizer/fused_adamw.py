"""Fused AdamW: one kernel updates all parameters.

The plain update is a dozen small elementwise kernels per tensor, each reading and writing device memory; a
1B model has about 150 tensors. Fused, every value is read once and written once. It wins when steps are
short (small batch, many tensors) and hardly shows when a long step or accumulation amortizes the update.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import ran


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.optimizer_options.pop("foreach", None)
    build.optimizer_options["fused"] = True


technique = api.Technique(
    name="fused_adamw",
    stage=api.Stage.UPDATE,
    apply=apply,
    conflicts=("adam8bit", "fused_update"),
    claim=api.Claim(
        "tokens_per_s",
        0.10,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, after FlashAttention",
        source="a widely read hand-made ladder; see docs/sources.md",
    ),
    parity=api.Parity.CLOSE,
    evidence=ran("fused_adam"),
    memory=(api.MemoryEffect("update", 0.0, "one kernel"),),
    work=(api.WorkEffect("update.bytes", 8.0), api.WorkEffect("update.launches", 1.0)),
)
