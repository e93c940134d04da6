"""Windows of tokens over the shards of one split.

The split is one token stream, documents back to back, across shard boundaries. Window i has the tokens i·sequence to
(i+1)·sequence inclusive, one more than the input, because labels are the next tokens. Neighboring windows share one token, so
every token but the first is a label once per epoch. An incomplete last window is dropped.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from rush.data.shards import SPLITS, MappedShard, check_ids, map_shard, verify_shards
from rush.errors import DataError, RecipeError, nearest


class TokenDataset:
    """`len(dataset)` windows; `window(i)` is an int64 array of sequence + 1 tokens."""

    def __init__(self, folder: str | Path, split: str, sequence: int) -> None:
        if split not in SPLITS:
            raise RecipeError(f"Unknown split {split!r}: {nearest(split, SPLITS)}")
        if sequence < 1:
            raise RecipeError(f"batch.sequence is {sequence}; it must be at least 1.")
        self.folder = Path(folder)
        self.split = split
        self.sequence = sequence
        self.manifest = verify_shards(self.folder)
        self._shards = self.manifest.of(split)
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self._mapped: dict[int, MappedShard] = {}
        self.num_tokens = self.manifest.tokens(split)
        self.num_documents = self.manifest.documents(split)
        if len(self) == 0:
            raise DataError(
                f"The {split} split of {self.folder} is too short: {self.num_documents} document(s) with "
                f"{self.num_tokens} tokens, and one window needs {sequence + 1} (batch.sequence + 1). "
                f"Use more text, a shorter sequence, or {'a larger' if split == 'validation' else 'a smaller'} data.validation."
            )

    def __len__(self) -> int:
        return max((self.num_tokens - 1) // self.sequence, 0)

    def window(self, index: int) -> npt.NDArray[np.int64]:
        self._check(index)
        start = index * self.sequence
        return self._read(start, start + self.sequence + 1)

    def sample_name(self, index: int) -> str:
        """Split, window, and the document it starts in, for messages."""
        self._check(index)
        start = index * self.sequence
        number = int(np.searchsorted(self._ends, start, side="right"))
        shard = self._shards[number]
        inside = start - int(self._ends[number]) + shard.tokens
        mapped = self._map(number)
        document = int(np.searchsorted(mapped.starts, inside, side="right")) - 1
        return f"{self.split}[{index}] {mapped.document_name(document)}"

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")

    def _read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of the split, across shards."""
        parts: list[npt.NDArray[np.int64]] = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[number]) - self._shards[number].tokens
            end = min(stop, int(self._ends[number]))
            part = self._map(number).tokens[start - begin : end - begin]
            path = self._shards[number].path(self.folder, "bin")
            check_ids(part, self.manifest.vocab_size, path, start - begin)
            parts.append(part.astype(np.int64))
            start, number = end, number + 1
        return np.concatenate(parts)

    def _map(self, number: int) -> MappedShard:
        if number not in self._mapped:
            self._mapped[number] = map_shard(self.folder, self.manifest, self._shards[number])
        return self._mapped[number]
