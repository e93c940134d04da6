"""A handful of documents in memory, made of real text (as bytes), for tests of packing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.real_text import as_bytes as text


class SmallDocuments:
    """Documents of the given lengths, one after the other in the text; the last `answer` share of each is trained."""

    def __init__(self, lengths: Sequence[int], answer: float = 0.5) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.answer = answer

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        place = (int(self.begins[index]) + np.arange(self.lengths[index])) % len(text())
        return text()[place]

    def trained(self, index: int) -> npt.NDArray[np.bool_]:
        length = int(self.lengths[index])
        return np.arange(length) >= length - max(1, round(self.answer * length))

    def sample_name(self, index: int) -> str:
        return f"document {index}"


def realistic_lengths(count: int, seed: int = 0, mean: float = 30.0, longest: int = 64) -> list[int]:
    """Lengths as conversations have them: log-normal, most short, a few long."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.3, 0.8, count)
    return [int(length) for length in np.clip(drawn, 2, longest)]
