"""Selective checkpointing: keep what is dear to compute, recompute what is cheap.

Within a block the outputs of matmuls and of the attention kernel cost nearly all the arithmetic; norms,
activations, casts and rotations cost little to make but as much memory to keep. So matmul and attention
outputs are kept and the rest is made again in the backward pass: a good part of the memory of
`checkpoint_full` for a small part of its time. A compiled graph does some of this by itself, which leaves
less to gain beside `compile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rush.libraries import hush
from rush.models.adapted_linears import OPERATORS as ADAPTED
from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Setting,
    Stage,
    Technique,
    WorkEffect,
)
from rush.techniques.api.seams import override_forward

_MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    *ADAPTED,  # one operator for all products of layers with one input and of their adapters
)
# Plain attention's products are not among them: its scores are the very tensors that must not be kept.
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
"""The planner's names of what stays."""


class Tally:
    """Counts of what happened, in an object that is no dict: a compiled graph of torch 2.11 cannot be guarded by
    the identity of a dict."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


def _contexts(keep: str, tally: Tally) -> Any:
    """What torch asks for at each checkpointed call: two modes that share one policy."""
    matmuls: Counter[tuple[bool, bool]] = Counter()

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in _ATTENTION
        if operator in _MATMULS:
            # Forward and recomputation meet the same matmuls in the same order, so they agree. Adapted layers of one input
            # come together: of those, half means what ends the attention and the MLP, and not the wide ones.
            kind = (ctx.is_recompute, operator in ADAPTED)
            kept = keep == "all" or matmuls[kind] % 2 == (operator in ADAPTED)
            matmuls[kind] += 1
        tally.counts["kept" if kept else "dropped"] += not ctx.is_recompute
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    tally = Tally()
    build.facts["selective_checkpoint"] = tally.counts
    contexts = partial(_contexts, str(knobs["keep"]), tally)
    # A hint for whoever writes the checkpointed function: blocks change nothing in place.
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
            body,
            self,
            x_btd,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **rest,
        )
        return out

    for block in build.model.blocks:
        override_forward(block, partly_recomputed)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """The policy kept outputs and let go of others, and blocks ran more often than they were called (compiled: the
    policy was asked while the graph was traced)."""
    tally = seen.facts.get("selective_checkpoint", Counter())
    # A compiler asks the policy while it traces, and recomputes inside its own graph.
    compiled = "CompiledFunctionBackward" in seen.ops and tally["dropped"] > 0
    recomputed = tally["runs"] > tally["calls"]
    matmuls_again = seen.block_forwards > 1.1
    how = (
        "inside a compiled graph"
        if compiled
        else f"{tally['runs']} runs of blocks for {tally['calls']} calls"
    )
    return Proof(
        tally["kept"] > 0 and (recomputed or compiled) and matmuls_again == (knobs["keep"] == "half"),
        f"the policy kept {tally['kept']} outputs and let go of {tally['dropped']}; {how}; "
        f"each block's matmuls ran {seen.block_forwards:.2f} times forward; "
        f"{seen.held_bytes / 2**20:.1f} MiB kept between forward and backward",
    )


technique = Technique(
    name="checkpoint_selective",
    stage=Stage.MEMORY,
    apply=apply,
    conflicts=("checkpoint_full", "offload_activations"),
    knobs={
        "keep": KnobRange(("all", "half"), "the outputs of all matmuls, or of every second one"),
    },
    claim=Claim(
        "time spent on recomputation",
        -0.90,
        regime="against checkpointing everything, models of 22B to 1T parameters",
        source="Korthikanti et al. 2022, arXiv:2205.05198",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(
        MemoryEffect(
            "activations",
            1.0,
            "results of products and of the attention kernel, and one block at a time in full",
            by_knob=lambda knobs: 1.0 if knobs["keep"] == "all" else 0.6,
            keeps=KEPT,
        ),
        MemoryEffect("attention.projected", 1.0, "a result of a product"),
        MemoryEffect("casts", 0.0, "made again with the block"),
    ),
    settings=(Setting(), Setting({"keep": "half"})),
    work=(
        WorkEffect(
            "blocks.again", 0.0, "0.5 with keep = half", by_knob=lambda knobs: 0.5 * (knobs["keep"] == "half")
        ),
        WorkEffect("scores.again", 1.0),
        WorkEffect("elementwise.again", 0.2),
    ),
)
