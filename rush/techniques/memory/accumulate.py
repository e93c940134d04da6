"""Gradient accumulation: split each micro batch into smaller ones and add up their gradients.

The activations of a pass grow with its batch; the gradients do not. A micro batch split into two passes
needs half the activation memory and gives the same gradient, because every pass scales its summed loss by
the number of labels of the whole step. Smaller matmuls use the device less well, so it costs some speed;
what it buys is a batch that would not fit otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

import rush.techniques.api.contract as api
from rush.data import Batch


def apply(build: api.Build, knobs: api.Knobs) -> None:
    factor = int(knobs["factor"])
    last_batch = True

    def told(last: bool) -> None:
        nonlocal last_batch
        last_batch = last

    def split(inner: api.Pass) -> api.Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            last, parts, losses = last_batch, batch.split(factor), []
            for part in parts:
                for hook in build.before_pass:  # what is sent once per step is sent with the last part
                    hook(last and part is parts[-1])
                losses.append(inner(part, loss_scale))
            return torch.stack(losses).sum()

        return passes

    build.pass_wrappers.append(split)
    build.before_pass.append(told)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """A step has `factor` times as many passes as micro batches from the loader."""
    given, made = seen.loader_micro_batches, seen.micro_batches
    return api.Proof(
        made == int(knobs["factor"]) * given,
        f"{made} passes in a step for {given} micro batches; {seen.held_bytes / 2**20:.1f} MiB of saved "
        "activations",
    )


technique = api.Technique(
    name="accumulate",
    stage=api.Stage.STEP,
    apply=apply,
    after=("cuda_graph",),
    requires=(
        api.Requirement(
            "it needs batch.micro to be a multiple of its factor",
            lambda machine, recipe: recipe.micro % int(api.knob_of(recipe, "accumulate", "factor", 2)) == 0,
        ),
    ),
    knobs={"factor": api.KnobRange((2, 4, 8), "passes per micro batch", evidence)},
    claim=api.Claim("activation bytes", -0.5, regime="a factor of 2", source="arithmetic", of_memory=True),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "passes", 2.0, "each with a part of the tokens", by_knob=lambda knobs: float(knobs["factor"])
        ),
    ),
    settings=(),
)
