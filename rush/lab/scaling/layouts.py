"""Layouts by name: what `zero2` or `zero3xtp2` on eight devices means in a recipe.

A name is an axis (`ddp`, `fsdp`, `tp`, `pp`, `cp`), a ZeRO stage (`zero1`, `zero2`, `zero3`), `hybrid` (replicas of a sharded
model), or a combination: in `zero3xtp2` tensor parallelism has two ranks and the sharding all others. A layout that does not
divide the number of devices is refused; the study records the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rush.errors import RecipeError, nearest
from rush.parallel import AXES
from rush.recipe import Recipe
from rush.recipe_io import parse

ONE = "one device"
_STAGES = {"zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
NAMES = ("ddp", "fsdp", *_STAGES, "hybrid", "tp", "pp", "cp")


@dataclass(frozen=True)
class AxisSize:
    """One axis of a layout's name, and its size if given."""

    name: str
    size: int | None

    @property
    def axis(self) -> str:
        return "fsdp" if self.name in _STAGES else self.name


def read_layout(text: str) -> tuple[AxisSize, ...]:
    """The axes in a layout's name."""
    parts = tuple(_part(word, text) for word in text.split("x"))
    axes = [axis for part in parts for axis in (("ddp", "fsdp") if part.name == "hybrid" else (part.axis,))]
    if twice := sorted({axis for axis in axes if axes.count(axis) > 1}):
        raise RecipeError(f"the layout {text!r} divides by {twice[0]} twice; name each axis once.")
    if sum(part.size is None for part in parts) > 1:
        raise RecipeError(
            f"in the layout {text!r} more than one factor has no size; write all but one with it, as in zero3xtp2."
        )
    return parts


def _part(word: str, text: str) -> AxisSize:
    for name in sorted(NAMES, key=len, reverse=True):
        size = word.removeprefix(name)
        if size != word and (not size or (size.isdigit() and int(size) > 0)):
            return AxisSize(name, int(size) if size else None)
    raise RecipeError(
        f"--layouts names {text!r}, which is none; {nearest(word, NAMES)} Combinations are written as in zero3xtp2."
    )


def sizes_of(text: str, devices: int) -> dict[str, int]:
    """The sizes of the layout's axes on this number of devices."""
    parts = read_layout(text)
    given = 1
    for part in parts:
        given *= part.size or 1
    left, rest = divmod(devices, given)
    open_ended = any(part.size is None for part in parts)
    if rest or not left or (left > 1 and not open_ended):
        allowed = f"a multiple of {given}" if open_ended else str(given)
        raise RecipeError(f"the layout {text} takes {allowed} devices; found {devices}.")
    sizes: dict[str, int] = {}
    for part in parts:
        size = part.size or left
        if part.name == "hybrid":
            if size < 4 or size % 2:
                raise RecipeError(
                    f"the layout {text} makes two replicas of a model with at least two shards, which takes an even "
                    f"number of devices from 4; found {size}."
                )
            sizes |= {"ddp": 2, "fsdp": size // 2}
        else:
            sizes[part.axis] = size
    return sizes


def base_of(recipe: Recipe) -> Recipe:
    """The recipe for one device. A recipe with a layout is refused: the study sets it."""
    for axis, size in recipe.layout.model_dump().items():
        if size != 1:
            raise RecipeError(
                f"layout.{axis} is {size}, but a study of scale sets the layout itself; take it out and name it in --layouts, "
                f"as in --layouts {axis} or zero3x{axis}{size}."
            )
    named = zip(recipe.techniques, recipe.technique_uses(), strict=True)
    return recipe.model_copy(update={"techniques": [entry for entry, (name, _) in named if name not in AXES]})


def laid_out(recipe: Recipe, text: str, devices: int, total_tokens: int) -> Recipe:
    """The recipe on this number of devices with this layout and step; RecipeError if there is none."""
    tree: dict[str, Any] = base_of(recipe).model_dump(exclude_none=True)
    tree["batch"] |= {"total_tokens": total_tokens, "schedule": None}
    if devices == 1:
        return parse(tree)
    knobs: dict[str, Mapping[str, Any]] = {n: k for n, k in recipe.technique_uses() if n in AXES}
    sizes = sizes_of(text, devices)
    tree["layout"] = sizes
    for part in read_layout(text):
        own = dict(knobs.get(part.axis, {}))
        if part.name in _STAGES:
            own["stage"] = _STAGES[part.name]
        if own and sizes.get(part.axis, 1) > 1:
            tree["techniques"].append({"name": part.axis, **own})
    return parse(tree)
