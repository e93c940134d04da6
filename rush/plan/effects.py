"""The terms of the planner, which techniques' `memory` and `work` fields name.

A plain run (fp32, eager, full scores and logits) has the terms of `PLAIN`; those of `ADDED` exist only where a
technique names them. Sizes are read from the plain model's code (`rush/models/layers.py`), operation by operation:
an operation saves what its derivative needs, and a tensor that two operations save counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rush.techniques import Use, registry

PLAIN = {
    "parameters": "the weights, 4 bytes each",
    "blocks": "the weights of the blocks' linear layers, if they differ from `parameters`",
    "gradients": "4 bytes per trained weight",
    "optimizer": "Adam's two moments, 8 bytes per trained weight",
    "optimizer.blocks": "the state of the blocks' matrices, if it differs from `optimizer`",
    "stream": "the residual stream (bytes per element)",
    "compute": "operands and outputs of matmuls (bytes per element)",
    "activations": "all saved activations of the blocks",
    "block.input": "input of a block's first norm, in the dtype of the stream",
    "block.middle": "input of its second norm",
    "norm.wide": "RMSNorm's fp32 copy of its input, saved instead of the input",
    "norm.scaled": "RMSNorm before its weight",
    "post.input": "inputs of the norms after sublayers, where a family has them",
    "qk.input": "queries and keys before their norms, where a family has them",
    "norm.output": "the input of the layers after a norm",
    "norm.copies": "under autocast, a cast of that input for each layer after the norm",
    "queries": "rotated queries",
    "keys": "rotated keys",
    "values": "values",
    "heads.repeated": "keys and values repeated for every query head of their group",
    "scores": "the softmax of all scores in fp32, and in the matmul dtype where that differs",
    "attention.flat": "the input of the attention's output projection",
    "mlp.gate": "the gate before its activation (GPT-2: the wide layer before GELU)",
    "mlp.activated": "the gate after its activation",
    "mlp.up": "the other wide layer",
    "mlp.product": "the input of the MLP's down projection",
    "logits": "tokens × vocabulary during the loss, forward and backward",
    "logits.copies": "eager: log-softmax and its gradients in fp32, each as large as the logits",
    "update": "temporaries of an unfused update",
    "buffers": "workspaces of libraries, inputs",
    "fragmentation": "memory that the allocator reserves but cannot use",
}
ADDED = {
    "frozen": "the weights are frozen; adapters are trained",
    "master": "fp32 master weights",
    "casts": "weights cast to the matmul dtype, saved for backward",
    "inputs.cast": "layers save a cast of their input (bytes per element) instead of it; compiled, it is recomputed",
    "inputs.opaque": "1: by an operator that is opaque to the compiler, so casts are saved",
    "norm.opaque": "1: the norms are opaque operators, so casts of their outputs are saved",
    "mlp.opaque": "1: the MLP's activation is an opaque operator",
    "matmul.sums": "results of a block's matmuls before they are scaled, one at a time (bytes per element)",
    "head.cast": "the gradient of the logits in fp8, also transposed, in addition to the logits",
    "values.joined": "1: values are a view of one output with queries and keys before RoPE, which is saved too",
    "mlp.whole": "1: the MLP is one operator, which saves gate and up",
    "attention.output": "the attention kernel's output and log-sum-exp",
    "attention.projected": "the output of attention's output projection",
    "logits.padded": "copies of 16-bit logits with padded rows, where the vocabulary is unaligned",
    "logits.tokens": "tokens whose logits exist at once; below 1: a fraction of all",
    "head.gradient": "the LM head's gradient, computed in the forward pass",
    "passes": "passes per micro batch",
    "seams": "compiled chunks of a loss are not ordered: the fraction of logits that exist at once",
    "gathered": "with sharding, the weights of all blocks stay gathered",
    "on_host": "with sharding, the shards are in host memory, where the update runs",
    "unsharded_gradients": "with sharding, unsharded gradients until the last pass",
    "buckets": "a second copy of the gradients, for communication",
    "update.matrices": "temporaries of an update of whole matrices (bytes per element of those updated at once)",
    "cuda_graph.gradients": "static gradients of a captured graph",
    "cuda_graph.pool": "1: passes run in the memory pool of a CUDA graph, which nothing else can use",
}
TERMS = PLAIN | ADDED
WORK = {
    "matmul.dtype": "dtype of matmuls, where the bytes per element do not determine it (a name)",
    "blocks.dtype": "dtype of the blocks' matmuls, where it differs (a name)",
    "head.dtype": "dtype of the LM head's matmuls, where it differs (a name)",
    "blocks.casts": "bytes moved to cast each input and output of a block's matmuls",
    "blocks.recomputed": "the fraction of a block's matmuls that is recomputed; 1: all but the last",
    "attention.recomputed": "1: attention is recomputed too",
    "scores.recomputed": "1: attention too, unless a fused kernel computes it",
    "elementwise.recomputed": "the fraction of elementwise work that is recomputed",
    "attention": "efficiency of an attention kernel relative to a large matmul, at head dim 64; plain: all scores are "
    "written and read",
    "norms.fused": "1: each norm is one kernel",
    "rope.fused": "1: RoPE is one kernel",
    "mlp.fused": "1: the MLP's activation is one kernel",
    "stream.fused": "1: residual adds and casts are fused into other kernels",
    "bias_grad.fused": "the fraction of bias gradients that other kernels compute",
    "head.recomputed": "FLOPs per weight of the LM head that are recomputed (2: one more forward)",
    "head.unaligned": "efficiency of the LM head's matmul if the vocabulary is no multiple of 8",
    "loss.bytes": "bytes per logit of loss and gradient; plain: 32, compiled 11",
    "update.bytes": "bytes moved per byte of a weight by a fused update; plain: 24",
    "update.extra_bytes": "additional bytes per weight",
    "update.efficiency": "efficiency of that kernel relative to the copy rate, where it differs",
    "update.launches": "launches per tensor; plain: 10",
    "update.iterations": "Newton–Schulz iterations of each matrix of a block, in bf16",
    "launches.block": "launches per block, forward and backward; plain: counted",
    "launches.extra": "additional launches per block",
    "launches.pass": "launches per pass; plain: the sum over its blocks",
    "dequantize.efficiency": "efficiency of the dequantize kernel relative to the copy rate; plain: that of eager operations",
    "dequantize.launches": "launches to dequantize one weight",
    "data.workers": "worker threads that prepare batches",
    "offloaded": "1: saved activations are offloaded to the host",
    "inputs.offloaded": "1: the checkpointed inputs of blocks are offloaded",
}
"""Terms of time. What a plain run does is counted in `rush/plan/time.py`."""


@dataclass(frozen=True)
class StepWork:
    """The combined time effects of a recipe's techniques."""

    values: Mapping[str, float | str]
    by: Mapping[str, str]
    """The technique that sets each value."""

    def number(self, term: str, plain: float = 0.0) -> float:
        assert term in WORK, term
        return float(self.values.get(term, plain))

    def name(self, term: str, plain: str) -> str:
        assert term in WORK, term
        return str(self.values.get(term, plain))


