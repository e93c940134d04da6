"""Hugging Face's names of our parameters, and where they lie in the stored tensors.

A stored tensor may be the transpose of ours (GPT-2's linear weights are [in, out]), or hold several of ours as its rows
(Phi-3's queries, keys and values). A file may have the base model's prefix or not (without it the base model was saved without
its head), so files are read by names without the prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rush.models.counts import ParameterSpec, list_parameters
from rush.models.families import FAMILIES
from rush.models.shape import Shape

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the files."""

    stored: str
    """The name of its tensor, without the base model's prefix."""
    rows: tuple[int, int] | None = None
    """First row and one past the last, where the tensor holds others too."""
    transposed: bool = False


def places(shape: Shape) -> dict[str, Place]:
    """The place of every parameter, by our names."""
    specs = list_parameters(shape)
    rows = {spec.name: spec.dims[0] for spec in specs}
    transposed = FAMILIES[shape.family].transposed
    return {
        # The LM head is an nn.Linear there, too.
        spec.name: Place(
            stored_name(shape, spec.name),
            _rows(shape, spec.name, rows),
            transposed and spec.matmul and spec.role != "head",
        )
        for spec in specs
    }


def stored_name(shape: Shape, name: str) -> str:
    """The name of the tensor that holds a parameter, without the base model's prefix."""
    if name == "head.weight":
        return HEAD
    family = FAMILIES[shape.family]
    path, kind = name.rsplit(".", 1)
    block, own = _split(path)
    if block is None:
        return f"{family.names[own]}.{kind}"
    joined = next((theirs for theirs, ours in family.joined.items() if own in ours), family.names[own])
    return f"{family.names['blocks']}.{block}.{joined}.{kind}"


def exported_name(shape: Shape, name: str) -> str:
    """A parameter's name in a file that rush writes, with the prefix."""
    stored = stored_name(shape, name)
    return stored if name == "head.weight" else FAMILIES[shape.family].prefixes[0] + stored


def without_prefix(shape: Shape, stored: str) -> str:
    """A stored name without the base model's prefix, the longest one that fits."""
    for prefix in sorted(FAMILIES[shape.family].prefixes, key=len, reverse=True):
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def is_ignored(shape: Shape, name: str) -> bool:
    """Whether a tensor belongs to another part of the model, such as its vision tower."""
    ignored = FAMILIES[shape.family].ignored
    return bool(ignored) and name.startswith(ignored)


def is_joined(shape: Shape, name: str) -> bool:
    """Whether the files hold a module of ours together with others."""
    return any(_split(name)[1] in ours for ours in FAMILIES[shape.family].joined.values())


def stored_dims(shape: Shape, members: list[ParameterSpec], transposed: bool) -> tuple[int, ...]:
    """The dims of a stored tensor that holds these parameters."""
    first = members[0].dims
    dims = (sum(spec.dims[0] for spec in members), *first[1:])
    return dims[::-1] if transposed else dims


def _split(path: str) -> tuple[str | None, str]:
    """The number of a module's block and its name there; of modules outside blocks, None."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
    return (match[1], match[2]) if match else (None, path)


def _rows(shape: Shape, name: str, rows: dict[str, int]) -> tuple[int, int] | None:
    path, kind = name.rsplit(".", 1)
    block, own = _split(path)
    for ours in FAMILIES[shape.family].joined.values() if block is not None else ():
        if own in ours:
            before = [f"blocks.{block}.{member}.{kind}" for member in ours[: ours.index(own)]]
            first = sum(rows[member] for member in before)
            return first, first + rows[name]
    return None
