"""AdamW by our own kernel: all tensors of a group in one launch, and bf16 weights that do not stall.

The plain update is a dozen small operations for each tensor, each a trip to device memory; here every value
is read once and written once, as with `fused_adamw`. The norm that clips the gradients is one launch as well. What it adds is for weights in bf16 (`pure_bf16`), where
an update below 1/256 of a weight is rounded away: with stochastic rounding it moves the weight with a
probability equal to its share of a whole notch, so that small updates add up on average, without an fp32
copy. Moments may be fp32 or, beside bf16 weights, bf16. It wins where updates weigh: small batches, large
models. Beside fp32 weights it computes what `fused_adamw` does and is as fast at best. Rounding by chance is
not close to rounding to nearest step by step, only in what is learned, as `pure_bf16` itself is judged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rush.parallel.sharded import local_tensor
from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Requirement,
    Setting,
    Stage,
    Technique,
    WorkEffect,
    knob_of,
    used,
)
from rush.techniques.api.evidence import state_per_parameter
from rush.techniques.api.seams import needs_triton

OPS, KERNELS = ("rush::adamw", "rush::grad_norm"), ("adamw_kernel", "sum_of_squares_kernel")
BY_CHANCE = "rush::stochastic_rounding"


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    from rush.kernels.adamw import RushAdamW
    from rush.kernels.adamw.table import Divisions
    from rush.kernels.grad_norm import grad_norm

    build.make_optimizer = RushAdamW
    build.optimizer_options.clear()
    build.optimizer_options |= {
        "state_dtype": getattr(torch, str(knobs["state"])),
        "stochastic_rounding": bool(knobs["stochastic_rounding"]),
        "seed": build.recipe.run.seed,
        "local": local_tensor,
    }
    divisions: Divisions = {}
    build.norm_fn = lambda gradients: grad_norm([g.contiguous() for g in gradients], divisions)
    build.facts["state_bytes_per_parameter"] = 4 if knobs["state"] == "bfloat16" else 8


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Our kernels for update and norm ran (on a CPU: their operators), with moments in the dtype asked for and rounding
    by chance marked in the profile if, and only if, it was asked for."""
    wanted, names = (KERNELS, seen.kernels) if seen.kernels else (OPS, seen.ops)
    missing = [part for part in wanted if not any(part in name for name in names)]
    by_chance = BY_CHANCE in seen.ops
    dtypes = ", ".join(sorted(seen.state_bytes)) or "none"
    return Proof(
        not missing and dtypes == knobs["state"] and by_chance == knobs["stochastic_rounding"],
        f"{' and '.join(missing or wanted)} {'did not run' if missing else 'ran'}; moments are {dtypes}, "
        f"{state_per_parameter(seen):.1f} bytes per parameter; weights were rounded "
        f"{'by chance' if by_chance else 'to nearest'}",
    )


technique = Technique(
    name="fused_update",
    stage=Stage.UPDATE,
    apply=apply,
    requires=(
        needs_triton,
        Requirement(
            "stochastic rounding is for weights in bf16, and so are moments in bf16; add pure_bf16, or leave both knobs "
            "at their defaults",
            lambda machine, recipe: (
                used(recipe, "pure_bf16")
                or (
                    not knob_of(recipe, "fused_update", "stochastic_rounding", False)
                    and knob_of(recipe, "fused_update", "state", "float32") == "float32"
                )
            ),
        ),
    ),
    conflicts=("adam8bit", "bf16_master", "fused_adamw"),
    knobs={
        "stochastic_rounding": KnobRange((False, True), "round weights and second moments in bf16 by chance"),
        "state": KnobRange(("float32", "bfloat16"), "the dtype of both moments"),
    },
    claim=Claim(
        "bytes moved by an update",
        -0.65,
        regime="28 bytes a parameter in fp32, against 80 for one operation after another",
        source="arithmetic; stochastic rounding: Zamirai et al. 2020, arXiv:2010.06192",
    ),
    parity=Parity.CLOSE,
    evidence=evidence,
    memory=(
        MemoryEffect(
            "optimizer",
            1.0,
            "4 bytes a moment whatever the weights are, or 2 with state = bfloat16",
            by_knob=lambda knobs: 0.5 if knobs["state"] == "bfloat16" else 1.0,
            size=8,
        ),
        MemoryEffect("update", 0.0, "one kernel"),
    ),
    settings=(
        Setting({"stochastic_rounding": True, "state": "bfloat16"}),
        Setting({"stochastic_rounding": True}),
        Setting(),
    ),
    work=(
        WorkEffect("update.bytes", 8.0),
        WorkEffect("update.reaches", 0.96, "as measured with 8 billion weights"),
        WorkEffect("update.launches", 1.0),
    ),
)
