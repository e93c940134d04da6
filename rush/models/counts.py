"""Parameter and FLOP counts of a shape.

This is arithmetic on a `Shape`: no tensor is allocated. The list of parameters is also the source of the initial values and
of the mapping to Hugging Face names, so that the three agree.

FLOPs: a weight of a linear layer takes one multiply and one add per token forward, and twice that backward: 6 in total. The
two matmuls of attention take 4·hidden per query and key forward, 12 with the backward pass; a causal query attends to half
the keys on average, hence 6·layers·hidden·sequence; with a sliding window to fewer. Norms, activations, softmax and the embedding lookup are left out: they
are bound by memory bandwidth.
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
    """One row of the parameter table: the same tensor of all layers."""

    role: str
    name: str
    dims: tuple[int, ...]
    copies: int
    parameters: int
    matmul_parameters: int


def list_parameters(shape: Shape) -> tuple[ParameterSpec, ...]:
    """All parameters, in the order of the model. A tied head adds none."""
    specs = [ParameterSpec("embedding.weight", "embedding", (shape.vocab_size, shape.hidden), False)]
    if shape.learned_positions:
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
    """Number of parameters, a tied head counted once."""
    return sum(spec.count for spec in list_parameters(shape))


def matmul_parameters(shape: Shape) -> int:
    """Parameters used in matmuls: linear layers and the LM head (tied or not), without the embedding lookup."""
    tied = shape.vocab_size * shape.hidden if shape.tied_head else 0
    return tied + sum(spec.count for spec in list_parameters(shape) if spec.matmul)


def flops_per_token(shape: Shape, sequence: int, *, frozen: bool = False) -> int:
    """Forward and backward FLOPs of one token in a causal row of `sequence` tokens.

    With frozen weights (adapters) their gradients are not computed: a third less.
    """
    attention_width = shape.num_heads * shape.head_dim
    per_weight = 4 if frozen else 6
    keys = sum(round(2 * mean_keys(shape, layer, sequence)) for layer in range(shape.num_layers))
    return per_weight * matmul_parameters(shape) + 6 * attention_width * keys


def mean_keys(shape: Shape, layer: int, sequence: float) -> float:
    """How many keys a query attends to on average: half of the row, or with a window w about w, less at the row's start."""
    window = shape.window_of(layer)
    if window is None or window >= sequence:
        return sequence / 2
    return window - window * window / (2 * sequence)


def parameter_table(shape: Shape) -> tuple[TableRow, ...]:
    """Parameters by role, all layers in one row. A tied head has no parameters of its own, but a matmul."""
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
    qkv_bias, bias = shape.qkv_biases, shape.all_biases
    if shape.norms_before:
        yield from _norm(shape, f"{prefix}attention_norm")
    if shape.joined_qkv:
        yield from _linear(f"{prefix}attention.qkv", "qkv", query + 2 * key, hidden, bias)
    else:
        yield from _linear(f"{prefix}attention.q", "q", query, hidden, qkv_bias)
        yield from _linear(f"{prefix}attention.k", "k", key, hidden, qkv_bias)
        yield from _linear(f"{prefix}attention.v", "v", key, hidden, qkv_bias)
    if shape.qk_norm != "none":
        heads = shape.qk_norm == "head"
        yield from _norm(shape, f"{prefix}attention.q_norm", shape.head_dim if heads else query)
        yield from _norm(shape, f"{prefix}attention.k_norm", shape.head_dim if heads else key)
    yield from _linear(f"{prefix}attention.out", "attention_out", hidden, query, bias)
    if shape.norms_before:
        yield from _norm(shape, f"{prefix}mlp_norm")
    if shape.gated_mlp:
        yield from _linear(f"{prefix}mlp.gate", "mlp_gate", wide, hidden, bias)
    yield from _linear(f"{prefix}mlp.up", "mlp_up", wide, hidden, bias)
    yield from _linear(f"{prefix}mlp.down", "mlp_down", hidden, wide, bias)
    if shape.norms_after:
        yield from _norm(shape, f"{prefix}attention_post_norm")
        yield from _norm(shape, f"{prefix}mlp_post_norm")


def _linear(name: str, role: str, rows: int, columns: int, bias: bool) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{name}.weight", role, (rows, columns), True)
    if bias:
        yield ParameterSpec(f"{name}.bias", role, (rows,), False)


def _norm(shape: Shape, name: str, width: int | None = None) -> Iterator[ParameterSpec]:
    role, dims = name.rsplit(".", 1)[-1], (width or shape.hidden,)
    yield ParameterSpec(f"{name}.weight", role, dims, False)
    if shape.norm == "layer":
        yield ParameterSpec(f"{name}.bias", role, dims, False)
