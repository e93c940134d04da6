"""Where the ready ladders are. Apart from the rest, because shell completion must answer at once."""

from __future__ import annotations

from pathlib import Path


def ladder_folder() -> Path:
    """Inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_ladders"
    return installed if installed.is_dir() else package.parent / "ladders"


def ladder_names() -> list[str]:
    return sorted(path.stem for path in ladder_folder().glob("*.toml"))
