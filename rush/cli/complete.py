"""Shell completion: what the next word may be."""

from __future__ import annotations

from rush.recipe_names import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in recipe_names() if name.startswith(incomplete)]
