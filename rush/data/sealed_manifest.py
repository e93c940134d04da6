"""Manifests of prepared data: written last, with a checksum of their own that is verified on reading.

A folder without a manifest does not count as prepared; one whose manifest was edited is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rush.errors import DataError
from rush.files import sha256_file, write_atomic

ADVICE = "Prepare the data again (rush data prepare --force), or restore the file."


class Files(Protocol):
    """A shard of prepared data: several files with their sizes and checksums."""

    @property
    def bytes(self) -> Mapping[str, int]: ...
    @property
    def sha256(self) -> Mapping[str, str]: ...
    def path(self, folder: Path, suffix: str) -> Path: ...


def write_sealed(folder: Path, body: dict[str, Any]) -> None:
    """Write `body` as the folder's manifest, with its checksum."""
    sealed = {**body, "sha256": _seal(body)}
    write_atomic(folder / "manifest.json", (json.dumps(sealed, indent=1) + "\n").encode())


def read_sealed(folder: Path, form: str, version: int, what: str) -> dict[str, Any]:
    """The manifest's body; DataError where it is damaged, edited or of another format."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise DataError(
            f"{folder} is not prepared data: it has no manifest.json. The preparation was not run or not "
            "finished; run it (again), finished parts are kept."
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: not valid JSON ({error}). {ADVICE}") from error
    if not isinstance(body, dict) or body.get("format") != form:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise DataError(f"{path} is not a manifest of {what} ({form!r}): found {found!r}. {ADVICE}")
    if body.get("version") != version:
        raise DataError(f"{path} has version {body.get('version')!r}; this program reads {version}. {ADVICE}")
    if body.get("sha256") != _seal(body):
        raise DataError(
            f"{path} was edited or damaged: its content does not match its own checksum. {ADVICE}"
        )
    return body


def check_files(folder: Path, parts: Iterable[Files], suffixes: Sequence[str], *, content: bool) -> None:
    """Check that every file exists with its size and, with `content`, its checksum."""
    for part in parts:
        for suffix in suffixes:
            path = part.path(folder, suffix)
            if not path.is_file():
                raise DataError(f"{path} is missing. {ADVICE}")
            found, expected = path.stat().st_size, part.bytes[suffix]
            if found != expected:
                raise DataError(f"{path} is damaged: {found} bytes, the manifest says {expected}. {ADVICE}")
            if content and sha256_file(path) != part.sha256[suffix]:
                raise DataError(f"{path} is damaged: its content does not match its checksum. {ADVICE}")


def check_tokenizer(folder: Path, sha256: str) -> None:
    """Check that the stored tokenizer is the one the data was encoded with."""
    path = folder / "tokenizer" / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing. {ADVICE}")
    if sha256_file(path) != sha256:
        raise DataError(f"{path} is not the tokenizer this data was made with. {ADVICE}")


def _seal(body: Mapping[str, Any]) -> str:
    content = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
