"""Ids of the Hugging Face hub in a recipe: a run records their commits, so that a resumed run uses the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rush.data.conversations.rows import pinned_rows
from rush.data.sources import pinned_source
from rush.hub.remote import local_folder, pinned_name, same_repository
from rush.parallel import Ranks
from rush.recipe import Recipe
from rush.recipe_io import changed

Note = Callable[[str], None]


def with_commits(recipe: Recipe, ranks: Ranks, note: Note) -> Recipe:
    """The recipe with the current commits of its ids: rank 0 queries the hub and broadcasts the answer.

    The model is downloaded by one process of each host, while the others wait for it.
    """
    found = ranks.on_rank0(lambda: _commits(recipe, note))
    if found:
        recipe = changed(recipe, found)
    if recipe.model.init_from is not None:
        named = recipe.model.init_from
        ranks.rank0_first(lambda: local_folder(named, note))
    return recipe


def _commits(recipe: Recipe, note: Note) -> dict[str, Any]:
    data = recipe.data
    pin = pinned_source if recipe.objective.kind == "lm" else pinned_rows
    now = {
        "model.init_from": (recipe.model.init_from, pinned_name(recipe.model.init_from, note)),
        "data.source": (data.source, pin(data.source, data.files, note)),
    }
    return {key: new for key, (old, new) in now.items() if new != old}


def as_recorded(given: Recipe, stored: Recipe) -> Recipe:
    """The recipe given to resume a run, with the commits of the run where it names the same repositories without a commit."""
    taken: dict[str, Any] = {}
    if same_repository(stored.model.init_from, given.model.init_from):
        taken["model.init_from"] = stored.model.init_from
    if _plain(stored.data.source) == _plain(given.data.source) and "@" in stored.data.source:
        taken["data.source"] = stored.data.source
    return changed(given, taken) if taken else given


def _plain(source: str) -> str:
    """A source without its revision."""
    name, at, rest = source.partition("@")
    return name if not at else name + "".join(rest.partition(":")[1:])
