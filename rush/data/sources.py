"""Text sources: files, the Python standard library and packages, or a dataset on the Hugging Face hub.

`plan_units` divides a source into units of work by file sizes alone, and `read_unit` reads one. A unit is one worker's task,
becomes one shard, and is not repeated after an interruption. Units do not depend on the number of workers, so the result does
not either. `describe_source` identifies a source without reading it.

The default source, `python-stdlib`, is on every machine: some 10 MB of text that needs no network.
`python-packages` adds the sources of rush's dependencies, mostly torch: some 80 MB, for the larger models.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rush.data.hub_client import Note
from rush.data.hub_datasets import (
    ALLOWED,
    HubDataset,
    at_commit,
    dataset_named,
    hub_slices,
    read_hub_slice,
)
from rush.data.readers import Document, Slice, file_kind, read_slice, slice_file
from rush.errors import DataError, MachineError, RecipeError, nearest

MIN_UNIT_BYTES = 1 << 20
MAX_UNIT_BYTES = 64 << 20
UNITS_WANTED = 64

# Known datasets with their text column and schema; local copies are read the same way.
HUB_SOURCES = {
    "fineweb-edu": HubDataset(
        "HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        columns=(
            "text", "id", "dump", "url", "file_path", "language", "language_score", "token_count", "score",
            "int_score",
        ),
    ),
    "redpajama": HubDataset(
        "togethercomputer/RedPajama-Data-1T-Sample", columns=("text", "meta", "red_pajama_subset")
    ),
}  # fmt: skip
PYTHON_SOURCES = ("python-stdlib", "python-packages")
LOCAL_SOURCES = ("files", *PYTHON_SOURCES)

# Dependencies of rush and of torch: whoever installs another package still has the same text.
PACKAGES = (
    "torch", "sympy", "numpy", "networkx", "pygments", "huggingface_hub", "setuptools", "tensorboard", "pydantic", "rich",
    "fsspec", "jinja2", "typer", "psutil", "tqdm", "httpx", "mpmath", "markdown", "werkzeug", "packaging", "filelock",
)  # fmt: skip
LARGEST_PACKAGE_FILE = 1 << 20
"""Larger ones are tables that a program wrote."""

# Not part of the library proper: tests, installed packages, generated tables.
_STDLIB_SKIPPED = frozenset(
    {
        "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled", "lib-dynload",
        "encodings", "pydoc_data", "_vendor",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Unit:
    index: int
    slices: tuple[Slice, ...]


def open_source(
    source: str, files: Sequence[str] = (), text_field: str = "text", limit: int | None = None
) -> Iterator[Document]:
    """All documents of a source, in order; at most `limit`."""
    for unit in plan_units(source, files, text_field, limit):
        yield from read_unit(unit, text_field)


def describe_source(
    source: str, files: Sequence[str] = (), text_field: str = "text", limit: int | None = None
) -> dict[str, Any]:
    """Identifies a source without reading it: names, sizes and modification times."""
    described: dict[str, Any] = {"source": source, "text_field": text_field, "limit": limit}
    dataset = _hub_dataset(source, files)
    if dataset is not None:
        # The same for a name and for that name with its commit.
        named = {"source": source.split("@")[0], "revision": dataset.revision} if dataset.revision else {}
        return described | named | {"dataset": dataset.name, "config": dataset.config, "split": dataset.split}
    root = _stdlib_root() if source in PYTHON_SOURCES else None
    if root is not None:
        described["python"] = platform.python_version()
    if source == "python-packages":
        return described | _describe_packages()
    described["files"] = [_describe_file(path, root) for path in _paths(source, files)]
    return described


def pinned_source(source: str, files: Sequence[str], note: Note) -> str:
    """A source with the commit that its dataset on the hub has now, for the recipe of a run; a local one as it is."""
    dataset = None if files else find_dataset(source)
    if dataset is None or dataset.local:
        return source
    named, colon, rest = source.removeprefix("hub:").partition(":")
    prefix = "hub:" if source.startswith("hub:") else ""
    return f"{prefix}{named.split('@')[0]}@{at_commit(dataset, note).revision}{colon}{rest}"


def plan_units(
    source: str, files: Sequence[str] = (), text_field: str = "text", limit: int | None = None
) -> list[Unit]:
    """Divide a source into units: a pure function of the files and the limit."""
    if limit is not None and limit < 1:
        raise RecipeError(
            f"data.limit is {limit}; it counts documents and must be at least 1, or be left out."
        )
    dataset = _hub_dataset(source, files)
    if dataset is not None:
        return [Unit(i, (piece,)) for i, piece in enumerate(hub_slices(dataset, limit))]
    paths = _paths(source, files)
    total = sum(_stat(path).st_size for path in paths)
    unit_bytes = min(max(total // UNITS_WANTED, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    if source in PYTHON_SOURCES:
        slices = [Slice("python", str(path), 0, _stat(path).st_size) for path in paths]
    else:
        slices = [piece for path in paths for piece in slice_file(path, unit_bytes)]
    if limit is not None:
        slices = list(_limited(slices, text_field, limit))
    if not slices:
        raise DataError(f"The corpus is empty: {len(paths)} file(s) with {total} bytes hold no document.")
    return [Unit(i, tuple(group)) for i, group in enumerate(grouped(slices, unit_bytes))]


def read_unit(unit: Unit, text_field: str) -> Iterator[Document]:
    for piece in unit.slices:
        yield from read_hub_slice(piece, text_field) if piece.kind == "hub" else read_slice(piece, text_field)


def grouped(slices: Iterable[Slice], unit_bytes: int) -> Iterator[list[Slice]]:
    """Group neighboring slices up to `unit_bytes`, so that small files share a shard."""
    group: list[Slice] = []
    held = 0
    for piece in slices:
        group.append(piece)
        # Parquet slices count row groups, not bytes, and are already of the wanted size.
        held += unit_bytes if piece.kind == "parquet" else piece.stop - piece.start
        if held >= unit_bytes:
            yield group
            group, held = [], 0
    if group:
        yield group


def _limited(slices: Iterable[Slice], text_field: str, limit: int) -> Iterator[Slice]:
    """The slices with the first `limit` documents, counted by reading."""
    left = limit
    for piece in slices:
        count = sum(1 for _ in read_slice(replace(piece, take=left), text_field))
        yield replace(piece, take=count)
        left -= count
        if left == 0:
            return


def find_dataset(source: str) -> HubDataset | None:
    """The dataset that a source names, with its short name or its id; None for a local source or an unknown name."""
    name, _, revision = source.partition("@")
    if name in HUB_SOURCES:
        return replace(HUB_SOURCES[name], revision=revision or None)
    return None if source in LOCAL_SOURCES else dataset_named(source)


def _hub_dataset(source: str, files: Sequence[str]) -> HubDataset | None:
    """The hub dataset of a source at its commit, None for a local one; RecipeError for unknown names."""
    if source in LOCAL_SOURCES:
        return None
    dataset = find_dataset(source)
    if dataset is None:
        allowed = [*LOCAL_SOURCES, *HUB_SOURCES, ALLOWED]
        raise RecipeError(f"Unknown data.source {source!r}: {nearest(source, allowed)}")
    if files and source.split("@")[0] in HUB_SOURCES:
        return None
    if files:
        raise RecipeError("data.files is given, so data.source must be 'files', not a hub dataset.")
    return at_commit(dataset)


def _paths(source: str, files: Sequence[str]) -> list[Path]:
    if source in PYTHON_SOURCES:
        if files:
            raise RecipeError(f"data.source is '{source}' but data.files is given; set data.source='files'.")
        return _stdlib_files() + (_package_files() if source == "python-packages" else [])
    if not files:
        raise RecipeError(
            "data.source is 'files' but data.files is empty; give paths or patterns, "
            "such as ['corpus/**/*.jsonl']."
        )
    found: dict[Path, None] = {}
    for pattern in files:
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            hint = (
                f" It is a folder: write {pattern.rstrip('/')}/**/*.jsonl." if os.path.isdir(pattern) else ""
            )
            raise DataError(f"data.files: nothing matches {pattern!r} (from {os.getcwd()}).{hint}")
        found.update((Path(match).absolute(), None) for match in matches)
    return list(found)


def _stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, inside, names in os.walk(root):
        # Installed packages are there too, many times as large: skipped folders are not walked.
        inside[:] = [name for name in inside if name not in _STDLIB_SKIPPED]
        sources = (n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))
        found += [Path(folder, name) for name in sources]
    return sorted(found)


def _package_roots() -> dict[str, Path]:
    """The folders of the packages that are installed, found without importing them."""
    found = {name: find_spec(name) for name in PACKAGES}
    return {
        name: Path(next(iter(spec.submodule_search_locations)))
        for name, spec in found.items()
        if spec is not None and spec.submodule_search_locations
    }


def _package_files() -> list[Path]:
    return [
        path
        for root in _package_roots().values()
        for path in _python_files(root)
        if 0 < _stat(path).st_size <= LARGEST_PACKAGE_FILE and _is_utf8(path)
    ]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _describe_packages() -> dict[str, Any]:
    """A digest, for there are thousands of files: names and sizes, since times change when the same version is installed again."""
    root, roots = _stdlib_root(), _package_roots()
    places = {**dict.fromkeys(_stdlib_files(), root)}
    places |= {path: place for place in roots.values() for path in _python_files(place)}
    listed = [[str(path.relative_to(place)), _stat(path).st_size] for path, place in places.items()]
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return {"packages": sorted(roots), "files": len(listed), "sha256": digest}


def _stdlib_files() -> list[Path]:
    root = _stdlib_root()
    paths = _python_files(root)
    if not paths:
        raise MachineError(
            f"The Python standard library's sources are not on this machine (looked in {root}). "
            "Install them, or set data.source='files' and data.files."
        )
    return paths


def _describe_file(path: Path, root: Path | None) -> dict[str, Any]:
    stat = _stat(path)
    name = path.relative_to(root) if root is not None else path
    described = {"path": name.as_posix(), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    # Tables were once read as plain text: data prepared then is not reused.
    return described | {"rows": "csv"} if root is None and file_kind(path) == "csv" else described


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
