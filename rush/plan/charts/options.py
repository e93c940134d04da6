"""The options of a chart, and the recipe variants that charts compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rush.errors import RecipeError
from rush.parallel import AXES
from rush.plan.describe import alternatives
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.techniques.api.contract import Alternative

USUAL = 'techniques=["amp_bf16", "flash_attention", "fused_adamw", {name = "compile", scope = "block"}]'
"""The usual mixed precision of most trainers, which a chart plans unless it gets a recipe."""
STAGES = {"ZeRO-1": "optimizer", "ZeRO-2": "gradients", "ZeRO-3": "parameters"}
DDP = "ddp"
SHARDINGS = (DDP, *STAGES)
Entries = list[Any]


@dataclass(frozen=True)
class ChartOptions:
    """The options of `rush plan --chart`; None where the chart has its own default."""

    recipe: str | None = None
    overrides: Sequence[str] = ()
    machine: str | None = None
    against: str | None = None
    devices: int | None = None
    nodes: int | None = None
    link: str | None = None
    network: str | None = None

    def load(self, usual: str, *changes: str) -> tuple[str, Recipe]:
        """The requested recipe, or the chart's own with the usual techniques; its name and the additional overrides."""
        name = self.recipe or usual
        own = [] if self.recipe else [USUAL, *changes]
        found = load_recipe(name, [*own, *self.overrides], auto=True)
        for axis, size in found.layout.model_dump().items():
            if size != 1:
                raise RecipeError(
                    f"layout.{axis} is {size}, but a chart sets the layouts itself; take it out of the recipe or the command."
                )
        if found.model.name != name and any(one.startswith("model.name") for one in self.overrides):
            name = found.model.name
        return name, found


def doubling(most: int, least: int = 1) -> list[int]:
    """1, 2, 4, … up to `most`; RecipeError where `most` is no power of two."""
    if most & (most - 1) or most < least:
        raise RecipeError(f"the largest number of a chart is {most}; allowed: a power of two from {least}.")
    return [1 << k for k in range(least.bit_length() - 1, most.bit_length())]


def bare(recipe: Recipe, *, checkpointing: bool = True) -> Entries:
    """The recipe's techniques without layouts, which charts set; without checkpointing where they set that, too."""
    set_here = {*AXES, *(() if checkpointing else alternatives(Alternative.CHECKPOINTING))}
    found: Entries = []
    for name, knobs in recipe.technique_uses():
        if name == "compile":  # a graph of the whole model goes with no layout that gathers weights
            found.append({"name": name, **knobs, "scope": "block"})
        elif name not in set_here:
            found.append({"name": name, **knobs} if knobs else name)
    return found


def in_sharding(
    recipe: Recipe, sharding: str, devices: int, checkpointing: str | None = None
) -> Mapping[str, Any]:
    """Keys that divide the recipe among devices by ddp or a ZeRO stage, with its own checkpointing, another, or ("") none."""
    entries = bare(recipe, checkpointing=checkpointing is None)
    if checkpointing:
        entries.append(checkpointing)
    if devices == 1:
        return {"techniques": entries, "layout__ddp": 1, "layout__fsdp": 1}
    if sharding == DDP:
        return {"techniques": entries, "layout__ddp": devices, "layout__fsdp": 1}
    return {
        "techniques": [*entries, {"name": "fsdp", "stage": STAGES[sharding]}],
        "layout__fsdp": devices,
        "layout__ddp": 1,
    }
