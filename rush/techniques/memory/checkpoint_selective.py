"""Selective checkpointing: save what is expensive to compute, recompute what is cheap.

Within a block the outputs of matmuls and of the attention kernel account for nearly all FLOPs; norms,
activations, casts and RoPE cost little to compute but as much memory to save. So matmul and attention
outputs are saved and the rest is recomputed in the backward pass: much of the memory saving of
`checkpoint_full` for a small part of its time. A compiled graph does some of this by itself, which leaves
less to gain with `compile`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rush.techniques.api.contract as api
from rush.libraries import hush
from rush.models.adapted_linears import OPERATORS as ADAPTED
from rush.techniques.api.seams import override_forward

_MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._int_mm.default,  # int32, so twice the bytes of a 16-bit output
    *ADAPTED,  # one operator for layers with one input and their adapters
)
# Not plain attention's batched matmuls: their scores must not be saved.
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
)


KEPT = (
    "block.input",
    "queries",
    "keys",
    "values",
    "attention.output",
    "attention.projected",
    "mlp.gate",
    "mlp.up",
)
"""The planner's terms of saved activations."""


class Tally:
    """Counts in an object that is not a dict: torch 2.11 cannot guard a compiled graph by a dict's identity."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


def _contexts(keep: str, tally: Tally) -> Any:
    """The context_fn of torch's checkpoint: two modes that share one policy."""
    matmuls: Counter[tuple[bool, bool]] = Counter()

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in _ATTENTION
        if operator in _MATMULS:
            # Forward and recomputation see the same matmuls in the same order. Adapted layers with one input are one
            # operator: of those, half means the output projections of attention and MLP.
            kind = (ctx.is_recompute, operator in ADAPTED)
            kept = keep == "all" or matmuls[kind] % 2 == (operator in ADAPTED)
            matmuls[kind] += 1
        tally.counts["kept" if kept else "dropped"] += not ctx.is_recompute
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def apply(build: api.Build, knobs: api.Knobs) -> None:
    tally = build.facts.note(Tally())
    contexts = partial(_contexts, str(knobs["keep"]), tally)
    # A warning about in-place operations; blocks have none.
    hush("torch._higher_order_ops.wrap", "Detected that context_fn is passed")

    def body(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            tally.counts["runs"] += 1
        out: Tensor = type(self).forward(self, x_btd, **rest)
        return out

    def partly_recomputed(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            tally.counts["calls"] += 1
        out: Tensor = checkpoint(
            body, self, x_btd, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **rest
        )
        return out

    for block in build.model.blocks:
        override_forward(block, partly_recomputed)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The policy saved some outputs and dropped others, and blocks ran more often than they were called (compiled: the
    policy was called while tracing)."""
    tally = (seen.facts.noted(Tally) or Tally()).counts
    # A compiler calls the policy while tracing, and recomputes inside its own graph.
    compiled = "CompiledFunctionBackward" in seen.ops and tally["dropped"] > 0
    recomputed = tally["runs"] > tally["calls"]
    matmuls_recomputed = seen.block_forwards > 1.1
    how = (
        "inside a compiled graph"
        if compiled
        else f"{tally['runs']} runs of blocks for {tally['calls']} calls"
    )
    return api.Proof(
        tally["kept"] > 0 and (recomputed or compiled) and matmuls_recomputed == (knobs["keep"] == "half"),
        f"the policy saved {tally['kept']} outputs and dropped {tally['dropped']}; {how}; "
        f"each block's matmuls ran {seen.block_forwards:.2f} times forward; "
        f"{seen.held_bytes / 2**20:.1f} MiB of saved activations",
    )


technique = api.Technique(
    name="checkpoint_selective",
    alternative=api.Alternative.CHECKPOINTING,
    stage=api.Stage.MEMORY,
    apply=apply,
    conflicts=("checkpoint_full", "offload_activations"),
    knobs={
        "keep": api.KnobRange(
            ("all", "half"), "save the outputs of all matmuls, or of every second one", evidence
        )
    },
    claim=api.Claim(
        "time spent on recomputation",
        -0.90,
        regime="against checkpointing everything, models of 22B to 1T parameters",
        source="Korthikanti et al. 2022, arXiv:2205.05198",
        relative_to="checkpoint_full",
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "activations",
            1.0,
            "outputs of matmuls and of the attention kernel, and one block in full at a time",
            by_knob=lambda knobs: 1.0 if knobs["keep"] == "all" else 0.6,
            keeps=KEPT,
        ),
        api.MemoryEffect("attention.projected", 1.0, "a matmul output"),
        api.MemoryEffect("casts", 0.0, "recomputed with the block"),
    ),
    settings=(api.Setting(), api.Setting({"keep": "half"})),
    work=(
        api.WorkEffect(
            "blocks.recomputed",
            0.0,
            "0.5 with keep = half",
            by_knob=lambda knobs: 0.5 * (knobs["keep"] == "half"),
        ),
        api.WorkEffect("scores.recomputed", 1.0),
        api.WorkEffect("elementwise.recomputed", 0.2),
    ),
)
