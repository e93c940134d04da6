"""The techniques: one file each. This module registers them and checks a recipe against them.

A new technique is a new file that defines `technique`; nothing else needs its name. Further ones come from installed packages
(`rush/techniques/api/plugins.py`) and from files that a command names (`rush/techniques/api/own_files.py`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import groupby

from rush.errors import MachineError, RecipeError, nearest
from rush.hardware import Machine
from rush.parallel import AXES, DATA_AXES
from rush.recipe import Knob, Recipe
from rush.techniques.api.contract import Build, Claim, Parity, Pass, Requirement, Stage, Technique, Use
from rush.techniques.api.known import KnownTechniques

__all__ = [
    "Build",
    "Claim",
    "Parity",
    "Pass",
    "Requirement",
    "Stage",
    "Technique",
    "Use",
    "add_axes",
    "check",
    "check_recipe",
    "conflict_reason",
    "group_of",
    "registry",
    "resolve_uses",
]


@cache
def registry() -> KnownTechniques:
    """Every technique by name."""
    found: list[Technique] = []
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        technique = getattr(import_module(module.name), "technique", None)
        if isinstance(technique, Technique):
            assert module.name.endswith(f".{technique.name}"), f"{module.name} defines {technique.name}"
            found.append(technique)
    return KnownTechniques(found)


def group_of(technique: Technique) -> str:
    """The folder that a technique is in: precision, attention, …; of one from a user's file, its module."""
    return technique.apply.__module__.removeprefix(f"{__name__}.").partition(".")[0]


def check(recipe: Recipe, machine: Machine) -> list[Use]:
    """The recipe's techniques in the order of the build, or an error with the reason: names, knobs, conflicts and
    requirements are checked before any memory is allocated."""
    uses = check_recipe(recipe)
    for use in uses:
        for requirement in use.technique.requires:
            if not requirement.met(machine, recipe):
                raise MachineError(
                    f"technique {use.technique.name} cannot run here: {requirement.message}; found {recipe.model.name} on "
                    f"{machine.summary()}. Remove it with techniques-={use.technique.name}, or change what it needs."
                )
    return uses


def check_recipe(recipe: Recipe) -> list[Use]:
    """The checks that need no machine."""
    _check_layout(recipe)
    uses = resolve_uses(recipe)
    for use in uses:
        if use.technique.check_sizes is not None:
            use.technique.check_sizes(recipe, use.knobs)
        if recipe.run.deterministic and (why := use.technique.nondeterministic(recipe, use.knobs)):
            raise RecipeError(
                f"run.deterministic is true, and technique {use.technique.name} is not deterministic: {why}. "
                "Or set run.deterministic=false."
            )
    _check_conflicts(uses)
    return uses


def _check_conflicts(uses: Sequence[Use]) -> None:
    names = {use.technique.name for use in uses}
    for technique in (use.technique for use in uses):
        if clash := sorted(names.intersection(technique.conflicts)):
            reason = conflict_reason(technique, registry()[clash[0]])
            raise RecipeError(
                f"techniques {technique.name} and {clash[0]} cannot be combined{reason and f': {reason}'}; remove one of "
                "them."
            )


def conflict_reason(one: Technique, other: Technique) -> str:
    """Why two techniques conflict, as one of them declares; empty where it is obvious."""
    return one.reasons.get(other.name) or other.reasons.get(one.name) or ""


def resolve_uses(recipe: Recipe) -> list[Use]:
    """The techniques that a recipe names and those that its layout enables, with their knobs, in the order of the build."""
    named = dict(recipe.technique_uses())
    layout = {axis: named.get(axis, {}) for axis in _used_axes(recipe) if axis in registry()}
    return in_order(_resolve(name, knobs) for name, knobs in {**named, **layout}.items())


def add_axes(uses: Sequence[Use], axes: Iterable[str]) -> list[Use]:
    """These techniques and those of axes of size 1, for a rank that is its own group."""
    more = in_order([*uses, *(_resolve(axis, {}) for axis in axes)])
    _check_conflicts(more)
    return more


def _resolve(name: str, given: Mapping[str, Knob]) -> Use:
    if name not in registry():
        raise RecipeError(
            f"techniques names {name!r}, which does not exist; {nearest(name, registry())} One of your own: give its file with "
            "--technique FILE (the file is executed), or install its package."
        )
    technique = registry()[name]
    knobs = {key: knob.default for key, knob in technique.knobs.items()}
    for key, value in given.items():
        if key not in knobs:
            tail = nearest(key, knobs) if knobs else "it has none."
            raise RecipeError(f"technique {name} has no knob {key!r}; {tail}")
        allowed = technique.knobs[key].values
        if not any(value == option and type(value) is type(option) for option in allowed):
            listed = ", ".join(repr(option) for option in allowed)
            raise RecipeError(f"technique {name}: {key} is {value!r}; allowed: {listed}.")
        knobs[key] = value
    return Use(technique, knobs)


def in_order(uses: Iterable[Use]) -> list[Use]:
    """The order of the build: by stage, and within a stage each technique after those that its `after` names."""

    def stage_of(use: Use) -> Stage:
        return use.technique.stage

    ranked = sorted(uses, key=lambda use: (stage_of(use), len(use.technique.after), use.technique.name))
    found: list[Use] = []
    for _, group in groupby(ranked, key=stage_of):
        stage = {use.technique.name: use for use in group}
        graph = {
            name: [other for other in use.technique.after if other in stage] for name, use in stage.items()
        }
        if not any(graph.values()):
            found += stage.values()
            continue
        try:
            found += [stage[name] for name in TopologicalSorter(graph).static_order()]
        except CycleError as error:
            raise AssertionError(f"`after` of techniques is a cycle: {' → '.join(error.args[1])}") from None
    return found


def _used_axes(recipe: Recipe) -> dict[str, int]:
    """Axes of the layout above 1. Each is a technique of the same name."""
    return {axis: size for axis, size in recipe.layout if size != 1}


def _check_layout(recipe: Recipe) -> None:
    for axis, size in _used_axes(recipe).items():
        if axis not in registry():
            known = " and ".join(name for name in AXES if name in registry())
            raise RecipeError(
                f"layout.{axis} is {size}; {axis} is not implemented, so the only allowed size is 1. Set "
                f"layout.{axis}=1; implemented: {known}."
            )
    others = [axis for axis in _used_axes(recipe) if axis not in DATA_AXES]
    if recipe.objective.kind == "dpo" and others:
        raise RecipeError(
            f"objective.kind is dpo and layout.{others[0]} is above 1; a preference compares whole answers on one rank, "
            f"so dpo supports {' and '.join(DATA_AXES)} only. Set layout.{others[0]}=1."
        )
