"""AdamW over lists of tensors: one launch updates many parameters at once.

The plain update launches a dozen elementwise kernels for every tensor, and a small model spends longer on launching
them than on computing. torch's `foreach` update runs each of these operations over all tensors in a few launches. It
wins where tensors are many and small. It loses to `fused_adamw`, which also reads and writes every value only once.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import ran


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.optimizer_options["foreach"] = True


technique = api.Technique(
    name="foreach_adamw",
    stage=api.Stage.UPDATE,
    apply=apply,
    conflicts=("adam8bit", "fused_adamw", "fused_update"),
    reasons={"fused_adamw": "both replace the plain update; fused_adamw moves fewer bytes"},
    claim=api.Claim(
        "launches of an update",
        -0.9,
        regime="a dozen per tensor, against a dozen per list of tensors",
        source="https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
    ),
    parity=api.Parity.CLOSE,
    evidence=ran("_foreach_addcdiv_"),
    memory=(api.MemoryEffect("update", 1.0, "intermediate results of all tensors at once"),),
    work=(api.WorkEffect("update.launches", 1.0),),
)
