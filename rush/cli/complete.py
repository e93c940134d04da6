"""Shell completion: what the next word may be."""

from __future__ import annotations

from rush.ready import RECIPES


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in RECIPES.names() if name.startswith(incomplete)]
