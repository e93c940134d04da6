"""torch.compile: trace the model once, run generated kernels.

Eager PyTorch launches a kernel per operation, and each elementwise one reads and writes all its data in
device memory. The compiler fuses chains of them into one kernel and takes Python out of the step. It wins
where elementwise work and launches dominate; large matmuls stay the same. The price is the first step,
seconds to minutes, and a recompilation whenever a shape changes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.libraries import hush
from rush.models.layers import cos_and_sin
from rush.techniques.api.evidence import compile_counts


@torch.library.custom_op("rush::cos_and_sin", mutates_args=())
def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Opaque to the compiler, which would otherwise recompute sines and cosines in every layer."""
    return cos_and_sin(angles)


@_cos_and_sin.register_fake
def _(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.facts.compiled_before = compile_counts()
    if not build.ranks.alone:
        # Compiled code names this rank's process groups, which the cache key omits for collectives of a backward pass:
        # a rank could load another rank's code, and hang or fail.
        torch.compiler.config.cache_key_tag = f"rank {build.ranks.rank} of {build.recipe.layout}"
    # A warning about a matmul that autotuning skips.
    hush("torch._inductor.select_algorithm", "Constructing input/output tensor meta failed")
    mode = None if knobs["mode"] == "default" else str(knobs["mode"])
    model = build.model
    if knobs["scope"] == "model" and model.rotary is not None:
        model.rotary.cos_and_sin = _cos_and_sin
    # Where attention is recomputed, compiled code draws seeds from the CPU generator at its first call (for an unused dropout),
    # so a resumed run would draw once more. The generator is restored after each step.
    build.step_contexts.append(partial(torch.random.fork_rng, devices=()))
    parts: list[nn.Module] = [*model.blocks, model.final_norm, model.loss_head]
    traceable = [part for part in parts if not getattr(part, "stays_eager", False)]
    for target in [model] if knobs["scope"] == "model" else traceable:
        # On the instance, so that module and parameter names do not change. The block is an argument of the compiled
        # function, so blocks of one shape share one graph. A graph break is an error.
        compiled = torch.compile(target.forward, mode=mode, dynamic=False, fullgraph=True)
        target.__dict__["forward"] = compiled


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Compiled graphs were called in the profiled steps, backward included."""
    # A compiled training graph shows its backward pass; replayed in a CUDA graph, only its kernels.
    replayed = seen.compiled.graphs > 0 and any(name.startswith("triton_") for name in seen.kernels)
    calls = seen.ops.get("CompiledFunctionBackward", 0)
    return api.Proof(
        calls > 0 or replayed,
        f"{calls} calls of compiled graphs in the profiled steps; since the build {seen.compiled.graphs} graphs, "
        f"{seen.compiled.graph_breaks} breaks, {seen.compiled.recompiles} recompiles",
    )


technique = api.Technique(
    name="compile",
    stage=api.Stage.COMPILE,
    apply=apply,
    conflicts=("offload_activations",),
    knobs={
        "scope": api.KnobRange(
            ("model", "block"),
            "one graph for the model; or one for all blocks, one for the final norm, one for the loss (quicker to build)",
        ),
        "mode": api.KnobRange(
            ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            "how much time the compiler may spend",
        ),
    },
    claim=api.Claim(
        "tokens_per_s",
        0.20,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, after fused AdamW",
        source="a widely read hand-made ladder; see docs/sources.md",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    compiles=lambda knobs: True,
    memory=(
        api.MemoryEffect("norm.wide", 0.0, "recomputed inside the backward kernels"),
        api.MemoryEffect("norm.scaled", 0.0, "recomputed inside the backward kernels"),
        api.MemoryEffect("norm.copies", 0.0, "one cast for all layers after a norm"),
        api.MemoryEffect("block.middle", 0.0, "the sum is recomputed"),
        api.MemoryEffect("attention.projected", 1.0, "the sum is recomputed from it"),
        api.MemoryEffect("mlp.activated", 0.0, "recomputed inside the backward kernels"),
        api.MemoryEffect("logits.copies", 0.0, "the gradient overwrites the logits"),
        api.MemoryEffect("logits.padded", 2.0, "of an unaligned vocabulary, forward and backward"),
        api.MemoryEffect("seams", 0.75, "chunks of a loss, measured twice"),
    ),
    settings=(api.Setting({"scope": "block"}), api.Setting({"scope": "model"})),
    work=(
        api.WorkEffect("norms.fused", 1.0),
        api.WorkEffect("rope.fused", 1.0),
        api.WorkEffect("mlp.fused", 1.0),
        api.WorkEffect("stream.fused", 1.0),
        api.WorkEffect("head.unaligned", 1.0, "it pads the matmul"),
        api.WorkEffect(
            "launches.block",
            58.0,
            "160 with scope = block, as measured: 2.4 ms a block; the whole model's was never what a step waited for",
            by_knob=lambda knobs: 160.0 if knobs["scope"] == "block" else 58.0,
        ),
    ),
)
