"""Manifests of prepared data: written last, with a checksum of their own that is verified on reading.

A folder without a manifest does not count as prepared; one whose manifest was edited is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from rush.errors import DataError
from rush.files import sha256_file, write_atomic

ADVICE = "Prepare the data again (rush data prepare --force), or restore the file."
Kind = TypeVar("Kind")


class Files(Protocol):
    """A shard of prepared data: several files with their sizes and checksums."""

    @property
    def split(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> Mapping[str, int]: ...
    @property
    def sha256(self) -> Mapping[str, str]: ...
    def path(self, folder: Path, suffix: str) -> Path: ...


def write_sealed(folder: Path, body: dict[str, Any]) -> None:
    """Write `body` as the folder's manifest, with its checksum."""
    sealed = {**body, "sha256": _seal(body)}
    write_atomic(folder / "manifest.json", (json.dumps(sealed, indent=1) + "\n").encode())


def read_sealed(folder: Path, form: str, versions: Sequence[int], what: str) -> dict[str, Any]:
    """The manifest's body; DataError where it is damaged, edited or of another format."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise DataError(
            f"{folder} is not prepared data: it has no manifest.json. The preparation was not run or not "
            "finished; run it (again), finished parts are kept."
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not valid JSON ({error}). {ADVICE}") from error
    if not isinstance(body, dict) or body.get("format") != form:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise DataError(f"{path} is not a manifest of {what} ({form!r}): found {found!r}. {ADVICE}")
    if body.get("version") not in versions:
        raise DataError(
            f"{path} has version {body.get('version')!r}; this program reads {versions[-1]}. {ADVICE}"
        )
    if body.get("sha256") != _seal(body):
        raise DataError(
            f"{path} was edited or damaged: its content does not match its own checksum. {ADVICE}"
        )
    return body


def typed(kind: type[Kind], body: Mapping[str, Any], folder: Path) -> Kind:
    """The dataclass that a manifest describes; DataError where a field is missing or of another type.

    A checksum keeps out damage, not somebody who writes a new checksum.
    """
    try:
        return TypeAdapter(kind).validate_python(body)
    except (ValidationError, RecursionError) as error:
        first = (
            error.errors()[0]
            if isinstance(error, ValidationError)
            else {"loc": (), "msg": "nested too deeply"}
        )
        place = ".".join(map(str, first["loc"])) or "its content"
        raise DataError(f"{folder / 'manifest.json'}: {place}: {first['msg']}. {ADVICE}") from error


def check_shapes(folder: Path, parts: Iterable[Files], dtype: str, vocab_size: int) -> None:
    """Check that counts, sizes and names of the shards agree, so that their arrays can be mapped."""
    path = folder / "manifest.json"
    if dtype not in ("<u2", "<u4") or not 0 < vocab_size <= 1 << 32:
        raise DataError(
            f"{path}: tokens are of the type {dtype!r} with {vocab_size:,} ids, which is not written here. {ADVICE}"
        )
    for part in parts:
        if part.split not in ("train", "validation") or not re.fullmatch(r"[\w-]{1,100}", part.name):
            raise DataError(f"{path}: {part.split!r}, {part.name!r} is no name of a shard. {ADVICE}")
        expected = {"bin": part.tokens * int(dtype[-1]), "idx": 16 * (part.documents + 1)}
        if part.documents < 1 or any(part.bytes.get(suffix) != size for suffix, size in expected.items()):
            raise DataError(
                f"{path}: the counts and sizes of shard {part.split}/{part.name} disagree. {ADVICE}"
            )


def check_files(folder: Path, parts: Iterable[Files], suffixes: Sequence[str], *, content: bool) -> None:
    """Check that every file exists with its size and, with `content`, its checksum."""
    for part in parts:
        for suffix in suffixes:
            path = part.path(folder, suffix)
            if not path.is_file():
                raise DataError(f"{path} is missing. {ADVICE}")
            found, expected = path.stat().st_size, part.bytes.get(suffix)
            if found != expected:
                raise DataError(f"{path} is damaged: {found} bytes, the manifest says {expected}. {ADVICE}")
            if content and sha256_file(path) != part.sha256.get(suffix):
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
