"""torch.compile: trace the model once, run generated kernels.

Eager PyTorch launches a kernel per operation, and each elementwise one reads and writes all its data
in device memory. The compiler fuses chains of them into one kernel and takes Python out of the step.
It wins where elementwise work and launches weigh; it leaves large matmuls as they are. The price is
the first step, seconds to minutes, and another such wait whenever a shape changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from rush.recipe import Knob
from rush.techniques.contract import Build, Claim, KnobRange, Observation, Parity, Proof, Stage, Technique


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    mode = None if knobs["mode"] == "default" else knobs["mode"]
    targets = [build.model] if knobs["scope"] == "model" else list(build.model.blocks)
    for target in targets:
        # In place: the module and the names of its weights stay what they were.
        target.compile(mode=mode, dynamic=False)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    story = f"{seen.graphs} graphs, {seen.graph_breaks} breaks, {seen.recompiles} recompiles"
    return Proof(seen.graphs > 0, story)


technique = Technique(
    name="compile",
    stage=Stage.COMPILE,
    apply=apply,
    knobs={
        "scope": KnobRange(
            ("model", "block"), "one graph for the model, or one for each block (quicker to build)"
        ),
        "mode": KnobRange(
            ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            "how much time the compiler may spend",
        ),
    },
    claim=Claim(
        "tokens_per_s",
        0.20,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, after fused AdamW",
        source="a widely read hand-made ladder; see docs/sources.md",
    ),
    parity=Parity.CLOSE,
    evidence=evidence,
)
