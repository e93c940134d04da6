"""The ready files that come with the package (recipes, ladders, pipelines): their folders, and how to read one.

Nothing heavy is imported here, because shell completion must be fast.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.errors import RecipeError, nearest
from rush.files import read_file


def short_name(name_or_path: str) -> str:
    """A short name for the output of a ready file or a path: its name without folder and extension. (A name may contain dots.)"""
    return Path(name_or_path).name.removesuffix(".toml")


DATA = (".jsonl", ".json", ".parquet", ".txt", ".csv")


@dataclass(frozen=True)
class Ready:
    """The ready files of one kind."""

    kind: str

    @property
    def folder(self) -> Path:
        """Inside an installed package, or beside it in a checkout."""
        package = Path(__file__).resolve().parent
        installed = package / f"_{self.kind}s"
        return installed if installed.is_dir() else package.parent / f"{self.kind}s"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def find(self, name_or_path: str) -> Path:
        """The file of a ready name, or the path as it is."""
        if self.kind == "recipe" and name_or_path.endswith(DATA):
            example = "sft" if name_or_path.endswith(".jsonl") else "tiny"
            raise RecipeError(
                f"{name_or_path} is a data file, but a recipe is expected, which names its data: "
                f"as in {example} data.source=files 'data.files=[\"{name_or_path}\"]'."
            )
        if name_or_path.endswith(".toml") or "/" in name_or_path:
            return Path(name_or_path).expanduser()
        path = self.folder / f"{name_or_path}.toml"
        if not os.path.isfile(path):
            raise RecipeError(
                f"there is no {self.kind} named {name_or_path!r}; {nearest(name_or_path, self.names())} "
                "A path to a .toml file works too."
            )
        return path

    def read(self, path: Path) -> dict[str, Any]:
        """The tree in a file of this kind."""
        try:
            return tomllib.loads(read_file(path).decode())
        except (OSError, ValueError, RecursionError) as error:
            raise RecipeError(self._problem(path, error)) from None

    def _problem(self, path: Path, error: Exception) -> str:
        """Why a file cannot be read, and what to do."""
        match error:
            case FileNotFoundError():
                return f"no {self.kind} file at {path}; give an existing .toml file or the name of a ready {self.kind}."
            case IsADirectoryError():
                return f"{path} is a folder; a {self.kind} is a .toml file."
            case PermissionError():
                return f"{path} may not be read by this user; change its permissions."
            case OSError():
                return f"{path} cannot be read ({error.strerror}); give an existing .toml file or the name of a ready {self.kind}."
            case UnicodeDecodeError():
                return f"{path} is not UTF-8 text (byte {error.start}); save the {self.kind} as UTF-8."
            case tomllib.TOMLDecodeError():
                return f"{path} is not valid TOML: {error}."
            case RecursionError():
                return f"{path} is nested too deeply for a {self.kind}; write it with fewer brackets."
            case _:  # Python's own limit for the conversion of integers
                return f"{path} holds a number with thousands of digits; write a smaller one."


RECIPES, LADDERS, PIPELINES = Ready("recipe"), Ready("ladder"), Ready("pipeline")
