"""Pairs of answers in memory, for tests of preferences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class PairsInMemory:
    """Pairs that share a prompt of three tokens, with answers of other lengths."""

    def __init__(self, count: int, seed: int = 0, vocabulary: int = 64) -> None:
        draw = np.random.default_rng(seed)
        prompts = draw.integers(1, vocabulary, (count, 3))
        self._tokens = [
            np.concatenate((prompts[i // 2], draw.integers(1, vocabulary, int(draw.integers(1, 12)))))
            for i in range(2 * count)
        ]
        self.lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        return self._tokens[index]

    def trained(self, index: int) -> npt.NDArray[np.bool_]:
        return np.arange(len(self._tokens[index])) >= 3

    def sample_name(self, index: int) -> str:
        return f"pair {index // 2} {'rejected' if index % 2 else 'chosen'}"
