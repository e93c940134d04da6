"""Where the ready cleaning pipelines are. Apart from the rest, because shell completion must answer at once."""

from __future__ import annotations

from pathlib import Path


def pipeline_folder() -> Path:
    """Inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "_pipelines"
    return installed if installed.is_dir() else package.parent / "pipelines"


def pipeline_names() -> list[str]:
    return sorted(path.stem for path in pipeline_folder().glob("*.toml"))
