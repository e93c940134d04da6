"""Documents on disk: flat arrays that are mapped into memory, and their manifest.

    FOLDER/manifest.json      written last: without it the folder does not count as prepared
    FOLDER/tokenizer/         the tokenizer, with the chat template that was used
    FOLDER/train/00000.bin    token ids, little-endian uint16 or uint32, documents back to back
    FOLDER/train/00000.trn    one byte a token: 1 where it is a target
    FOLDER/train/00000.idx    two rows of int64: where each document starts, where its name starts
    FOLDER/train/00000.ids    the documents' names, UTF-8, back to back

Unlike in a corpus, documents are read one by one, and their end token is the template's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rush.data.conversations.documents_manifest import Counts, DocumentShard, verify_documents
from rush.data.conversations.encode import Encoded
from rush.data.shards import SPLITS, token_dtype
from rush.errors import DataError, RecipeError, nearest
from rush.files import write_atomic


@dataclass
class DocumentWriter:
    """Writes one shard, buffered in memory: a unit is small."""

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
        """Write the shard; None without documents."""
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


@dataclass(frozen=True)
class _Mapped:
    tokens: npt.NDArray[Any]
    trained: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    name_starts: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]


class DocumentSet:
    """The memory-mapped documents of one split (`rush.data.documents.Documents`), at most the first `most`."""

    def __init__(self, folder: str | Path, split: str, most: int | None = None) -> None:
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
                f"The {split} split of {self.folder} holds no document: {total.documents:,} in total, of {total.rows:,} "
                "rows. Use more rows, or another data.validation."
            )
        self._first = np.cumsum([0, *(shard.documents for shard in self._shards)], dtype=np.int64)
        self._lengths: npt.NDArray[np.int64] = np.concatenate(
            [np.diff(self._map(number).starts) for number in range(len(self._shards))]
        ).astype(np.int64)[:most]
        if (self._lengths < 1).any():
            raise DataError(
                f"The {split} split of {self.folder} is damaged: a document has no token. Prepare it again."
            )

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        mapped, start, stop, _ = self._find(index)
        return mapped.tokens[start:stop].astype(np.int64)

    def trained(self, index: int) -> npt.NDArray[np.bool_]:
        """For each token, whether it is a target."""
        mapped, start, stop, _ = self._find(index)
        return mapped.trained[start:stop].astype(np.bool_)

    def sample_name(self, index: int) -> str:
        """Split, index, and the row it came from, for messages."""
        mapped, _, _, inside = self._find(index)
        name = bytes(mapped.names[mapped.name_starts[inside] : mapped.name_starts[inside + 1]]).decode(
            errors="replace"
        )
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
