"""Documents on disk: flat arrays that are mapped into memory, and a manifest that vouches for them.

    FOLDER/manifest.json      written last: without it the folder does not count as prepared
    FOLDER/tokenizer/         the tokenizer, with the chat template that was used
    FOLDER/train/00000.bin    token ids, little-endian uint16 or uint32, documents back to back
    FOLDER/train/00000.trn    one byte a token: 1 where it is a target
    FOLDER/train/00000.idx    two rows of int64: where each document starts, where its name starts
    FOLDER/train/00000.ids    the documents' names, UTF-8, back to back

Unlike a corpus, documents are not run together: each is read whole, and its end is its template's business.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rush.data.conversations.encode import Encoded
from rush.data.shards import SPLITS, check_ids, token_dtype
from rush.errors import DataError, RecipeError, nearest
from rush.files import sha256_file, write_atomic

FORMAT = "rush-documents"
VERSION = 1
SUFFIXES = ("bin", "trn", "idx", "ids")
EXAMPLES = 3
_ADVICE = "Prepare the data again (rush data prepare --force), or restore the file."


@dataclass
class Counts:
    """What became of the rows of one split."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    cut_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first rows left out for each reason."""
    formats: dict[str, int] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    def drop(self, reason: str, name: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(name)

    def plus(self, other: Counts) -> Counts:
        examples = {
            reason: [*self.examples.get(reason, []), *other.examples.get(reason, [])][:EXAMPLES]
            for reason in sorted({*self.examples, *other.examples})
        }
        numbers = ("rows", "documents", "tokens", "trained", "cut", "cut_tokens")
        summed: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        for name in ("dropped", "formats"):
            summed[name] = dict(
                sorted((Counter(getattr(self, name)) + Counter(getattr(other, name))).items())
            )
        return Counts(**summed, examples=examples)


@dataclass(frozen=True)
class DocumentShard:
    """One array of documents: its counts, and the size and SHA-256 of each of its files."""

    split: str
    name: str
    documents: int
    tokens: int
    bytes: dict[str, int]
    sha256: dict[str, str]
    content: str
    """SHA-256 of the documents without their names: tokens, targets, and where each begins."""

    def path(self, folder: Path, suffix: str) -> Path:
        return folder / self.split / f"{self.name}.{suffix}"


@dataclass(frozen=True)
class DocumentManifest:
    dtype: str
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    key: str
    """Fingerprint of everything that determines the content."""
    preparation: dict[str, Any]
    """What was asked for: source, format, template, sequence."""
    paired: bool
    counts: dict[str, Counts]
    shards: tuple[DocumentShard, ...]

    def of(self, split: str) -> tuple[DocumentShard, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    def documents(self, split: str) -> int:
        return self.counts[split].documents

    def tokens(self, split: str) -> int:
        return self.counts[split].tokens

    def trained(self, split: str) -> int:
        """Tokens that are targets."""
        return self.counts[split].trained

    @property
    def total(self) -> Counts:
        return self.counts["train"].plus(self.counts["validation"])

    @property
    def content_sha256(self) -> str:
        """Names the documents themselves, wherever they came from: equal for equal training data."""
        contents = [(shard.split, shard.content) for shard in self.shards]
        return hashlib.sha256(json.dumps([self.dtype, self.paired, contents]).encode()).hexdigest()

    def losses(self) -> str:
        """What was left out or cut, as a sentence; empty where nothing was."""
        total = self.total
        parts = [
            f"{count:,} dropped ({reason}, as {total.examples[reason][0]})"
            for reason, count in total.dropped.items()
        ]
        if total.cut:
            parts.append(f"{total.cut:,} cut ({total.cut_tokens:,} tokens lost)")
        return f"Of {total.rows:,} rows: {'; '.join(parts)}." if parts else ""


@dataclass
class DocumentWriter:
    """Gathers one shard and writes it at the end. A unit is small enough to be held."""

    folder: Path
    split: str
    name: str
    vocab_size: int
    counts: Counts = field(default_factory=Counts)
    _tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    _trained: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    _names: list[bytes] = field(default_factory=list)

    def append(self, encoded: Encoded, name: str) -> None:
        tokens = np.asarray(encoded.tokens, dtype=np.int64)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise DataError(
                f"{name}: token id {int(tokens.max())} is outside the model's vocabulary of {self.vocab_size}. "
                "The tokenizer does not belong to this model; set data.tokenizer to the model's own."
            )
        self._tokens.append(tokens.astype(token_dtype(self.vocab_size)))
        self._trained.append(np.asarray(encoded.trained, dtype=np.uint8))
        self._names.append(name.encode())
        self.counts.documents += 1
        self.counts.tokens += len(tokens)
        self.counts.trained += encoded.num_trained

    def finish(self) -> DocumentShard | None:
        """Write the shard; None where it received no document."""
        if not self._tokens:
            return None
        starts = np.cumsum([0, *map(len, self._tokens)])
        name_starts = np.cumsum([0, *map(len, self._names)])
        content = {
            "bin": np.concatenate(self._tokens).tobytes(),
            "trn": np.concatenate(self._trained).tobytes(),
            "idx": np.asarray([starts, name_starts], dtype="<i8").tobytes(),
            "ids": b"".join(self._names),
        }
        (self.folder / self.split).mkdir(parents=True, exist_ok=True)
        for suffix, data in content.items():
            write_atomic(self.folder / self.split / f"{self.name}.{suffix}", data)
        return DocumentShard(
            split=self.split,
            name=self.name,
            documents=len(self._tokens),
            tokens=int(starts[-1]),
            bytes={suffix: len(data) for suffix, data in content.items()},
            sha256={suffix: hashlib.sha256(data).hexdigest() for suffix, data in content.items()},
            content=hashlib.sha256(
                content["bin"] + content["trn"] + starts.astype("<i8").tobytes()
            ).hexdigest(),
        )


def write_document_manifest(folder: Path, manifest: DocumentManifest) -> None:
    body = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest),
        "content_sha256": manifest.content_sha256,
    }
    body["sha256"] = _seal(body)
    write_atomic(folder / "manifest.json", (json.dumps(body, indent=1) + "\n").encode())


