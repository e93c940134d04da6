"""Silence log messages of libraries on which a user cannot act.

Examples: a torchao binary for another version, a hint for authors of checkpointed functions. Each such message is listed here,
or by the technique that causes it; all others are shown.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from types import ModuleType


def load_library(name: str) -> ModuleType:
    """Import a library that a technique needs."""
    hush("torchao", "Failed to load", "Skipping import of cpp extensions")
    hush("torch.utils._pytree", "is an Enum subclass")
    with warnings.catch_warnings():
        # A warning about docstrings, if the library has no compiled bytecode yet.
        warnings.simplefilter("ignore", SyntaxWarning)
        return import_module(name)


def hush_matmul_fallback() -> None:
    """Drop torch's warning, with a C++ stack trace, that a CPU without bf16 units multiplies bf16 by BLAS.

    Torch says so once per process, at its first such matmul. `rush probe` shows the rate that this fallback has.
    """
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)


def hush_tf32_advice() -> None:
    """Drop the compiler's advice to set TF32 globally: the technique `tf32` decides whether fp32 matmuls use it."""
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)


def silence_stderr() -> None:
    """Discard what is written to the standard error from here on, by a process that has said all: destructors of a broken device's
    events warn one by one, and a store that is gone prints torch's stack."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def hush(logger: str, *phrases: str) -> None:
    """Drop the messages of this logger that hold one of these phrases."""
    told = logging.getLogger(logger)
    for phrase in phrases:
        if _Hush(phrase) not in told.filters:
            told.addFilter(_Hush(phrase))


class _Hush(logging.Filter):
    def __init__(self, phrase: str) -> None:
        super().__init__()
        self.phrase = phrase

    def filter(self, record: logging.LogRecord) -> bool:
        return self.phrase not in record.getMessage()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hush) and other.phrase == self.phrase

    def __hash__(self) -> int:
        return hash(self.phrase)
