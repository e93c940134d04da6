"""The records that story.sh packed, by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any


class Records:
    """What the run left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def value(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def text(self, name: str) -> str:
        return (self.folder / name).read_text().strip()

    def recipe(self, run: str) -> dict[str, Any]:
        return tomllib.loads(self.text(f"{run}/recipe.toml"))

    def kills(self) -> list[list[dict[str, Any]]]:
        return [self.rows(f"kills/{number}.jsonl") for number in (1, 2)]

    def remarks(self) -> str:
        """What whoever ran it has to say about the circumstances, if anything."""
        return self.text("remarks.txt") if (self.folder / "remarks.txt").is_file() else ""