def _seal(body: dict[str, Any]) -> str:
    content = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_document_manifest(folder: str | Path) -> DocumentManifest:
    """The manifest of a prepared folder, whole and unedited, or a DataError that says what is wrong."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise DataError(
            f"{folder} is not prepared data: it has no manifest.json. The preparation was not run or not finished; "
            "run it (again), finished parts are kept."
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: not valid JSON ({error}). {_ADVICE}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise DataError(f"{path} is a manifest of {found!r}, not of documents for fine-tuning ({FORMAT!r}).")
    if body.get("version") != VERSION:
        raise DataError(
            f"{path} has version {body.get('version')!r}; this program reads {VERSION}. {_ADVICE}"
        )
    if body.get("sha256") != _seal(body):
        raise DataError(
            f"{path} was edited or damaged: its content does not match its own checksum. {_ADVICE}"
        )
    names = ("dtype", "vocab_size", "eos_id", "tokenizer_sha256", "key", "preparation", "paired")
    return DocumentManifest(
        **{name: body[name] for name in names},
        counts={split: Counts(**counts) for split, counts in body["counts"].items()},
        shards=tuple(DocumentShard(**shard) for shard in body["shards"]),
    )


def holds_documents(folder: str | Path) -> bool:
    """Whether a folder's manifest says that it holds documents, rather than a corpus or nothing."""
    path = Path(folder) / "manifest.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def verify_documents(folder: str | Path, *, full: bool = False) -> DocumentManifest:
    """Check a prepared folder: every file present with its size; with `full`, every checksum and token id."""
    folder = Path(folder)
    manifest = read_document_manifest(folder)
    for shard in manifest.shards:
        for suffix in SUFFIXES:
            path = shard.path(folder, suffix)
            if not path.is_file():
                raise DataError(f"{path} is missing. {_ADVICE}")
            found, expected = path.stat().st_size, shard.bytes[suffix]
            if found != expected:
                raise DataError(f"{path} is damaged: {found} bytes, the manifest says {expected}. {_ADVICE}")
            if full and sha256_file(path) != shard.sha256[suffix]:
                raise DataError(f"{path} is damaged: its content does not match its checksum. {_ADVICE}")
        if full:
            path = shard.path(folder, "bin")
            check_ids(np.memmap(path, dtype=manifest.dtype, mode="r"), manifest.vocab_size, path, 0)
    if full:
        tokenizer = folder / "tokenizer" / "tokenizer.json"
        if not tokenizer.is_file() or sha256_file(tokenizer) != manifest.tokenizer_sha256:
            raise DataError(f"{tokenizer} is not the tokenizer these documents were made with. {_ADVICE}")
    return manifest


@dataclass(frozen=True)
class _Mapped:
    tokens: npt.NDArray[Any]
    trained: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    name_starts: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]


class DocumentSet:
    """The documents of one split, mapped: `rush.data.documents.Documents`."""

    def __init__(self, folder: str | Path, split: str) -> None:
        if split not in SPLITS:
            raise RecipeError(f"Unknown split {split!r}: {nearest(split, SPLITS)}")
        self.folder = Path(folder)
        self.split = split
        self.manifest = verify_documents(self.folder)
        self.paired = self.manifest.paired
        self._shards = self.manifest.of(split)
        self._mapped: dict[int, _Mapped] = {}
        if not self._shards:
            total = self.manifest.total
            raise DataError(
                f"The {split} split of {self.folder} holds no document: {total.documents:,} in all, of {total.rows:,} "
                "rows. Use more rows, or another data.validation."
            )
        self._first = np.cumsum([0, *(shard.documents for shard in self._shards)], dtype=np.int64)
        self._lengths: npt.NDArray[np.int64] = np.concatenate(
            [np.diff(self._map(number).starts) for number in range(len(self._shards))]
        ).astype(np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return self._lengths

    def __len__(self) -> int:
        return int(self._first[-1])

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        mapped, start, stop, _ = self._find(index)
        return mapped.tokens[start:stop].astype(np.int64)

    def trained(self, index: int) -> npt.NDArray[np.bool_]:
        """For each token, whether it is a target."""
        mapped, start, stop, _ = self._find(index)
        return mapped.trained[start:stop].astype(np.bool_)

    def sample_name(self, index: int) -> str:
        """What a person needs to find a document again: split, number, and the row it came from."""
        mapped, _, _, inside = self._find(index)
        name = bytes(mapped.names[mapped.name_starts[inside] : mapped.name_starts[inside + 1]]).decode()
        return f"{self.split}[{index}] {name}"

    def _find(self, index: int) -> tuple[_Mapped, int, int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        mapped = self._map(number)
        inside = index - int(self._first[number])
        return mapped, int(mapped.starts[inside]), int(mapped.starts[inside + 1]), inside

    def _map(self, number: int) -> _Mapped:
        if number not in self._mapped:
            shard = self._shards[number]

            def read(suffix: str, dtype: str) -> npt.NDArray[Any]:
                return np.memmap(shard.path(self.folder, suffix), dtype=dtype, mode="r")

            index = read("idx", "<i8").reshape(2, -1)
            self._mapped[number] = _Mapped(
                read("bin", self.manifest.dtype), read("trn", "u1"), index[0], index[1], read("ids", "u1")
            )
        return self._mapped[number]
