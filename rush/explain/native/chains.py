"""What `chains.c` holds, as Python functions: chains of multiply-adds, and a choice for every element."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rush.explain.native.host import compile_c

COUNTS = (1, 2, 4, 8)
FACTOR, OFFSET = 0.75, 0.5
"""A chain is x · FACTOR + OFFSET over and over; it tends to 2."""
Way = Literal["by_branch", "by_select"]


@dataclass(frozen=True)
class Chains:
    library: ctypes.CDLL

    @property
    def lanes(self) -> int:
        """fp32 numbers of a vector register."""
        return int(self.library.lanes())

    def run(self, kind: str, count: int, rounds: int, start: float = 0.0) -> float:
        """`count` scalar or vector chains for so many rounds; the sum of where they ended."""
        return float(getattr(self.library, f"{kind}_{count}")(start, FACTOR, rounds))

    def run_together(self, pool: ThreadPoolExecutor, workers: int, rounds: int) -> None:
        """The most chains on every core at once; ctypes lets go of Python's lock meanwhile."""
        list(pool.map(lambda _: self.run("vector", COUNTS[-1], rounds), range(workers)))

    def choose(
        self,
        way: Way,
        which: npt.NDArray[np.uint8],
        x: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
    ) -> Callable[[], object]:
        """A call that computes one of the two polynomials for every element of `x`."""
        arguments = which.ctypes.data, x.ctypes.data, out.ctypes.data, len(x)
        function: Any = getattr(self.library, way)
        return lambda: function(*arguments)


def compile_chains() -> Chains | str:
    """The compiled chains, or the reason why there are none."""
    library = compile_c("chains.c")
    if isinstance(library, str):
        return library
    library.lanes.restype = ctypes.c_long
    for kind in ("scalar", "vector"):
        for count in COUNTS:
            function = getattr(library, f"{kind}_{count}")
            function.restype = ctypes.c_float
            function.argtypes = (ctypes.c_float, ctypes.c_float, ctypes.c_long)
    for way in ("by_branch", "by_select"):
        function = getattr(library, way)
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    return Chains(library)
