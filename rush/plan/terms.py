"""The things a plan counts in memory, by name: what techniques' `memory` fields speak of.

A plain run (fp32, eager, full scores and logits) has the terms of `PLAIN`; those of `ADDED` exist only where a
technique names them. Widths are those of the plain model's code (`rush/models/layers.py`), read op by op: an
operation keeps for its backward pass what its derivative needs, and a tensor that two operations keep counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rush.techniques import Use

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
}
ADDED = {
    "frozen": "the weights do not learn; adapters do",
    "master": "fp32 copies of trained weights",
    "casts": "weights in the dtype of the products, kept from forward to backward pass",
    "attention.output": "attention's result as its kernel keeps it, and a number for each query and head",
    "attention.projected": "what attention adds to the stream",
    "logits.tokens": "how many tokens' logits exist at once; below 1: their share of all",
    "head.gradient": "the gradient of the head, made in the forward pass",
    "passes": "into how many passes a micro batch is cut",
    "seams": "compiled chunks of a loss are not ordered one after another: the share of logits held at once",
    "gathered": "of a sharded model, the weights of all blocks instead of those at work",
    "on_host": "of a sharded model, the parts that a rank keeps lie in host memory, where the update is made",
    "whole_gradients": "of a sharded model, the gradients in full until the last pass",
    "buckets": "a second copy of the gradients, for sending",
    "recording": "memory that a recorded pass keeps apart",
}
TERMS = PLAIN | ADDED


@dataclass(frozen=True)
class Effects:
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


def settle(uses: Iterable[Use], axes: Iterable[str] = ()) -> Effects:
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
    return Effects(factors, sizes, keeps)
