"""Activation checkpointing: recompute each block's activations in the backward pass.

Training saves every activation until the backward pass has used it, and that, not the weights, fills the
memory at large batches. Here only the input of each block is saved; the backward pass runs the block's
forward once more. Activations shrink to about one tensor per block, for a third more FLOPs. It makes a step
slower and a batch larger, so it pays only when the larger batch (or the longer sequence) is worth more than
the recomputation.

At very long sequences the saved inputs of the blocks fill the memory. They can be offloaded to the host
(`inputs = "host"`): one transfer per block, which is short compared with attention over so many tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rush.techniques.api.contract as api
from rush.hardware import Machine
from rush.recipe import Recipe
from rush.techniques.api.seams import override_forward
from rush.techniques.memory.on_host import OffloadedInputs, OffloadToHost


def _recomputed(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
    # Nothing in a block is random, so no RNG state is saved.
    out: Tensor = checkpoint(
        type(self).forward, self, x_btd, use_reentrant=False, preserve_rng_state=False, **rest
    )
    return out


def apply(build: api.Build, knobs: api.Knobs) -> None:
    for block in build.model.blocks:
        override_forward(block, _recomputed)
    if knobs["inputs"] == "host":
        moved = build.facts.note(OffloadedInputs()).moved
        hidden = build.model.shape.hidden

        def is_input(tensor: Tensor) -> bool:
            return tensor.dim() == 3 and tensor.shape[-1] == hidden and tensor.is_floating_point()

        # Around the whole step: it acts on checkpointed inputs, and on what a compiled block saves.
        build.step_contexts.append(lambda: OffloadToHost(is_input, moved, pin=True))


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The blocks' matmuls were recomputed in the backward pass: more than three for each linear layer. With
    `inputs = "host"`, inputs were copied to the host as well."""
    # Recomputation stops at the last needed tensor, so a little less than 2.
    said = (
        f"each block's matmuls ran {seen.block_forwards:.2f} times forward; {seen.held_bytes / 2**20:.1f} MiB "
        "of saved activations"
    )
    away = (seen.facts.noted(OffloadedInputs) or OffloadedInputs()).moved["bytes"]
    if knobs["inputs"] == "host":
        said += f"; {away / 2**20:.1f} MiB of inputs were offloaded since the build"
    return api.Proof(seen.block_forwards > 1.4 and (away > 0) == (knobs["inputs"] == "host"), said)


def _can_offload(machine: Machine, recipe: Recipe) -> bool:
    on_host = api.knob_of(recipe, "checkpoint_full", "inputs", "device") == "host"
    return not on_host or (machine.device == "cuda" and not api.used(recipe, "cuda_graph", "fsdp"))


technique = api.Technique(
    name="checkpoint_full",
    alternative=api.Alternative.CHECKPOINTING,
    stage=api.Stage.MEMORY,
    apply=apply,
    requires=(
        api.Requirement(
            'inputs = "host" needs a GPU, and works neither with cuda_graph nor with fsdp', _can_offload
        ),
    ),
    conflicts=("checkpoint_selective", "offload_activations"),
    knobs={
        "inputs": api.KnobRange(
            ("device", "host"), "where the input of each block is saved; host is for long sequences", evidence
        )
    },
    claim=api.Claim(
        "tokens_per_s",
        -0.40,
        regime="Llama-3.2-1B, sequence 2048, batch 8, one A100, at the top of the ladder",
        source="a widely read hand-made ladder; see docs/sources.md; Chen et al. 2016, arXiv:1604.06174",
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "activations",
            1.0,
            "the input of each block, and one block in full at a time",
            keeps=("block.input",),
        ),
        api.MemoryEffect("casts", 0.0, "recomputed with the block"),
        api.MemoryEffect(
            "block.input",
            1.0,
            "0 with inputs = host",
            by_knob=lambda knobs: float(knobs["inputs"] == "device"),
        ),
    ),
    work=(
        api.WorkEffect("blocks.recomputed", 1.0),
        api.WorkEffect("attention.recomputed", 1.0),
        api.WorkEffect("elementwise.recomputed", 0.2),
        api.WorkEffect("inputs.offloaded", 1.0, when=lambda knobs: knobs["inputs"] == "host"),
    ),
)
