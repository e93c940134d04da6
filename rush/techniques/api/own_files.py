"""Techniques of the user's own: `--technique FILE` registers the `technique` that FILE defines.

The file is Python and its code is executed, because the command line names it, never because a run folder
does: the folder only records which files its run used (`techniques.json`: file and SHA-256), and which packages
(name and version). So a resume can report a missing file or package, or one that changed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import final

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rush.errors import DataError, RecipeError
from rush.files import read_file, sha256_file, write_json_atomic
from rush.recipe import Recipe
from rush.records.run_folder import RunFolder
from rush.records.typed import wrong_field
from rush.techniques import registry
from rush.techniques.api import plugins
from rush.techniques.api.contract import Technique
from rush.techniques.api.field_types import wrong_type


@final
class _RememberedFile(TypedDict):
    file: str
    sha256: str


@final
class _RememberedPackage(TypedDict):
    package: str
    version: str


_TOLD = TypeAdapter(dict[str, _RememberedFile | _RememberedPackage])
_GIVEN: dict[str, Path] = {}
"""Techniques from files, with their files; per process, as the registry."""
WANTED = "--technique takes a Python file that defines `technique`, a rush.techniques.Technique"


MODULE_PREFIX = "rush_extra_"
"""How the names of the modules made from such files begin."""


def given() -> Mapping[str, Path]:
    """Techniques from files, with their files."""
    return _GIVEN


def add_technique(path: Path) -> None:
    """Register the `technique` that a Python file defines."""
    _register(_execute(path.resolve()).technique, path.resolve())


@contextmanager
def added(files: Sequence[Path]) -> Iterator[None]:
    """Register the techniques of these files for the duration of the block."""
    before = dict(_GIVEN)
    with registry().restored():
        try:
            for file in dict.fromkeys(file.expanduser().resolve() for file in files):
                if file not in _GIVEN.values():
                    _register(_checked(file), file)
            yield
        finally:
            _GIVEN.clear()
            _GIVEN.update(before)


def _execute(file: Path) -> ModuleType:
    name = f"{MODULE_PREFIX}{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _register(technique: Technique, file: Path) -> None:
    registry()[technique.name] = technique
    _GIVEN[technique.name] = file


def _checked(file: Path) -> Technique:
    """The technique that a file defines, or an error with what is wrong with the file."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise RecipeError(f"--technique names {file}, which {what}; {WANTED}.")
    if file.suffix != ".py":
        raise RecipeError(f"--technique names {file}, whose name does not end in .py; {WANTED}.")
    try:
        found = getattr(_execute(file), "technique", None)
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        says = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecipeError(
            f"--technique names {file}, which cannot be imported: line {line} raises {says}. Fix the file."
        ) from error
    if found is None:
        raise RecipeError(f"--technique names {file}, which defines no `technique`; {WANTED}.")
    if not isinstance(found, Technique):
        raise RecipeError(f"`technique` in {file} is a {type(found).__name__}; {WANTED}.")
    if (wrong := wrong_type(found)) is not None:
        raise RecipeError(f"`technique` in {file} is not complete: {wrong}.")
    if found.name in registry():
        raise RecipeError(
            f"{file} defines the technique {found.name!r}, and {_owner(found.name)}; give it another name."
        )
    return found


def _owner(name: str) -> str:
    if name in given():
        return f"so does {given()[name]}"
    if registry().from_package(name):
        return f"so does the package {plugins.offered()[name].package}"
    return "rush has one of that name"


def package_digests(recipe: Recipe) -> list[str]:
    """Versions and digests of the packages that the recipe's techniques come from, for names of trials."""
    return plugins.digests(name for name in _used(recipe) if registry().from_package(name))


def digests(recipe: Recipe) -> str:
    """Digests of the files and packages of the recipe's techniques, which must be equal on all ranks."""
    files = [f"{name} {sha256_file(given()[name])[:12]}" for name in _used(recipe) if name in given()]
    return "".join(f", technique {one}" for one in [*files, *package_digests(recipe)])


def remember(folder: RunFolder, recipe: Recipe) -> None:
    """Record the files and packages of the recipe's techniques in the run folder."""
    told: dict[str, dict[str, str]] = {}
    for name in _used(recipe):
        if name in given():
            told[name] = {"file": _shown(given()[name]), "sha256": sha256_file(given()[name])}
        elif registry().from_package(name):
            plugin = plugins.offered()[name]
            told[name] = {"package": plugin.package_name, "version": plugin.version}
    if told:
        write_json_atomic(folder.techniques, told)


def check_remembered(
    folder: RunFolder, recipe: Recipe, note: Callable[[str], None] = lambda text: None
) -> None:
    """Refuse to resume without a file or package that the run used; report one that changed."""
    if not os.path.isfile(folder.techniques):
        return
    try:
        told = _TOLD.validate_json(read_file(folder.techniques), strict=True)
    except ValidationError as error:
        raise DataError(
            f"{folder.techniques} does not list the technique files of this run ({wrong_field(error)}); restore it, or remove it and "
            "give the files with --technique."
        ) from None
    for name, before in ((name, told[name]) for name in _used(recipe) if name in told):
        if name not in registry():
            if "package" in before:
                raise RecipeError(
                    f"techniques names {name!r}, which is none here: the run was started with the package {before['package']} "
                    f"{before['version']}. Install it again."
                )
            raise RecipeError(
                f"techniques names {name!r}, which is none here: the run was started with --technique "
                f"{before['file']}. Give that file again with --technique."
            )
        if "file" in before and name in given() and sha256_file(given()[name]) != before["sha256"]:
            note(
                f"{given()[name]} (technique {name}) changed since the run was started; the run continues with it."
            )
        if "package" in before and registry().from_package(name):
            now = plugins.offered()[name]
            if (now.package_name, now.version) != (before["package"], before["version"]):
                note(
                    f"technique {name} now comes from {now.package}, and the run was started with {before['package']} "
                    f"{before['version']}; the run continues with {now.package}."
                )


def _used(recipe: Recipe) -> list[str]:
    return [name for name, _ in recipe.technique_uses()]


def _shown(file: Path) -> str:
    """A file as the run folder records it, which may be shared: relative to the working folder, or its name alone."""
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else file.name
