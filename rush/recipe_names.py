"""Where the ready recipes are. Apart from the rest, because shell completion must answer at once."""

from __future__ import annotations

from pathlib import Path


def recipe_folder() -> Path:
    """Inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipe_folder().glob("*.toml"))
