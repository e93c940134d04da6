"""What `orders.c` holds, as Python functions: causal attention plain, in FlashAttention 1's order and in 2's."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rush.explain.native.host import compile_c

TILE = DIM = 64
WAYS = ("plain", "first", "second")
Floats = npt.NDArray[np.float32]


class Heads:
    """Random queries, keys (each tile transposed, too) and values of some heads, and where the outputs go."""

    def __init__(self, heads: int, length: int, *, seed: int = 0, plain: bool = True) -> None:
        assert length % TILE == 0
        generator = np.random.default_rng(seed)

        def drawn(*dims: int) -> Floats:
            return generator.standard_normal((heads, *dims), dtype=np.float32)

        self.heads, self.length = heads, length
        self.q, self.k, self.v = drawn(length, DIM), drawn(length, DIM), drawn(length, DIM)
        tiles = self.k.reshape(heads, length // TILE, TILE, DIM)
        self.k_t = np.ascontiguousarray(tiles.swapaxes(2, 3))
        self.o = np.full((heads, length, DIM), np.nan, dtype=np.float32)
        self.top, self.sum = (np.empty((heads, length), dtype=np.float32) for _ in range(2))
        # One matrix of scores for all heads: on a CPU they are computed one after another.
        self.scores = np.zeros((length, length), dtype=np.float32) if plain else None


@dataclass(frozen=True)
class Orders:
    library: ctypes.CDLL

    def plain(self, on: Heads, head: int) -> None:
        assert on.scores is not None
        self._call("plain", on, head, on.scores.ctypes.data, on.length)

    def first(self, on: Heads, head: int) -> None:
        self._call("first", on, head, on.top[head].ctypes.data, on.sum[head].ctypes.data, on.length)

    def second(self, on: Heads, head: int, start: int = 0, stride: int = 1) -> None:
        self._call("second", on, head, on.length, start, stride)

    def first_together(self, pool: ThreadPoolExecutor, on: Heads) -> None:
        """Heads on several cores: within one, all tiles of keys change the same outputs."""
        list(pool.map(lambda head: self.first(on, head), range(on.heads)))

    def second_together(self, pool: ThreadPoolExecutor, on: Heads, workers: int) -> None:
        """Tiles of queries on several cores, of however few heads."""
        parts = [(head, part) for head in range(on.heads) for part in range(workers)]
        list(pool.map(lambda part: self.second(on, part[0], part[1], workers), parts))

    def _call(self, name: str, on: Heads, head: int, *rest: int) -> None:
        function: Any = getattr(self.library, name)
        function(*(array[head].ctypes.data for array in (on.q, on.k_t, on.v, on.o)), *rest)


def compile_orders() -> Orders | str:
    """The compiled orders, or the reason why there are none."""
    library = compile_c("orders.c", "-lm", "-ffp-contract=fast")
    if isinstance(library, str):
        return library
    pointer, number = ctypes.c_void_p, ctypes.c_long
    for name, rest in (
        ("plain", [pointer, number]),
        ("first", [pointer, pointer, number]),
        ("second", [number] * 3),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = None, [pointer] * 4 + rest
    return Orders(library)
