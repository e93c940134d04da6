"""Whether a tokenizer.json may be loaded here: it was trained here, or passes a test in the restricted child.

Tokenizers that passed are remembered by their SHA-256, in this process and in the cache folder, so that a command that loads
one five times, in several processes, tests it once.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import tokenizers

from rush.data.guarded.process import Exhausted, Refused, ask
from rush.errors import DataError
from rush.files import cache_folder

VERSION = 1
"""Increase it when the test becomes stricter."""
CPU_S, CPU_S_PER_MB = 1.2, 0.5
MEMORY_BYTES, MEMORY_PER_BYTE = 1 << 30, 60
_tried: set[str] = set()


def check_tried(json_text: str, name: str) -> None:
    """DataError, with the file's name, for a tokenizer that fails its trial."""
    key = _key(json_text)
    if key in _tried:
        return
    if not _mark(key).is_file():
        _try(json_text, name)
    mark_tried(json_text)


def mark_tried(json_text: str) -> None:
    """Remember a tokenizer that passed the test, or was trained here."""
    key = _key(json_text)
    _tried.add(key)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a trial, nothing else
        _mark(key).parent.mkdir(parents=True, exist_ok=True)
        _mark(key).touch()


def _try(json_text: str, name: str) -> None:
    try:
        ask(
            "trial",
            "try_tokenizer",
            {"text": json_text},
            cpu_s=CPU_S + CPU_S_PER_MB * len(json_text) / 1e6,
            memory_bytes=MEMORY_BYTES + MEMORY_PER_BYTE * len(json_text),
        )
    except Refused as error:
        raise DataError(f"{name} {error}.") from error
    except Exhausted as error:
        raise DataError(
            f"{name}: the tokenizer {error}, when it was loaded and tried on a few short texts. Use another tokenizer."
        ) from error


def _key(json_text: str) -> str:
    return hashlib.sha256(f"{VERSION} {tokenizers.__version__} {json_text}".encode()).hexdigest()


def _mark(key: str) -> Path:
    return cache_folder() / "tokenizers" / key
