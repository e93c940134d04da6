"""The workloads of `rush bench models`, as `workloads.toml` beside this file lists them.

A workload is a model and a batch, one baseline, and one or more of our recipes with their targets: a ratio of
tokens per second, and optionally one of memory. Or it measures the longest sequence that fits, with a
published figure instead of a baseline. Everything becomes recipes here, which can be read, and run with `rush
train`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rush.bench.baseline_preferences import WRITTEN_OUT, trl_missing
from rush.bench.baseline_run import BaselineOptions
from rush.bench.nanogpt import NanoGPTOptions
from rush.errors import RecipeError, nearest
from rush.lab.ladder.ladder_file import MeasureConfig, ParityConfig, change
from rush.recipe import Recipe
from rush.recipe_io import apply_override, parse, read_tree

FILE = Path(__file__).with_name("workloads.toml")


@dataclass(frozen=True)
class BaselineKind:
    measure: str
    """What a trial of this kind runs."""
    options: type | None = None
    """What the workload's table may say beside its title, kind and recipe; None: techniques."""

    @property
    def keys(self) -> tuple[str, ...]:
        own = ("techniques",) if self.options is None else (field.name for field in fields(self.options))
        return ("title", "kind", "recipe", "changes", *own)


KINDS = {
    "recipe": BaselineKind("measure"),
    "transformers": BaselineKind("rush.bench.baseline_run:measure_baseline", BaselineOptions),
    "nanogpt": BaselineKind("rush.bench.nanogpt:measure_nanogpt", NanoGPTOptions),
}


@dataclass(frozen=True)
class BaselineSpec:
    title: str
    kind: str
    """`recipe`: our own plain model with the baseline's techniques. `transformers`: that library's model. `nanogpt`: GPT-2 as
    nanoGPT has it, in plain torch (`rush.bench.nanogpt`)."""
    recipe: Recipe
    options: Mapping[str, Any]
    """How a model that is not ours is built: `BaselineOptions` of transformers, `NanoGPTOptions`."""


@dataclass(frozen=True)
class TargetedRecipe:
    name: str
    recipe: Recipe
    at_least: float
    parity: ParityConfig
    memory_at_most: float | None = None
    """Peak memory over the baseline's that ours must not exceed; None where nothing is asked."""
    primary: bool = True
    """Whether this is the recipe that the target is for; others are measured beside it."""


@dataclass(frozen=True)
class LongestSpec:
    """How long a sequence fits: tried at the probes, then where the line through their memory meets the limit."""

    probes: tuple[int, ...]
    published: int
    """The best figure that others give, in tokens."""
    source: str
    up_to: int | None = None


@dataclass(frozen=True)
class WorkloadSpec:
    name: str
    about: str
    baseline: BaselineSpec | None
    ours: tuple[TargetedRecipe, ...]
    measure: MeasureConfig
    longest: LongestSpec | None = None

    @property
    def any_recipe(self) -> Recipe:
        """One of its recipes: they all read the same text."""
        return self.baseline.recipe if self.baseline else self.ours[0].recipe


OURS_KEYS = ("recipe", "name", "at_least", "memory_at_most", "also", "techniques", "add", "changes", "parity")
WORKLOAD_KEYS = ("about", "batch", "text", "parity", "measure", "ours", "baseline", "longest")


def load_workloads(
    asked: Sequence[str], overrides: Sequence[str] = (), file: Path = FILE
) -> list[WorkloadSpec]:
    """The workloads asked for (all, if none). Overrides change every recipe, or `measure.` keys."""
    tree = tomllib.loads(file.read_text(encoding="utf-8"))
    known = tree["workloads"]
    for name in asked:
        if name not in known:
            raise RecipeError(f"there is no workload named {name!r}; {nearest(name, known)}")
    own = [override for override in overrides if override.startswith("measure.")]
    rest = [override for override in overrides if override not in own]

    def measure(table: Mapping[str, Any]) -> MeasureConfig:
        merged: dict[str, Any] = {"measure": {**tree.get("measure", {}), **table.get("measure", {})}}
        for override in own:
            apply_override(merged, override)
        return MeasureConfig.model_validate(merged["measure"])

    return [
        _workload(name, known[name], tree.get("text", {}), measure(known[name]), rest)
        for name in (dict.fromkeys(asked) or known)
    ]


def _workload(
    name: str,
    table: Mapping[str, Any],
    text: Mapping[str, Any],
    measure: MeasureConfig,
    overrides: Sequence[str],
) -> WorkloadSpec:
    def recipe(entry: Mapping[str, Any]) -> Recipe:
        tree = read_tree(entry["recipe"])
        change(tree, {**text, **table.get("text", {}), **table["batch"], **entry.get("changes", {})})
        if "techniques" in entry:
            tree["techniques"] = list(entry["techniques"])
        tree["techniques"] = [*tree.get("techniques", []), *entry.get("add", [])]
        for override in overrides:
            apply_override(tree, override)
        return parse(tree)

    if "rival" in table:  # what the key was called before
        table = {"baseline" if key == "rival" else key: value for key, value in table.items()}
    _known(f"workloads.{name}", table, WORKLOAD_KEYS)
    ours = tuple(_ours(name, entry, table, recipe(entry)) for entry in table["ours"])
    if "longest" in table:
        longest = LongestSpec(**{**table["longest"], "probes": tuple(table["longest"]["probes"])})
        return WorkloadSpec(name, table["about"], None, ours, measure, longest)
    return WorkloadSpec(name, table["about"], _baseline(name, table["baseline"], recipe), ours, measure)


def _baseline(
    name: str, table: Mapping[str, Any], recipe: Callable[[Mapping[str, Any]], Recipe]
) -> BaselineSpec:
    kind = table["kind"]
    if kind not in KINDS:
        raise RecipeError(f"workloads.{name}.baseline.kind is {kind!r}; {nearest(kind, KINDS)}")
    _known(f"workloads.{name}.baseline", table, KINDS[kind].keys)
    own = KINDS[kind].options
    options = {field.name: table[field.name] for field in fields(own) if field.name in table} if own else {}
    plain: dict[str, Any] = {"techniques": []} if own else {}
    title = str(table["title"])
    if options.get("preferences") == "auto":
        options["preferences"] = "written" if trl_missing() else "trl"
        title = WRITTEN_OUT if trl_missing() else title
    if own is not None:
        own(**options)  # refuses what it cannot be
    return BaselineSpec(title, kind, recipe({**table, **plain}), options)


def _ours(
    workload: str, entry: Mapping[str, Any], table: Mapping[str, Any], recipe: Recipe
) -> TargetedRecipe:
    _known(f"workloads.{workload}.ours", entry, OURS_KEYS)
    if "at_least" not in entry and "longest" not in table:
        raise RecipeError(
            f"workloads.{workload}.ours: {entry['recipe']} has no at_least; give the ratio of tokens per second over the "
            "baseline that it must reach."
        )
    return TargetedRecipe(
        entry.get("name", entry["recipe"]),
        recipe,
        float(entry.get("at_least", 0.0)),
        ParityConfig.model_validate(entry.get("parity") or table.get("parity", {})),
        entry.get("memory_at_most"),
        primary=not entry.get("also", False),
    )


def _known(where: str, table: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in table:
        if key not in keys:
            raise RecipeError(f"{where}.{key} is not a key of a workload; {nearest(key, list(keys))}")
