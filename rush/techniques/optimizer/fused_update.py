"""AdamW by our own kernel: all tensors of a group in one launch, with stochastic rounding of bf16 weights.

As with `fused_adamw` every value is read once and written once; the global gradient norm is one launch as
well. What it adds is for bf16 weights (`pure_bf16`), where an update below 1/256 of a weight is rounded away:
with stochastic rounding the weight moves to the next bf16 number with a probability proportional to the
update, so that small updates accumulate on average, without fp32 master weights. Moments may be fp32 or,
with bf16 weights, bf16. It wins where updates are a large part of a step: small batches, large models. With
fp32 weights it computes what `fused_adamw` does and is as fast at best. Stochastic rounding is not close to
round-to-nearest step by step, only in the loss curve, which is how `pure_bf16` itself is judged.
"""

from __future__ import annotations

import torch

import rush.techniques.api.contract as api
from rush.parallel.sharded import local_tensor
from rush.techniques.api.evidence import state_per_parameter
from rush.techniques.api.seams import needs_triton

OPS, KERNELS = ("rush::adamw", "rush::grad_norm"), ("adamw_kernel", "sum_of_squares_kernel")
STOCHASTIC = "rush::stochastic_rounding"


def apply(build: api.Build, knobs: api.Knobs) -> None:
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
    build.facts.state_bytes_per_parameter = 4 if knobs["state"] == "bfloat16" else 8


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Our kernels of update and gradient norm ran (on a CPU: their operators), moments have the dtype asked for, and
    the profile shows stochastic rounding if, and only if, it was asked for."""
    wanted, names = (KERNELS, seen.kernels) if seen.kernels else (OPS, seen.ops)
    missing = [part for part in wanted if not any(part in name for name in names)]
    stochastic = STOCHASTIC in seen.ops
    dtypes = ", ".join(sorted(seen.state_bytes)) or "none"
    return api.Proof(
        not missing and dtypes == knobs["state"] and stochastic == knobs["stochastic_rounding"],
        f"{' and '.join(missing or wanted)} {'did not run' if missing else 'ran'}; moments are {dtypes}, "
        f"{state_per_parameter(seen):.1f} bytes per parameter; weights were rounded "
        f"{'stochastically' if stochastic else 'to nearest'}",
    )


technique = api.Technique(
    name="fused_update",
    stage=api.Stage.UPDATE,
    apply=apply,
    requires=(
        needs_triton,
        api.Requirement(
            "stochastic rounding and bf16 moments are for bf16 weights; add pure_bf16, or leave both knobs "
            "at their defaults",
            lambda machine, recipe: (
                api.used(recipe, "pure_bf16")
                or (
                    not api.knob_of(recipe, "fused_update", "stochastic_rounding", False)
                    and api.knob_of(recipe, "fused_update", "state", "float32") == "float32"
                )
            ),
        ),
    ),
    conflicts=("adam8bit", "bf16_master", "fused_adamw"),
    knobs={
        "stochastic_rounding": api.KnobRange(
            (False, True), "stochastic rounding of bf16 weights and second moments", evidence
        ),
        "state": api.KnobRange(("float32", "bfloat16"), "the dtype of both moments", evidence),
    },
    claim=api.Claim(
        "bytes moved by an update",
        -0.65,
        regime="28 bytes per parameter in fp32, against 80 unfused",
        source="arithmetic; stochastic rounding: Zamirai et al. 2020, arXiv:2010.06192",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "optimizer",
            1.0,
            "4 bytes per moment whatever the weights' dtype, or 2 with state = bfloat16",
            by_knob=lambda knobs: 0.5 if knobs["state"] == "bfloat16" else 1.0,
            size=8,
        ),
        api.MemoryEffect("update", 0.0, "one kernel"),
    ),
    settings=(
        api.Setting({"stochastic_rounding": True, "state": "bfloat16"}),
        api.Setting({"stochastic_rounding": True}),
        api.Setting(),
    ),
    work=(
        api.WorkEffect("update.bytes", 8.0),
        api.WorkEffect("update.efficiency", 0.96, "measured with 8 billion weights"),
        api.WorkEffect("update.launches", 1.0),
    ),
)
