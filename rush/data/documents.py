"""The protocol of a set of documents, for packing and fine-tuning.

A document is a conversation, or a prompt with its answer, as token ids; each token is a target or only context. Preference data
is in pairs: document 2i is the chosen answer of pair i, document 2i + 1 the rejected one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Documents(Protocol):
    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        ...

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> npt.NDArray[np.int64]: ...

    def trained(self, index: int) -> npt.NDArray[np.bool_]:
        """For each token, whether it is a target."""
        ...

    def sample_name(self, index: int) -> str: ...