NO_WORK = StepWork({}, {})


def work_of(uses: Iterable[Use]) -> StepWork:
    values: dict[str, float | str] = {}
    by: dict[str, str] = {}
    for use in uses:
        for effect in use.technique.work:
            assert effect.term in WORK, f"{use.technique.name}: {effect.term} is not a time term"
            if effect.when is not None and not effect.when(use.knobs):
                continue
            value, before = effect.value_of(use.knobs), values.get(effect.term)
            if isinstance(value, float) and isinstance(before, float) and before >= value:
                continue
            values[effect.term], by[effect.term] = value, use.technique.name
    return StepWork(values, by)


def attention_kernels() -> dict[str, float]:
    """Attention techniques with their declared efficiency."""
    found = {}
    for name, technique in registry().items():
        for effect in technique.work:
            if effect.term == "attention":
                found[name] = float(effect.value)
    return found


@dataclass(frozen=True)
class MemoryEffects:
    """The combined memory effects of a recipe's techniques."""

    factors: Mapping[str, float]
    sizes: Mapping[str, float]
    keeps: frozenset[str] | None = None
    """Saved terms of a block; None: all."""

    def factor(self, term: str) -> float:
        assert term in TERMS, term
        return self.factors.get(term, 1.0 if term in PLAIN else 0.0)

    def size(self, term: str, plain: float) -> float:
        return self.sizes.get(term, plain)


def effects_of(uses: Iterable[Use], axes: Iterable[str] = ()) -> MemoryEffects:
    """Combine all effects. Those of the layout's axes count only where they add a term: the planner divides."""
    factors: dict[str, float] = {}
    sizes: dict[str, float] = {}
    keeps: frozenset[str] | None = None
    for use in uses:
        for effect in use.technique.memory:
            assert effect.term in TERMS, f"{use.technique.name}: {effect.term} is not a memory term"
            if effect.when is not None and not effect.when(use.knobs):
                continue
            if use.technique.name in axes and effect.term in PLAIN and effect.size is None:
                continue
            factors[effect.term] = factors.get(effect.term, 1.0) * effect.factor_of(use.knobs)
            if effect.size is not None:
                sizes[effect.term] = effect.size  # the later stage decides
            if effect.keeps is not None:
                keeps = frozenset(effect.keeps) if keeps is None else keeps & frozenset(effect.keeps)
    return MemoryEffects(factors, sizes, keeps)
