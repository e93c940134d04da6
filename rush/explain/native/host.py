"""The sources in C beside this file, compiled with the system's C compiler and called from Python."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

COMPILERS = ("cc", "gcc", "clang")
# The widest vectors this processor has; the flag has another name on some, and none on others.
FLAGS: Sequence[Sequence[str]] = (("-march=native",), ("-mcpu=native",), ())

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Walks:
    library: ctypes.CDLL

    def chase(self, place: int, sixteens: int) -> int:
        """Follow the chain from an address for 16 hops times `sixteens`; where it led."""
        found: int = self.library.chase(place, sixteens)
        return found

    def read(self, block: Bytes, repeats: int) -> None:
        self.library.read_all(block.ctypes.data, block.nbytes, repeats)

    def read_together(self, pool: ThreadPoolExecutor, blocks: Sequence[Bytes], repeats: int) -> None:
        """Each thread reads its own block; ctypes lets go of Python's lock meanwhile."""
        list(pool.map(lambda block: self.read(block, repeats), blocks))


def compile_walks() -> Walks | str:
    """The compiled walks, or the reason why there are none."""
    library = compile_c("memory.c")
    if isinstance(library, str):
        return library
    library.chase.restype = ctypes.c_void_p
    library.chase.argtypes = (ctypes.c_void_p, ctypes.c_long)
    library.read_all.restype = ctypes.c_uint64
    library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long)
    return Walks(library)


def compile_c(name: str, *further: str) -> ctypes.CDLL | str:
    """A source of this folder as a library, or the reason why it cannot be one here."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return "no C compiler (cc, gcc or clang) is on the PATH"
    source = resources.files("rush.explain.native").joinpath(name).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="rush-explain-") as folder:
        code, built = Path(folder) / name, Path(folder) / "built.so"
        code.write_text(source, encoding="utf-8")
        description = ""
        for flags in FLAGS:
            words = [compiler, "-O3", *flags, "-shared", "-fPIC", "-o", str(built), str(code), *further]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return ctypes.CDLL(str(built))
            description = (done.stderr.strip().splitlines() or ["it gave no reason"])[0]
    return f"{Path(compiler).name} could not compile {name}: {description[:200]}"


def block(size_bytes: int, seed: int = 0) -> Bytes:
    """Random bytes that begin at a multiple of 512; a mebibyte of them over and over."""
    whole = np.empty(size_bytes + 512, dtype=np.uint8)
    offset = -whole.ctypes.data % 512
    found = whole[offset : offset + size_bytes]
    tile = np.random.default_rng(seed).integers(0, 256, min(size_bytes, 2**20), dtype=np.uint8)
    for start in range(0, size_bytes, len(tile)):
        part = found[start : start + len(tile)]
        part[:] = tile[: len(part)]
    return found


def chain(size_bytes: int, line_bytes: int) -> Bytes:
    """A block whose lines, one after another in random order, hold each the address of the next."""
    found = block(size_bytes)
    order = np.random.default_rng(size_bytes).permutation(size_bytes // line_bytes).astype(np.uint64)
    addresses = np.uint64(found.ctypes.data) + order * np.uint64(line_bytes)
    places = found.view(np.uint64)
    places[order * np.uint64(line_bytes // 8)] = np.roll(addresses, -1)
    return found
