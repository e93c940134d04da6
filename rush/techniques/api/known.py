"""The techniques known to a process, by name: ours, those of installed packages, those of users' files.

Conflicts are mutual, whichever side declares them: a new technique names those it is incompatible with, and
their files stay unchanged. Techniques of packages (`rush/techniques/api/plugins.py`) are imported when they
are looked up or listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace

from rush.errors import RecipeError
from rush.techniques.api.contract import Technique
from rush.techniques.api.plugins import offered, report


class KnownTechniques(MutableMapping[str, Technique]):
    """A mapping that imports techniques of packages on demand and keeps conflicts mutual. A name of ours stays ours."""

    def __init__(self, ours: Iterable[Technique]) -> None:
        self._known: dict[str, Technique] = {}
        for technique in ours:
            self[technique.name] = technique
        self._ours = frozenset(self._known)
        self._unusable: set[str] = set()
        """Techniques of packages that cannot be imported; reported once."""

    def __setitem__(self, name: str, technique: Technique) -> None:
        assert name == technique.name, f"{technique.name} is not {name}"
        declared = {other.name for other in self._known.values() if name in other.conflicts}
        if not declared <= set(technique.conflicts):
            technique = replace(technique, conflicts=tuple(sorted(declared.union(technique.conflicts))))
        self._known[name] = technique
        for other in technique.conflicts:
            if other in self._known and name not in self._known[other].conflicts:
                both = tuple(sorted((*self._known[other].conflicts, name)))
                self._known[other] = replace(self._known[other], conflicts=both)

    def __getitem__(self, name: str) -> Technique:
        if name not in self._known:
            self[name] = offered()[name].load()
        elif name in self._ours and name in offered():
            report(
                f"the package {offered()[name].package} offers a technique {name!r}, which rush has itself; the package's is "
                "refused. It needs another name."
            )
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is such a technique; imports nothing."""
        return name in self._known or name in offered()

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        """All names that can be used. A package that cannot be imported is reported and left out."""
        for name, plugin in offered().items():
            if name not in self._known and name not in self._unusable:
                try:
                    self[name] = plugin.load()
                except RecipeError as error:
                    self._unusable.add(name)
                    report(f"{error} It is left out here.")
        return iter(sorted(self._known))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def ours(self) -> dict[str, Technique]:
        """The techniques of this package by name; imports nothing."""
        return {name: self._known[name] for name in sorted(self._ours)}

    def from_package(self, name: str) -> bool:
        """Whether a recipe that names this technique means that of an installed package."""
        return name not in self._ours and name in offered()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Forget what is added within the block."""
        before, unusable = dict(self._known), set(self._unusable)
        try:
            yield
        finally:
            self._known, self._unusable = before, unusable
