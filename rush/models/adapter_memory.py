"""What fine-tuning adapters beside a frozen base takes on each rank, by part: arithmetic on a `Shape`.

The ranks of a sharded run hold 1/n of every parameter (cut along its first dim, the first ranks hold the longer pieces),
and for a moment all of the block at work and of the next one. Embedding, last norm and head are one unit that stays whole
for a pass. What lies between two steps (base, adapters, moments) is exact; what comes and goes within one is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from rush.models.adapters import ROLE_GROUPS
from rush.models.counts import ParameterSpec, list_parameters
from rush.models.quantized_formats import Form, stored_parts
from rush.models.shape import Shape


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the first rank's device."""

    base: int
    """Frozen weights, its part of them."""
    adapters: int
    gradients: int
    moments: int
    """What the optimizer keeps, fp32 copies included."""
    gathered: int
    """Whole weights within a pass: embedding and head, the block at work and the next."""
    unpacked: int
    """Bytes of the largest dequantized weight."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def adapter_memory(
    shape: Shape,
    *,
    ranks: int = 1,
    form: Form | None = None,
    rank: int = 16,
    roles: str = "all",
    weight_bytes: int = 2,
    moment_bytes: int = 12,
    tokens: int = 2048,
    logit_tokens: int = 512,
    checkpointed: bool = True,
    offload: bool = False,
) -> RankMemory:
    """Bytes by part for layout.fsdp = `ranks`.

    `weight_bytes` are those of a weight, an adapter's value and its gradient; `moment_bytes` what the optimizer keeps for
    each value (12 with fp32 copies); `tokens` those of a micro batch, `logit_tokens` those that have logits at once. With
    `offload` what a rank holds in parts is in host memory.
    """
    base = sum(
        part_bytes(dims, size, ranks if cut else 1)
        for spec in list_parameters(shape)
        for dims, size, cut in _stored(spec, form, weight_bytes)
    )
    trained = sum(part_bytes(dims, 1, ranks) for dims in _adapters(shape, rank, roles))
    block = _whole(shape, form, weight_bytes, "blocks.0.")
    block += weight_bytes * sum(map(math.prod, _adapters(shape, rank, roles))) // shape.num_layers
    rest = _whole(shape, form, weight_bytes, "") - shape.num_layers * _whole(
        shape, form, weight_bytes, "blocks.0."
    )
    largest = max(spec.count for spec in list_parameters(shape) if _in_codes(spec, form) or form is None)
    held = 0 if offload else 1
    return RankMemory(
        base=held * base,
        adapters=held * trained * weight_bytes,
        gradients=held * trained * weight_bytes,
        moments=held * trained * moment_bytes,
        gathered=0 if ranks == 1 and not offload else rest + 2 * block,
        unpacked=0 if form is None else largest * weight_bytes,
        activations=_activations(shape, tokens, weight_bytes, checkpointed),
        logits=2 * 4 * min(tokens, logit_tokens) * shape.vocab_size,
    )


def part_bytes(dims: tuple[int, ...], element: int, ranks: int) -> int:
    """The first rank's piece of a tensor that is cut along its first dim."""
    return -(-dims[0] // ranks) * math.prod(dims[1:]) * element


def _in_codes(spec: ParameterSpec, form: Form | None) -> bool:
    return form is not None and spec.matmul and spec.name.startswith("blocks.")


def _stored(
    spec: ParameterSpec, form: Form | None, weight_bytes: int
) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """What a parameter is stored as: dims, bytes an element, and whether ranks divide it."""
    if form is None or not _in_codes(spec, form):
        yield spec.dims, weight_bytes, True
        return
    for size, dtype in stored_parts(form, *spec.dims).values():
        yield (size,), dtype.itemsize, not dtype.is_floating_point


def _whole(shape: Shape, form: Form | None, weight_bytes: int, prefix: str) -> int:
    return sum(
        math.prod(dims) * size
        for spec in list_parameters(shape)
        if spec.name.startswith(prefix)
        for dims, size, _ in _stored(spec, form, weight_bytes)
    )


def _adapters(shape: Shape, rank: int, roles: str) -> list[tuple[int, ...]]:
    wanted = ROLE_GROUPS[roles]
    return [
        dims
        for spec in list_parameters(shape)
        if spec.matmul and spec.name.startswith("blocks.") and (wanted is None or spec.role in wanted)
        for dims in ((rank, spec.dims[1]), (spec.dims[0], rank))
    ]


def _activations(shape: Shape, tokens: int, element: int, checkpointed: bool) -> int:
    """The inputs of the blocks, and what the linear layers, norms and attention of one block (or of all) keep."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    of_block = 5 * shape.hidden + heads + shape.num_heads * shape.head_dim + 3 * shape.intermediate
    blocks = 1 if checkpointed else shape.num_layers
    return tokens * element * (shape.num_layers * shape.hidden + blocks * of_block)
