"""torch.compile: trace the model once, run generated kernels.

Eager PyTorch launches a kernel per operation, and each elementwise one reads and writes all its data in
device memory. The compiler fuses chains of them into one kernel and takes Python out of the step. It wins
where elementwise work and launch overhead dominate; large matmuls stay the same. The price is the compile
time of the first step, seconds to minutes, and a recompilation whenever a shape changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.libraries import hush, hush_tf32_advice
from rush.models import Decoder
from rush.models.rotary import cos_and_sin
from rush.techniques.api.evidence import compile_counts

PASS = "rush::forward"
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@torch.library.custom_op("rush::cos_and_sin", mutates_args=())
def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Opaque to the compiler, which would otherwise recompute sines and cosines in every layer."""
    return cos_and_sin(angles)


@_cos_and_sin.register_fake
def _(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)


@dataclass(frozen=True)
class CompiledModel:
    model: Decoder
    stages: Sequence[nn.Module]
    """This rank's pipeline stages; empty without a pipeline."""

    @property
    def parts(self) -> list[nn.Module]:
        """What must be compiled with scope block."""
        ends = [self.model.final_norm, self.model.loss_head]
        return [*self.model.blocks, *(end for end in ends if not getattr(end, "stays_eager", False))]


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.facts.compiled_before = compile_counts()
    if not build.ranks.alone:
        # Compiled code names this rank's process groups, which the cache key omits for collectives of a backward pass:
        # a rank could load another rank's code, and hang or fail.
        torch.compiler.config.cache_key_tag = f"rank {build.ranks.rank} of {build.recipe.layout}"
    # A warning about a matmul that autotuning skips.
    hush("torch._inductor.select_algorithm", "Constructing input/output tensor meta failed")
    hush_tf32_advice()
    mode = None if knobs["mode"] == "default" else str(knobs["mode"])
    model = build.model
    for rotary in model.rotaries() if knobs["scope"] == "model" else []:
        rotary.cos_and_sin = _cos_and_sin
    # Where attention is recomputed, compiled code draws seeds from the CPU generator at its first call (for an unused dropout),
    # so a resumed run would draw once more. The generator is restored after each step.
    build.step_contexts.append(partial(torch.random.fork_rng, devices=()))
    build.facts.note(CompiledModel(model, build.stages))
    parts: list[nn.Module] = [*model.blocks, model.final_norm, model.loss_head]
    traceable = [part for part in parts if not getattr(part, "stays_eager", False)]
    for target in [model] if knobs["scope"] == "model" else traceable:
        # On the instance, so that module and parameter names do not change. The block is an argument of the compiled
        # function, so blocks of one shape share one graph. A graph break is an error.
        compiled = torch.compile(target.forward, mode=mode, dynamic=False, fullgraph=True)
        target.__dict__["forward"] = compiled


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Compiled graphs were called in the profiled steps, in every pass as many as the model has parts, backward included
    (replayed in a CUDA graph: their kernels ran); no graph broke."""
    noted, counts = seen.facts.noted(CompiledModel), seen.compiled
    calls = seen.ops.get("CompiledFunctionBackward", 0)
    passes = seen.ops.get(PASS, 0) / (len(noted.stages) or 1 if noted is not None else 1)
    each = 1
    if noted is not None and knobs["scope"] == "block":
        # (Not every rank of a pipeline has final norm and loss.)
        each = len(noted.parts if seen.holds_head else noted.model.blocks)
    # Replayed in a CUDA graph, compiled graphs show their kernels only.
    replayed = not calls and counts.graphs > 0 and any(name.startswith("triton_") for name in seen.kernels)
    return api.Proof(
        noted is not None and (calls >= max(1, each * passes) or replayed) and counts.graph_breaks == 0,
        f"{calls} calls of compiled graphs in {passes:g} passes, where {each} each are needed; since the build {counts.graphs} graphs, "
        f"{counts.graph_breaks} breaks, {counts.recompiles} recompiles",
    )


def _scope_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The model's forward is compiled, or that of every block, the final norm and the loss."""
    noted = seen.facts.noted(CompiledModel)
    if noted is None:
        return api.Proof(False, "nothing was compiled")
    whole, parts = _compiled([noted.model]), _compiled(noted.parts)
    wanted = (1, 0) if knobs["scope"] == "model" else (0, len(noted.parts))
    return api.Proof(
        (whole, parts) == wanted,
        f"compiled: {'the model' if whole else f'{parts} of {len(noted.parts)} parts of the model'}",
    )


def _mode_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The backends of the compiled functions hold the compiler options of this mode; on a GPU modes with CUDA graphs show launches of
    graphs."""
    noted = seen.facts.noted(CompiledModel)
    parts = [noted.model, *noted.parts] if noted is not None else []
    found = {_mode_of(_options(part.__dict__["forward"])) for part in parts if _compiled([part])}
    captures = knobs["mode"] in ("reduce-overhead", "max-autotune") and bool(seen.kernels)
    captured = "cudaGraphLaunch" in seen.ops or not captures
    return api.Proof(
        found == {knobs["mode"]} and captured,
        f"compiler options of mode {', '.join(sorted(found)) or 'none'}; {seen.ops.get('cudaGraphLaunch', 0)} launches of CUDA graphs",
    )


def _options(compiled: Any) -> Mapping[str, Any]:
    """The options that a compiled function calls the compiler with, read from its innermost backend."""
    contexts = [cell.cell_contents for cell in compiled.__closure__]
    backend = next(context.callback for context in contexts if hasattr(context, "callback"))
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    options: Mapping[str, Any] = backend.config
    return options


def _mode_of(options: Mapping[str, Any]) -> str:
    """The mode whose options these are; of several that fit, the one with the most."""
    from torch._inductor import list_mode_options

    modes = {mode: {} if mode == "default" else list_mode_options(mode) for mode in MODES}
    fitting = [m for m, wanted in modes.items() if all(options.get(k) == v for k, v in wanted.items())]
    return max(fitting, key=lambda mode: len(modes[mode]))


def _compiled(modules: Iterable[nn.Module]) -> int:
    """How many of these modules have a forward that torch.compile made."""
    return sum(hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable") for module in modules)


technique = api.Technique(
    name="compile",
    stage=api.Stage.COMPILE,
    apply=apply,
    conflicts=("offload_activations",),
    knobs={
        "scope": api.KnobRange(
            ("model", "block"),
            "one graph for the model; or one for all blocks, one for the final norm, one for the loss (quicker to build)",
            _scope_seen,
        ),
        "mode": api.KnobRange(MODES, "how much time the compiler may spend", _mode_seen),
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
            "160 with scope = block, as measured: 2.4 ms a block; with the full model compiled, no step was host-bound",
            by_knob=lambda knobs: 160.0 if knobs["scope"] == "block" else 58.0,
        ),
    ),
)
