"""Techniques of other packages: an installed package registers them as entry points of the group `rush.techniques`.

    [project.entry-points."rush.techniques"]
    my_technique = "my_package.my_technique:technique"

Discovery reads the metadata of installed packages and imports nothing. A plug-in is imported when a recipe names its
technique, or when all techniques are listed (`rush probe`, `rush tune`). An installed package is trusted as any import is.
A plug-in that cannot be used is an error for a recipe that names it, and a one-line warning otherwise.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from rush.errors import RecipeError
from rush.techniques.api.contract import Technique
from rush.techniques.api.field_types import wrong_type

GROUP = "rush.techniques"
WANTED = "an entry point of rush.techniques names a rush.techniques.Technique, as in my_package.my_technique:technique"


@dataclass(frozen=True)
class Plugin:
    """A technique that an installed package offers."""

    name: str
    entries: tuple[EntryPoint, ...]
    """One, or several where packages offer the same name."""

    @property
    def package(self) -> str:
        """The package with its version, as in `rush-example 1.0`; several where they offer the same name."""
        return " and ".join(sorted(f"{_package(one)} {_version(one)}" for one in self.entries))

    @property
    def package_name(self) -> str:
        return _package(self.entries[0])

    @property
    def version(self) -> str:
        return _version(self.entries[0])

    def load(self) -> Technique:
        """Import the technique, or raise an error with what is wrong with the package."""
        if len(self.entries) > 1:
            raise RecipeError(
                f"the packages {self.package} all offer a technique {self.name!r}; uninstall all but one of them."
            )
        where = f"the technique {self.name!r} of the package {self.package}"
        try:
            found = self.entries[0].load()
        except (Exception, SystemExit) as error:
            says = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise RecipeError(
                f"{where} cannot be imported: {says}. Update or uninstall the package."
            ) from error
        if not isinstance(found, Technique):
            raise RecipeError(f"{where} is a {type(found).__name__}; {WANTED}.")
        if (wrong := wrong_type(found)) is not None:
            raise RecipeError(f"{where} is not complete: {wrong}. Update or uninstall the package.")
        if found.name != self.name:
            raise RecipeError(
                f"{where} is named {found.name!r} in its file; the entry point must have the technique's own name."
            )
        return found


@cache
def offered() -> dict[str, Plugin]:
    """What installed packages offer, by name. Reads metadata only."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        # A folder that is on the path twice lists its packages twice.
        found.setdefault(entry.name, {}).setdefault((_package(entry), entry.value), entry)
    return {name: Plugin(name, tuple(entries.values())) for name, entries in sorted(found.items())}


def digests(names: Iterable[str]) -> list[str]:
    """For those of these techniques that come from packages: name, version, and the SHA-256 of the file that defines it, which
    changes where a package under development does not change its version."""
    return [
        f"{name} {plugin.package} {_source_digest(plugin)}"
        for name in names
        if (plugin := offered().get(name)) is not None
    ]


def _source_digest(plugin: Plugin) -> str:
    file = inspect.getsourcefile(plugin.load().apply)
    return hashlib.sha256(Path(file).read_bytes() if file and Path(file).is_file() else b"").hexdigest()[:16]


@cache
def report(sentence: str) -> None:
    """Write a sentence to standard error, once per process and on one rank."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"rush: {sentence}\n")


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]


def _version(entry: EntryPoint) -> str:
    return entry.dist.version if entry.dist is not None else "of an unknown version"
