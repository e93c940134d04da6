"""Gradient accumulation: split each micro batch into smaller ones and add up their gradients.

The activations of a pass grow with its batch; the gradients do not. A micro batch split into two passes
needs half the activation memory and gives the same gradient, because every pass scales its summed loss by
the number of labels of the whole step. Smaller matmuls use the device less well, so it costs some speed;
what it buys is a batch that would not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rush.data import Batch
from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Pass,
    Proof,
    Requirement,
    Stage,
    Technique,
    knob_of,
)


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    factor = int(knobs["factor"])

    def split(inner: Pass) -> Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            return torch.stack([inner(part, loss_scale) for part in batch.split(factor)]).sum()

        return passes

    build.pass_wrappers.append(split)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """A step has `factor` times as many passes as micro batches from the loader."""
    given, made = seen.loader_micro_batches, seen.micro_batches
    return Proof(
        made == int(knobs["factor"]) * given,
        f"{made} passes in a step for {given} micro batches; {seen.held_bytes / 2**20:.1f} MiB of saved "
        "activations",
    )


technique = Technique(
    name="accumulate",
    stage=Stage.STEP,
    apply=apply,
    after=("cuda_graph",),
    requires=(
        Requirement(
            "it needs batch.micro to be a multiple of its factor",
            lambda machine, recipe: recipe.micro % int(knob_of(recipe, "accumulate", "factor", 2)) == 0,
        ),
    ),
    knobs={"factor": KnobRange((2, 4, 8), "passes per micro batch")},
    claim=Claim(
        "activation bytes",
        -0.5,
        regime="a factor of 2",
        source="arithmetic",
        of_memory=True,
    ),
    parity=Parity.CLOSE,
    evidence=evidence,
    memory=(
        MemoryEffect(
            "passes", 2.0, "each with a part of the tokens", by_knob=lambda knobs: float(knobs["factor"])
        ),
    ),
    settings=(),
)
