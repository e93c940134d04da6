"""The workloads of `rush bench models`, as `workloads.toml` beside this file lists them.

A workload is a model and a batch, one rival, and one or more of our recipes with the ratio each must reach.
Everything becomes recipes here, so that what is measured can be read, and run by itself with `rush train`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.errors import RecipeError, nearest
from rush.lab.ladder_file import Measure, Parity, change
from rush.recipe import Recipe
from rush.recipe_io import apply_override, parse, read_tree

FILE = Path(__file__).with_name("workloads.toml")
KINDS = ("recipe", "transformers")


@dataclass(frozen=True)
class Rival:
    title: str
    kind: str
    """`recipe`: our own plain model with the techniques the rival uses. `transformers`: that library's model."""
    recipe: Recipe
    options: Mapping[str, Any]
    """For transformers: the dtype of the weights, and whether Liger's kernels are put in."""


@dataclass(frozen=True)
class Ours:
    name: str
    recipe: Recipe
    at_least: float
    parity: Parity


@dataclass(frozen=True)
class Workload:
    name: str
    about: str
    rival: Rival
    ours: tuple[Ours, ...]
    measure: Measure


def load_workloads(asked: Sequence[str], overrides: Sequence[str] = (), file: Path = FILE) -> list[Workload]:
    """The workloads asked for (all, if none). Overrides change every recipe, or `measure.` keys."""
    tree = tomllib.loads(file.read_text(encoding="utf-8"))
    known = tree["workloads"]
    for name in asked:
        if name not in known:
            raise RecipeError(f"there is no workload named {name!r}; {nearest(name, known)}")
    own = [override for override in overrides if override.startswith("measure.")]
    for override in own:
        apply_override(tree, override)
    measure = Measure.model_validate(tree.get("measure", {}))
    rest = [override for override in overrides if override not in own]
    return [
        _workload(name, known[name], tree.get("text", {}), measure, rest)
        for name in (dict.fromkeys(asked) or known)
    ]


def _workload(
    name: str, table: Mapping[str, Any], text: Mapping[str, Any], measure: Measure, overrides: Sequence[str]
) -> Workload:
    def recipe(entry: Mapping[str, Any]) -> Recipe:
        tree = read_tree(entry["recipe"])
        change(tree, {**text, **table["batch"], **entry.get("changes", {})})
        if "techniques" in entry:
            tree["techniques"] = list(entry["techniques"])
        tree["techniques"] = [*tree.get("techniques", []), *entry.get("add", [])]
        for override in overrides:
            apply_override(tree, override)
        return parse(tree)

    rival = table["rival"]
    assert rival["kind"] in KINDS, rival["kind"]
    plain = rival["kind"] == "transformers"
    options = {key: rival[key] for key in ("dtype", "with_liger") if key in rival}
    return Workload(
        name,
        table["about"],
        Rival(
            rival["title"], rival["kind"], recipe({**rival, "techniques": []} if plain else rival), options
        ),
        tuple(_ours(entry, table, recipe(entry)) for entry in table["ours"]),
        measure,
    )


def _ours(entry: Mapping[str, Any], table: Mapping[str, Any], recipe: Recipe) -> Ours:
    parity = Parity.model_validate(entry.get("parity") or table.get("parity", {}))
    return Ours(entry.get("name", entry["recipe"]), recipe, float(entry["at_least"]), parity)
