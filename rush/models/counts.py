"""Counting: which tensors a shape has, how many parameters, how many floating-point operations.

Everything here is arithmetic on a `Shape`; no tensor is made, so an 8B model is counted in
microseconds. The list of parameters is also the one source for the initial values and for the
mapping to Hugging Face names, which keeps the three from drifting apart.

FLOPs: a matmul parameter costs one multiply and one add per token forward, and twice that backward:
6 in all. Scores and their product with the values cost 4·hidden per query and key forward, 12 with
the backward pass; a causal query meets half the keys on average, hence 6·layers·hidden·sequence.
Norms, activations, softmax and the embedding lookup are left out: they move memory, not the FLOPs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rush.models.shape import Shape


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of the model under its qualified name. `matmul` marks the weights of linear layers."""

    name: str
    role: str
    dims: tuple[int, ...]
    matmul: bool

    @property
    def count(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class TableRow:
    """One line of the shape table: the same tensor of every layer, counted together."""

    role: str
    name: str
    dims: tuple[int, ...]
    copies: int
    parameters: int
    matmul_parameters: int


def list_parameters(shape: Shape) -> tuple[ParameterSpec, ...]:
    """Every tensor that is trained, in the model's own order. A tied head adds no tensor."""
    specs = [ParameterSpec("embedding.weight", "embedding", (shape.vocab_size, shape.hidden), False)]
    if shape.family == "gpt2":
        specs.append(
            ParameterSpec("position_embedding.weight", "positions", (shape.context, shape.hidden), False)
        )
    for layer in range(shape.num_layers):
        specs += _block_parameters(shape, f"blocks.{layer}.")
    specs += _norm(shape, "final_norm")
    if not shape.tied_head:
        specs.append(ParameterSpec("head.weight", "head", (shape.vocab_size, shape.hidden), True))
    return tuple(specs)


def count_parameters(shape: Shape) -> int:
    """Trained parameters, a tied head counted once."""
    return sum(spec.count for spec in list_parameters(shape))


def matmul_parameters(shape: Shape) -> int:
    """Parameters every token is multiplied with: linear weights and the head (tied or not), no lookups."""
    tied = shape.vocab_size * shape.hidden if shape.tied_head else 0
    return tied + sum(spec.count for spec in list_parameters(shape) if spec.matmul)


def flops_per_token(shape: Shape, sequence: int, *, frozen: bool = False) -> int:
    """Forward and backward FLOPs of one token in a causal row of `sequence` tokens.

    Where the weights are frozen (adapters beside them learn) nobody computes their gradients: a third less.
    """
    attention_width = shape.num_heads * shape.head_dim
    products = 4 if frozen else 6
    return products * matmul_parameters(shape) + 6 * shape.num_layers * attention_width * sequence


def parameter_table(shape: Shape) -> tuple[TableRow, ...]:
    """The tensors by role, the layers folded into one row each: a model's shape at a glance.

    A tied head is listed with no copies and no parameters of its own, but with its matmul.
    """
    folded: dict[str, list[ParameterSpec]] = {}
    for spec in list_parameters(shape):
        folded.setdefault(re.sub(r"^blocks\.\d+\.", "blocks.*.", spec.name), []).append(spec)
    rows = [_row(name, specs) for name, specs in folded.items()]
    if shape.tied_head:
        dims = (shape.vocab_size, shape.hidden)
        rows.append(TableRow("head", "head.weight (tied)", dims, 0, 0, math.prod(dims)))
    return tuple(rows)


def _row(name: str, specs: list[ParameterSpec]) -> TableRow:
    parameters = sum(spec.count for spec in specs)
    first = specs[0]
    return TableRow(first.role, name, first.dims, len(specs), parameters, parameters if first.matmul else 0)


def _block_parameters(shape: Shape, prefix: str) -> Iterator[ParameterSpec]:
    hidden, wide = shape.hidden, shape.intermediate
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    bias = shape.family == "gpt2"
    yield from _norm(shape, f"{prefix}attention_norm")
    if shape.family == "gpt2":
        yield from _linear(f"{prefix}attention.qkv", "qkv", query + 2 * key, hidden, bias)
    else:
        yield from _linear(f"{prefix}attention.q", "q", query, hidden, bias)
        yield from _linear(f"{prefix}attention.k", "k", key, hidden, bias)
        yield from _linear(f"{prefix}attention.v", "v", key, hidden, bias)
    yield from _linear(f"{prefix}attention.out", "attention_out", hidden, query, bias)
    yield from _norm(shape, f"{prefix}mlp_norm")
    if shape.family == "llama":
        yield from _linear(f"{prefix}mlp.gate", "mlp_gate", wide, hidden, bias)
    yield from _linear(f"{prefix}mlp.up", "mlp_up", wide, hidden, bias)
    yield from _linear(f"{prefix}mlp.down", "mlp_down", hidden, wide, bias)


def _linear(name: str, role: str, rows: int, columns: int, bias: bool) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{name}.weight", role, (rows, columns), True)
    if bias:
        yield ParameterSpec(f"{name}.bias", role, (rows,), False)


def _norm(shape: Shape, name: str) -> Iterator[ParameterSpec]:
    role = name.rsplit(".", 1)[-1]
    yield ParameterSpec(f"{name}.weight", role, (shape.hidden,), False)
    if shape.family == "gpt2":
        yield ParameterSpec(f"{name}.bias", role, (shape.hidden,), False)
