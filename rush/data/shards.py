"""Tokens on disk: flat arrays that are mapped into memory, and their manifest.

    FOLDER/manifest.json            written last: without it the folder does not count as prepared
    FOLDER/tokenizer/               the tokenizer the ids belong to
    FOLDER/train/00000.bin          token ids, little-endian uint16 or uint32, documents back to back,
                                    each followed by the end-of-document token
    FOLDER/train/00000.idx          two rows of int64: where each document starts in .bin (and the number
                                    of tokens), where its name starts in .ids (and the number of bytes)
    FOLDER/train/00000.ids          the documents' names, UTF-8, back to back

Shards are memory-mapped: the kernel pages in what is read, shared by all processes. Opening checks names and sizes;
`verify_shards(full=True)` reads every byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rush.data.sealed_manifest import (
    ADVICE,
    check_files,
    check_shapes,
    check_tokenizer,
    read_sealed,
    typed,
    write_sealed,
)
from rush.errors import DataError
from rush.files import publish, sha256_file, temporary_name, write_atomic

FORMAT = "rush-tokens"
VERSION = 1
SPLITS = ("train", "validation")
SUFFIXES = ("bin", "idx", "ids")


@dataclass(frozen=True)
class Shard:
    """One array of tokens: its counts, and the size and SHA-256 of each of its three files."""

    split: str
    name: str
    documents: int
    tokens: int
    text_bytes: int
    bytes: dict[str, int]
    sha256: dict[str, str]

    def path(self, folder: Path, suffix: str) -> Path:
        return folder / self.split / f"{self.name}.{suffix}"


@dataclass(frozen=True)
class Manifest:
    dtype: str
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    key: str  # fingerprint of everything that determines the content
    preparation: dict[str, Any]  # what was asked for: source, files, split, seed
    shards: tuple[Shard, ...]

    def of(self, split: str) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.of(split))

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.of(split))

    @property
    def content_sha256(self) -> str:
        """Hash of the tokens: equal for equal training data, whatever its source."""
        sums = [(shard.split, shard.documents, shard.sha256.get("bin")) for shard in self.shards]
        return hashlib.sha256(json.dumps([self.dtype, sums]).encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass
class ShardWriter:
    """Writes one shard, under temporary names until `finish`."""

    folder: Path
    split: str
    name: str
    vocab_size: int
    eos_id: int
    starts: list[int] = field(default_factory=lambda: [0])
    names: list[str] = field(default_factory=list)
    text_bytes: int = 0
    _file: IO[bytes] | None = None
    _temporary: Path = Path()

    def append(self, ids: Sequence[int], document: str, text_bytes: int) -> None:
        tokens = np.asarray([*ids, self.eos_id], dtype=np.int64)
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if bad.size:
            raise DataError(
                f"Token id {tokens[bad[0]]} at position {bad[0]} of {document} "
                f"(shard {self.split}/{self.name}, offset {self.starts[-1] + int(bad[0])}) "
                f"is outside the vocabulary of {self.vocab_size}. "
                "The tokenizer and the vocabulary size do not belong together."
            )
        if self._file is None:
            self._target("bin").parent.mkdir(parents=True, exist_ok=True)
            self._temporary = temporary_name(self._target("bin"))
            self._file = self._temporary.open("xb")
        self._file.write(tokens.astype(token_dtype(self.vocab_size)).tobytes())
        self.starts.append(self.starts[-1] + len(tokens))
        self.names.append(document)
        self.text_bytes += text_bytes

    def finish(self) -> Shard | None:
        """Rename the shard into place; None without documents."""
        if self._file is None:
            return None
        self._file.close()
        publish(self._temporary, self._target("bin"))
        names = [name.encode() for name in self.names]
        name_starts = np.cumsum([0, *map(len, names)])
        write_atomic(self._target("idx"), np.asarray([self.starts, name_starts], dtype="<i8").tobytes())
        write_atomic(self._target("ids"), b"".join(names))
        return Shard(
            split=self.split,
            name=self.name,
            documents=len(self.names),
            tokens=self.starts[-1],
            text_bytes=self.text_bytes,
            bytes={suffix: self._target(suffix).stat().st_size for suffix in SUFFIXES},
            sha256={suffix: sha256_file(self._target(suffix)) for suffix in SUFFIXES},
        )

    def abandon(self) -> None:
        if self._file is not None and not self._file.closed:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _target(self, suffix: str) -> Path:
        return self.folder / self.split / f"{self.name}.{suffix}"


@contextlib.contextmanager
def shard_writers(folder: Path, name: str, vocab_size: int, eos_id: int) -> Iterator[dict[str, ShardWriter]]:
    """One writer per split; their temporary files are removed on an error."""
    writers = {split: ShardWriter(folder, split, name, vocab_size, eos_id) for split in SPLITS}
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.abandon()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    body["splits"] = {
        split: {"documents": manifest.documents(split), "tokens": manifest.tokens(split)} for split in SPLITS
    }
    body["content_sha256"] = manifest.content_sha256
    write_sealed(folder, body)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder; DataError where it is damaged or edited."""
    body = read_sealed(folder, FORMAT, (VERSION,), "token shards")
    manifest = typed(Manifest, body, folder)
    check_shapes(folder, manifest.shards, manifest.dtype, manifest.vocab_size)
    source = manifest.preparation.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("source"), str):
        raise DataError(f"{folder / 'manifest.json'} does not name a source. {ADVICE}")
    return manifest


