"""Activation checkpointing: forget what a block computed, compute it again when it is needed.

Training keeps every intermediate result until the backward pass has used it, and that, not the weights,
fills the memory at large batches. Here only the input of each block is kept; the backward pass runs the
block's forward once more. Activations shrink to about one tensor per block, for a third more
arithmetic. It makes a step slower and a batch larger, so it pays only when the larger batch (or the longer
sequence) is worth more than the recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rush.recipe import Knob
from rush.techniques.contract import Build, Claim, MemoryEffect, Observation, Parity, Proof, Stage, Technique
from rush.techniques.seams import give_forward


def _recomputed(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
    # Nothing in a block is random, so there is no generator to bring back.
    out: Tensor = checkpoint(
        type(self).forward, self, x_btd, use_reentrant=False, preserve_rng_state=False, **rest
    )
    return out


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    for block in build.model.blocks:
        give_forward(block, _recomputed)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """The matmuls of the blocks ran again in the backward pass: more than three products for each linear layer."""
    # Recomputation stops as soon as the last needed value is there, so a little less than 2.
    return Proof(
        seen.block_forwards > 1.4,
        f"each block's matmuls ran {seen.block_forwards:.2f} times forward; {seen.held_bytes / 2**20:.1f} MiB "
        "kept between forward and backward",
    )


technique = Technique(
    name="checkpoint_full",
    stage=Stage.MEMORY,
    apply=apply,
    conflicts=("checkpoint_selective", "offload_activations"),
    claim=Claim(
        "tokens_per_s",
        -0.40,
        regime="Llama-3.2-1B, sequence 2048, batch 8, one A100, at the top of the ladder",
        source="a widely read hand-made ladder; see docs/sources.md; Chen et al. 2016, arXiv:1604.06174",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(
        MemoryEffect("activations", 0.06, "the input of each block, and one block at a time in full"),
        MemoryEffect("scores", 0.0, "one block's at a time"),
    ),
)
