"""The manifest of prepared documents: files with checksums, the preparation, and row counts.

Writing and verifying is in `rush.data.sealed_manifest`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rush.data.sealed_manifest import (
    ADVICE,
    check_files,
    check_shapes,
    check_tokenizer,
    read_sealed,
    typed,
    write_sealed,
)
from rush.data.shards import SPLITS, check_ids
from rush.errors import DataError

FORMAT = "rush-documents"
VERSION = 4
"""Version of the files and their content: increase it when the same rows give other documents."""
READABLE = (2, 3, 4)
"""3: control tokens that are not special are text in questions, and tools are written. 4: calls and results of tools, and
thoughts, are written."""
SUFFIXES = ("bin", "trn", "idx", "ids")
EXAMPLES = 3
ASKED: dict[str, type] = {
    "source": dict, "template": str, "train_on": str, "sequence": int, "too_long": str, "bad_rows": str,
}  # fmt: skip
"""What every manifest says of the preparation."""


@dataclass
class Counts:
    """Row counts of one split."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    cut_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped rows, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first rows dropped for each reason, and the first truncated ones."""
    formats: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    """Unused columns, with the number of rows that have them."""
    controls: dict[str, int] = field(default_factory=dict)
    """Control tokens that turns spell out and what became of them, with the number of rows."""

    def drop(self, reason: str, name: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self._note(reason, name)

    def shorten(self, tokens: int, name: str) -> None:
        self.cut += 1
        self.cut_tokens += tokens
        self._note("cut", name)

    def use(self, format: str, unused: list[str]) -> None:
        self.formats[format] = self.formats.get(format, 0) + 1
        for column in unused:
            self.unused[column] = self.unused.get(column, 0) + 1

    def note_controls(self, found: Iterable[str]) -> None:
        for name in found:
            self.controls[name] = self.controls.get(name, 0) + 1

    def _note(self, reason: str, name: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(name)

    def first(self, reason: str) -> str:
        return next(iter(self.examples.get(reason, [])), "?")

    def plus(self, other: Counts) -> Counts:
        examples = {
            reason: [*self.examples.get(reason, []), *other.examples.get(reason, [])][:EXAMPLES]
            for reason in sorted({*self.examples, *other.examples})
        }
        numbers = ("rows", "documents", "tokens", "trained", "cut", "cut_tokens")
        summed: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        for name in ("dropped", "formats", "unused", "controls"):
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
    """SHA-256 of the documents without their names: tokens, targets and starts."""

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
        """Hash of the documents: equal for equal training data, whatever its source."""
        contents = [(shard.split, shard.content) for shard in self.shards]
        return hashlib.sha256(json.dumps([self.dtype, self.paired, contents]).encode()).hexdigest()

    def losses(self) -> str:
        """Dropped and truncated rows, as a sentence; empty where there are none."""
        total = self.total
        parts = [
            f"{count:,} dropped ({reason}, as {total.first(reason)})"
            for reason, count in total.dropped.items()
        ]
        if total.cut:
            parts.append(f"{total.cut:,} cut ({total.cut_tokens:,} tokens lost, as {total.first('cut')})")
        return f"Of {total.rows:,} rows: {'; '.join(parts)}." if parts else ""


def write_document_manifest(folder: Path, manifest: DocumentManifest) -> None:
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    write_sealed(folder, {**body, "content_sha256": manifest.content_sha256})


def read_document_manifest(folder: str | Path) -> DocumentManifest:
    """The manifest of a prepared folder; DataError where it is damaged or edited."""
    body = read_sealed(Path(folder), FORMAT, READABLE, "documents for fine-tuning")
    manifest = typed(DocumentManifest, body, Path(folder))
    check_shapes(Path(folder), manifest.shards, manifest.dtype, manifest.vocab_size)
    asked = manifest.preparation
    wrong = [name for name, kind in ASKED.items() if not isinstance(asked.get(name), kind)]
    if wrong or not isinstance(asked["source"].get("source"), str) or set(manifest.counts) != set(SPLITS):
        raise DataError(
            f"{Path(folder) / 'manifest.json'} does not describe a preparation ({', '.join(wrong) or 'source, counts'}). {ADVICE}"
        )
    for split, counts in manifest.counts.items():
        held = [(shard.documents, shard.tokens) for shard in manifest.of(split)]
        sums = (sum(documents for documents, _ in held), sum(tokens for _, tokens in held))
        if (counts.documents, counts.tokens) != sums or not 0 <= counts.trained <= counts.tokens:
            raise DataError(
                f"{Path(folder) / 'manifest.json'}: the counts of the {split} split are not those of its shards. {ADVICE}"
            )
    return manifest


def holds_documents(folder: str | Path) -> bool:
    """Whether a folder holds documents, rather than a corpus or nothing."""
    path = Path(folder) / "manifest.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def verify_documents(folder: str | Path, *, full: bool = False) -> DocumentManifest:
    """Check a prepared folder: every file present with its size; with `full`, every checksum and token id."""
    folder = Path(folder)
    manifest = read_document_manifest(folder)
    check_files(folder, manifest.shards, SUFFIXES, content=full)
    if full:
        check_tokenizer(folder, manifest.tokenizer_sha256)
        for shard in manifest.shards:
            path = shard.path(folder, "bin")
            check_ids(np.memmap(path, dtype=manifest.dtype, mode="r"), manifest.vocab_size, path, 0)
    return manifest
