"""Tile sizes, warps and pipeline stages for each kernel, head dim and kind of GPU.

A tile of queries stays on chip while tiles of keys stream by (in the kernel for dk and dv, keys stay). Larger tiles read
device memory less often, but need registers for the accumulators and shared memory for `stages` tiles in flight; past
either limit the compiler spills or the launch fails. The values were chosen by measuring (`scripts/tune_attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rush.kernels import support

Part = Literal["forward", "dq", "dkdv"]
PARTS: tuple[Part, ...] = ("forward", "dq", "dkdv")
HEAD_DIMS = (16, 32, 64, 128, 256)
WIDE = 256
"""A head dim whose tiles fill shared memory (227 KiB a block on Hopper): smaller ones, fewer in flight."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch settings of a kernel."""

    rows: int
    """Queries of a tile."""
    columns: int
    """Keys of a tile."""
    warps: int = 4
    stages: int = 2
    tma: bool = False
    """Whether tiles come in by the copy engine of Hopper and newer (tensor descriptors), or by loads of the threads."""
    split: bool = True
    """Whether tiles that need no mask have a loop of their own; otherwise one loop masks every tile."""

    def __str__(self) -> str:
        flags = f"{' tma' if self.tma else ''}{'' if self.split else ' one-loop'}"
        return f"{self.rows}x{self.columns} w{self.warps} s{self.stages}{flags}"


# The first of each list is what is used; the others are what scripts/tune_attention.py tries beside it. Several small
# programs on a multiprocessor hide each other's waits; one large one reads less. Only a measurement shows which wins.
HOPPER: dict[tuple[Part, int], tuple[Tiles, ...]] = {
    ("forward", 64): (
        Tiles(64, 128, warps=4, stages=2, tma=True),
        Tiles(128, 64, warps=4, stages=3, tma=True),
        Tiles(128, 128, warps=8, stages=3, tma=True),
        Tiles(128, 128, warps=4, stages=2, tma=True),
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(128, 64, warps=8, stages=3, tma=True),
        Tiles(128, 128, warps=8, stages=3),
        Tiles(128, 64, warps=4, stages=3, tma=True, split=False),
    ),
    ("forward", 128): (
        Tiles(128, 64, warps=4, stages=2, tma=True),
        Tiles(128, 128, warps=8, stages=2, tma=True),
        Tiles(128, 64, warps=8, stages=3, tma=True),
        Tiles(128, 128, warps=8, stages=3, tma=True),
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(128, 32, warps=4, stages=3, tma=True),
        Tiles(128, 64, warps=8, stages=3),
        Tiles(128, 128, warps=8, stages=2, tma=True, split=False),
    ),
    ("dq", 64): (
        Tiles(128, 64, warps=8, stages=3, tma=True),
        Tiles(128, 64, warps=8, stages=2, tma=True),
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(64, 64, warps=4, stages=3, tma=True),
        Tiles(64, 128, warps=4, stages=2, tma=True),
        Tiles(128, 128, warps=8, stages=2, tma=True),
        Tiles(64, 64, warps=4, stages=3),
        Tiles(128, 64, warps=8, stages=3, tma=True, split=False),
    ),
    ("dq", 128): (
        Tiles(128, 64, warps=8, stages=3, tma=True),
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(128, 128, warps=8, stages=2, tma=True),
        Tiles(128, 32, warps=8, stages=2, tma=True),
        Tiles(64, 32, warps=4, stages=3, tma=True),
        Tiles(128, 64, warps=8, stages=2, tma=True),
        Tiles(64, 64, warps=4, stages=2),
        Tiles(128, 64, warps=8, stages=3, tma=True, split=False),
    ),
    ("dkdv", 64): (
        Tiles(32, 64, warps=4, stages=2, tma=True),
        Tiles(64, 128, warps=8, stages=3, tma=True),
        Tiles(64, 64, warps=4, stages=3, tma=True),
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(32, 128, warps=8, stages=2, tma=True),
        Tiles(32, 128, warps=4, stages=3, tma=True),
        Tiles(64, 64, warps=4, stages=3),
        Tiles(64, 128, warps=8, stages=3, tma=True, split=False),
    ),
    ("dkdv", 128): (
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(64, 128, warps=8, stages=3, tma=True),
        Tiles(64, 128, warps=8, stages=2, tma=True),
        Tiles(32, 64, warps=4, stages=3, tma=True),
        Tiles(32, 128, warps=8, stages=3, tma=True),
        Tiles(32, 64, warps=4, stages=2, tma=True),
        Tiles(32, 128, warps=8, stages=3),
        Tiles(64, 128, warps=8, stages=2, tma=True, split=False),
    ),
    # Not measured yet: the first of each is what fits without spilling.
    ("forward", WIDE): (
        Tiles(128, 64, warps=8, stages=2, tma=True),
        Tiles(64, 64, warps=4, stages=2, tma=True),
        Tiles(128, 32, warps=8, stages=2, tma=True),
        Tiles(64, 32, warps=4, stages=3, tma=True),
    ),
    ("dq", WIDE): (
        Tiles(64, 32, warps=4, stages=2, tma=True),
        Tiles(64, 32, warps=8, stages=2, tma=True),
        Tiles(64, 64, warps=8, stages=1, tma=True),
    ),
    ("dkdv", WIDE): (
        Tiles(32, 64, warps=8, stages=2, tma=True),
        Tiles(64, 64, warps=8, stages=1, tma=True),
        Tiles(32, 64, warps=8, stages=1, tma=True),
    ),
}
# Before Hopper there is less shared memory (99 KiB a block on consumer cards) and no copy engine.
OLDER: dict[Part, Tiles] = {"forward": Tiles(64, 64), "dq": Tiles(64, 32), "dkdv": Tiles(32, 64)}
OLDER_WIDE: dict[Part, Tiles] = {"forward": Tiles(64, 16), "dq": Tiles(32, 16), "dkdv": Tiles(16, 32)}
# fp32 matmuls do not use the tensor cores here: the fp32 units compute them exactly.
FP32: dict[Part, Tiles] = {part: Tiles(16, 16, warps=4, stages=1) for part in PARTS}
FP32_WIDE: dict[Part, Tiles] = {part: Tiles(16, 16, warps=8, stages=1) for part in PARTS}
"""From head dim 128 on: by four warps, a thread's share of a tile does not fit into its registers."""
# Small enough that short sequences have several, large enough that there are few: the interpreter is slow by the tile.
INTERPRETED: dict[Part, Tiles] = {"forward": Tiles(64, 32), "dq": Tiles(64, 64), "dkdv": Tiles(64, 64)}


def choose(part: Part, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """The tiles of this kernel on this device."""
    if support.INTERPRETED:
        return INTERPRETED[part]
    if dtype == torch.float32:
        return (FP32_WIDE if head_dim >= 128 else FP32)[part]
    if torch.cuda.get_device_capability(device) == (9, 0):
        return HOPPER[part, max(head_dim, 64)][0]
    return OLDER_WIDE[part] if head_dim == WIDE else OLDER[part]