def verify_shards(folder: Path, *, full: bool = False) -> Manifest:
    """Check a prepared folder: every file present with its size; with `full`, every checksum and token id."""
    manifest = read_manifest(folder)
    check_files(folder, manifest.shards, SUFFIXES, content=full)
    if full:
        _verify_content(folder, manifest)
    return manifest


def _verify_content(folder: Path, manifest: Manifest) -> None:
    check_tokenizer(folder, manifest.tokenizer_sha256)
    for shard in manifest.shards:
        mapped = map_shard(folder, manifest, shard)
        check_ids(mapped.tokens, manifest.vocab_size, shard.path(folder, "bin"), 0)
        starts, index = mapped.starts, shard.path(folder, "idx")
        if len(starts) != shard.documents + 1 or starts[0] != 0 or starts[-1] != shard.tokens:
            raise DataError(f"{index} does not bound {shard.documents} documents. {ADVICE}")
        if (np.diff(starts) < 1).any() or (mapped.tokens[starts[1:] - 1] != manifest.eos_id).any():
            raise DataError(f"{index}: a document does not end with the end token. {ADVICE}")


def check_ids(tokens: npt.NDArray[Any], vocab_size: int, path: Path, offset: int) -> None:
    """Refuse ids outside the vocabulary: on a GPU they would be a device-side assert."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        bad = int(np.flatnonzero(tokens >= vocab_size)[0])
        raise DataError(
            f"{path}: token id {int(tokens[bad])} at offset {offset + bad} is outside the vocabulary "
            f"of {vocab_size}. {ADVICE}"
        )


@dataclass(frozen=True)
class MappedShard:
    """The memory-mapped arrays of a shard."""

    tokens: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]  # of documents in `tokens`, and its length
    name_starts: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]

    def document_name(self, document: int) -> str:
        return bytes(self.names[self.name_starts[document] : self.name_starts[document + 1]]).decode(
            errors="replace"
        )


def map_shard(folder: Path, manifest: Manifest, shard: Shard) -> MappedShard:
    index = np.memmap(shard.path(folder, "idx"), dtype="<i8", mode="r").reshape(2, -1)
    tokens = np.memmap(shard.path(folder, "bin"), dtype=np.dtype(manifest.dtype), mode="r")
    names = np.memmap(shard.path(folder, "ids"), dtype=np.uint8, mode="r")
    return MappedShard(tokens, index[0], index[1], names)
