"""Real text that is on every machine and stays what it is: sources of the Python standard library, a dozen files.

(This project's own would do, but then every edit would move the losses of all tests.)
"""

from __future__ import annotations

import concurrent.futures
import json
import wsgiref
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt


def files() -> list[Path]:
    packages = (Path(package.__path__[0]) for package in (json, wsgiref, concurrent.futures))
    return [
        path for package in packages for path in sorted(package.glob("*.py")) if path.stat().st_size > 1000
    ]


@cache
def as_bytes() -> npt.NDArray[np.int64]:
    """All of it as one line of bytes."""
    whole = b"".join(path.read_bytes() for path in files())
    return np.frombuffer(whole, dtype=np.uint8).astype(np.int64)


def write_to(folder: Path) -> Path:
    """The text as documents in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files():
        (folder / f"{path.parent.name}-{path.stem}.txt").write_text(
            path.read_text(encoding="utf-8"), encoding="utf-8"
        )
    return folder
