"""Activation checkpointing: forget what a block computed, compute it again when it is needed.

Training keeps every intermediate result until the backward pass has used it, and that, not the weights,
fills the memory at large batches. Here only the input of each block is kept; the backward pass runs the
block's forward once more. Activations shrink to about one tensor per block, for a third more
arithmetic. It makes a step slower and a batch larger, so it pays only when the larger batch (or the longer
sequence) is worth more than the recomputation.

At very long sequences the blocks' inputs are what is left, and what fills the memory. They can wait on the host
(`inputs = "host"`): a trip over the link for each block, which is short beside attention over so many tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rush.hardware import Machine
from rush.recipe import Knob, Recipe
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Requirement,
    Stage,
    Technique,
    WorkEffect,
    knob_of,
    used,
)
from rush.techniques.api.seams import override_forward
from rush.techniques.memory.on_host import OffloadToHost


def _recomputed(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
    # Nothing in a block is random, so there is no generator to bring back.
    out: Tensor = checkpoint(
        type(self).forward, self, x_btd, use_reentrant=False, preserve_rng_state=False, **rest
    )
    return out


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    for block in build.model.blocks:
        override_forward(block, _recomputed)
    if knobs["inputs"] == "host":
        moved: Counter[str] = Counter()
        build.facts["waited_on_host"] = moved
        hidden = build.model.shape.hidden

        def is_input(tensor: Tensor) -> bool:
            return tensor.dim() == 3 and tensor.shape[-1] == hidden and tensor.is_floating_point()

        # Around the step: it acts on what a block hands to recomputation, and on what a compiled block keeps.
        build.step_contexts.append(lambda: OffloadToHost(is_input, moved, pin=True))


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """The matmuls of the blocks ran again in the backward pass: more than three products for each linear layer. With
    `inputs = "host"`, bytes of inputs were copied there as well."""
    # Recomputation stops as soon as the last needed value is there, so a little less than 2.
    said = (
        f"each block's matmuls ran {seen.block_forwards:.2f} times forward; {seen.held_bytes / 2**20:.1f} MiB "
        "kept between forward and backward"
    )
    away = seen.facts.get("waited_on_host", Counter())["bytes"]
    if knobs["inputs"] == "host":
        said += f"; {away / 2**20:.1f} MiB of inputs went to the host since the build"
    return Proof(seen.block_forwards > 1.4 and (away > 0) == (knobs["inputs"] == "host"), said)


def _host_is_elsewhere(machine: Machine, recipe: Recipe) -> bool:
    on_host = knob_of(recipe, "checkpoint_full", "inputs", "device") == "host"
    return not on_host or (machine.device == "cuda" and not used(recipe, "cuda_graph", "fsdp"))


technique = Technique(
    name="checkpoint_full",
    stage=Stage.MEMORY,
    apply=apply,
    requires=(
        Requirement(
            'inputs = "host" needs a GPU, whose memory is not the host\'s, and stands neither beside cuda_graph nor fsdp',
            _host_is_elsewhere,
        ),
    ),
    conflicts=("checkpoint_selective", "offload_activations"),
    knobs={
        "inputs": KnobRange(
            ("device", "host"),
            "where the input of each block waits for the backward pass; host is for long sequences",
        )
    },
    claim=Claim(
        "tokens_per_s",
        -0.40,
        regime="Llama-3.2-1B, sequence 2048, batch 8, one A100, at the top of the ladder",
        source="a widely read hand-made ladder; see docs/sources.md; Chen et al. 2016, arXiv:1604.06174",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(
        MemoryEffect(
            "activations",
            1.0,
            "the input of each block, and one block at a time in full",
            keeps=("block.input",),
        ),
        MemoryEffect("casts", 0.0, "made again with the block"),
        MemoryEffect(
            "block.input",
            1.0,
            "0 with inputs = host",
            by_knob=lambda knobs: float(knobs["inputs"] == "device"),
        ),
    ),
    work=(
        WorkEffect("blocks.again", 1.0),
        WorkEffect("attention.again", 1.0),
        WorkEffect("elementwise.again", 0.2),
        WorkEffect("inputs.offloaded", 1.0, when=lambda knobs: knobs["inputs"] == "host"),
    ),
)
