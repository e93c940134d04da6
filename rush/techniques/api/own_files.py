"""Techniques of the user's own: `--technique FILE` registers the `technique` that FILE defines.

The file is Python and its code is executed, because the command line names it, never because a run folder
does: the folder only records which files its run used (`techniques.json`: path and SHA-256). So a resume can
report a missing file, or one that changed.
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
from typing import cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rush.errors import DataError, RecipeError
from rush.files import sha256_file, write_json_atomic
from rush.recipe import Recipe
from rush.records.run_folder import RunFolder
from rush.records.typed import wrong_field
from rush.techniques import registry
from rush.techniques.api.contract import Technique


class _RememberedFile(TypedDict):
    file: str
    sha256: str


_TOLD = TypeAdapter(dict[str, _RememberedFile])
_GIVEN: dict[str, Path] = {}
"""Techniques from files, with their files; per process, as the registry."""
WANTED = "--technique takes a Python file that defines `technique`, a rush.techniques.Technique"


def given() -> Mapping[str, Path]:
    """Techniques from files, with their files."""
    return _GIVEN


def add_technique(path: Path) -> None:
    """Register the `technique` that a Python file defines."""
    _register(_execute(path.resolve()).technique, path.resolve())


@contextmanager
def added(files: Sequence[Path]) -> Iterator[None]:
    """Register the techniques of these files for the duration of the block."""
    known = cast(dict[str, Technique], registry())
    before, given_before = dict(known), dict(_GIVEN)
    try:
        for file in dict.fromkeys(file.expanduser().resolve() for file in files):
            _register(_checked(file), file)
        yield
    finally:
        for now, then in ((known, before), (_GIVEN, given_before)):
            now.clear()
            now.update(then)  # type: ignore[arg-type]


def _execute(file: Path) -> ModuleType:
    name = f"rush_extra_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _register(technique: Technique, file: Path) -> None:
    cast(dict[str, Technique], registry())[technique.name] = technique
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
    if found.name in registry():
        other = given().get(found.name)
        whose = f"so does {other}" if other else "rush has one of that name"
        raise RecipeError(f"{file} defines the technique {found.name!r}, and {whose}; give it another name.")
    return found


def digests(recipe: Recipe) -> str:
    """Digests of the recipe's technique files, which must be equal on all ranks."""
    used = [name for name, _ in recipe.technique_uses() if name in given()]
    return "".join(f", technique {name} {sha256_file(given()[name])[:12]}" for name in used)


def remember(folder: RunFolder, recipe: Recipe) -> None:
    """Record the files of the recipe's techniques in the run folder."""
    files = {name: given()[name] for name, _ in recipe.technique_uses() if name in given()}
    if files:
        told = {name: {"file": str(file), "sha256": sha256_file(file)} for name, file in files.items()}
        write_json_atomic(folder.techniques, told)


def check_remembered(
    folder: RunFolder, recipe: Recipe, note: Callable[[str], None] = lambda text: None
) -> None:
    """Refuse to resume without a file that the run used; report a file that changed."""
    if not os.path.isfile(folder.techniques):
        return
    try:
        told = _TOLD.validate_json(folder.techniques.read_bytes(), strict=True)
    except ValidationError as error:
        raise DataError(
            f"{folder.techniques} does not list the technique files of this run ({wrong_field(error)}); restore it, or remove it and "
            "give the files with --technique."
        ) from None
    for name, _ in recipe.technique_uses():
        if name in told and name not in registry():
            raise RecipeError(
                f"techniques names {name!r}, which is none here: the run was started with --technique "
                f"{told[name]['file']}. Give that file again with --technique."
            )
        if name in told and name in given() and sha256_file(given()[name]) != told[name]["sha256"]:
            note(
                f"{given()[name]} (technique {name}) changed since the run was started; the run continues with it."
            )
