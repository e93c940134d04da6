"""The things a plan counts, by name: what techniques' `memory` and `work` fields speak of.

A plain run (fp32, eager, full scores and logits) has the terms of `PLAIN`; those of `ADDED` exist only where a
technique names them. Widths are those of the plain model's code (`rush/models/layers.py`), read op by op: an
operation keeps for its backward pass what its derivative needs, and a tensor that two operations keep counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rush.techniques import Use, registry

PLAIN = {
    "parameters": "the weights, 4 bytes each",
    "blocks": "the weights of the blocks' linear layers, as a share of what `parameters` makes of them",
    "gradients": "4 bytes for each trained weight",
    "optimizer": "Adam's two moments, 8 bytes for each trained weight",
    "stream": "what passes between blocks (size of an element)",
    "compute": "factors and results of matrix products (size of an element)",
    "activations": "all that blocks leave for their backward pass",
    "block.input": "what a block's first norm reads, in the dtype of the stream",
    "block.middle": "what its second norm reads",
    "norm.wide": "RMSNorm's fp32 copy of its input, where that is not fp32; it is kept in place of the input",
    "norm.scaled": "RMSNorm before its gain",
    "norm.output": "the input of the layers behind a norm",
    "norm.copies": "under autocast, a cast of that input for each layer behind the norm",
    "queries": "queries, turned",
    "keys": "keys, turned",
    "values": "values",
    "heads.repeated": "keys and values copied for every query head of their group",
    "scores": "the softmax of all scores in fp32, and in the dtype of the products where that is another",
    "attention.flat": "the input of attention's last layer",
    "mlp.gate": "the gate before its activation (GPT-2: the wide layer before GELU)",
    "mlp.activated": "the gate after its activation",
    "mlp.up": "the other wide layer",
    "mlp.product": "the input of the MLP's last layer",
    "logits": "tokens × vocabulary while the loss is computed and differentiated",
    "logits.copies": "eager: log-softmax and its gradients in fp32, each as large as the logits",
    "update": "temporaries of an update that makes one operation after another",
    "buffers": "workspaces of libraries, inputs",
    "gaps": "what the allocator holds beyond all tensors, in pieces that nothing fits into",
}
ADDED = {
    "frozen": "the weights do not learn; adapters do",
    "master": "fp32 copies of trained weights",
    "casts": "weights in the dtype of the products, kept from forward to backward pass",
    "inputs.cast": "layers keep a cast of what they read (size of an element) instead of it; compiled, it is made again from what is "
    "kept anyway",
    "inputs.opaque": "1: by an operator into which no compiler looks, so that casts are kept",
    "norm.opaque": "1: the norms are such operators, so that casts of what they write are kept",
    "mlp.opaque": "1: the MLP's activation is one",
    "head.cast": "the gradient of the logits in 8 bits, as it is and turned over, beside the logits",
    "values.joined": "1: values are part of one result with the queries and keys before their turn, which stays with them",
    "mlp.whole": "1: all of the MLP is one, and keeps gate and up, not their product",
    "attention.output": "attention's result as its kernel keeps it, and a number for each query and head",
    "attention.projected": "what attention adds to the stream",
    "logits.padded": "copies of half-precision logits with rows of whole pieces, where the vocabulary is odd",
    "logits.tokens": "how many tokens' logits exist at once; below 1: their share of all",
    "head.gradient": "the gradient of the head, made in the forward pass",
    "passes": "into how many passes a micro batch is cut",
    "seams": "compiled chunks of a loss are not ordered one after another: the share of logits held at once",
    "gathered": "of a sharded model, the weights of all blocks instead of those at work",
    "on_host": "of a sharded model, the parts that a rank keeps lie in host memory, where the update is made",
    "whole_gradients": "of a sharded model, the gradients in full until the last pass",
    "buckets": "a second copy of the gradients, for sending",
    "recording": "memory that a recorded pass keeps apart",
    "pool": "1: passes are replayed in a memory pool of their own, which stays and nothing else can use",
}
TERMS = PLAIN | ADDED
WORK = {
    "products.dtype": "of matrix products, where the size of their factors does not tell it (a name)",
    "blocks.dtype": "of the products inside blocks, where it is another (a name)",
    "head.dtype": "of the head's products, where it is another (a name)",
    "blocks.casts": "bytes moved for each number that goes into or comes out of a block's products, to cast it",
    "blocks.again": "the share of a block's products that its backward pass makes again; 1: all but the last one's",
    "attention.again": "1: attention too",
    "scores.again": "1: attention too, unless a kernel computes it",
    "elementwise.again": "the share of elementwise work that is done again",
    "attention": "what a kernel of attention reaches of the rate of a large product, at heads of 64; plain: all scores are "
    "written and read",
    "norms.fused": "1: each norm is one kernel",
    "rotations.fused": "1: queries and keys are turned by one kernel",
    "mlp.fused": "1: the MLP's activation is one kernel",
    "stream.fused": "1: sums and casts between layers are part of other kernels",
    "sums.fused": "of the sums for the gradients of biases, the share that other kernels make",
    "head.again": "products of the head that are made again, forward and backward (2: one more forward)",
    "head.odd": "what the head's product reaches of its rate if the vocabulary is no multiple of 8; plain: 0.6",
    "loss.bytes": "moved for each logit by a kernel that computes loss and gradient; plain: 32, compiled 11",
    "update.bytes": "moved for each byte of a weight by an update in one kernel; plain: 24",
    "update.more": "bytes for each weight besides",
    "update.reaches": "what that kernel reaches of the copy rate, where that is not the usual",
    "update.launches": "operations for each tensor; plain: 10",
    "launches.block": "operations that the host launches for a block's passes; plain: counted",
    "launches.more": "operations for a block besides those, compiled or not",
    "launches.pass": "operations for a whole pass; plain: the sum of its blocks'",
    "unpack.reaches": "what the kernel that unpacks codes reaches of the copy rate; plain: what eager operations do",
    "unpack.launches": "what unpacking one weight takes of the host, in operations that it launches",
    "data.ahead": "threads that make batches while the device works",
    "offloaded": "1: what blocks keep goes to the host and comes back",
    "inputs.offloaded": "1: the inputs of blocks do, which are all they keep",
}
"""Of time. What is no number of its own in a plain run is counted from the code in `rush/plan/time.py`."""


@dataclass(frozen=True)
class StepWork:
    """What the techniques of a recipe do together to the work of a step."""

    values: Mapping[str, float | str]
    by: Mapping[str, str]
    """The technique that each value comes from."""

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
            assert effect.term in WORK, f"{use.technique.name}: {effect.term} is no work of a plan"
            if effect.when is not None and not effect.when(use.knobs):
                continue
            value, before = effect.value_of(use.knobs), values.get(effect.term)
            if isinstance(value, float) and isinstance(before, float) and before >= value:
                continue
            values[effect.term], by[effect.term] = value, use.technique.name
    return StepWork(values, by)


def kernels() -> dict[str, float]:
    """Every kernel of attention, with what it says it reaches."""
    found = {}
    for name, technique in registry().items():
        for effect in technique.work:
            if effect.term == "attention":
                found[name] = float(effect.value)
    return found


@dataclass(frozen=True)
class MemoryEffects:
    """What the techniques of a recipe do together to the terms."""

    factors: Mapping[str, float]
    sizes: Mapping[str, float]
    keeps: frozenset[str] | None = None
    """What stays of a block's tensors; None: all."""

    def factor(self, term: str) -> float:
        assert term in TERMS, term
        return self.factors.get(term, 1.0 if term in PLAIN else 0.0)

    def size(self, term: str, plain: float) -> float:
        return self.sizes.get(term, plain)


def effects_of(uses: Iterable[Use], axes: Iterable[str] = ()) -> MemoryEffects:
    """All effects together. Those of the layout's axes count only where they add a term: the planner divides."""
    factors: dict[str, float] = {}
    sizes: dict[str, float] = {}
    keeps: frozenset[str] | None = None
    for use in uses:
        for effect in use.technique.memory:
            assert effect.term in TERMS, f"{use.technique.name}: {effect.term} is no term of a plan"
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
