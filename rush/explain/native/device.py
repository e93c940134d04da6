# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""The walks on a GPU, as Triton kernels: a chain of loads, a stream of loads, and programs that only compute.

Parameters of a kernel carry no types: Triton would look up what the annotation names.
Imported only where a CUDA device is measured: it needs Triton. (With `device="cpu"` they run in Triton's interpreter, for tests.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Numbers of four bytes that one program reads at once."""


@triton.jit
def chase_kernel(table, start, out, hops):
    """One program follows the chain: each load needs the result of the one before."""
    place = tl.load(start)
    for _ in range(hops):
        place = tl.load(table + place)
    tl.store(out, place)


@triton.jit
def read_kernel(source, out, num_blocks, rounds, BLOCK: tl.constexpr):
    """Every program reads blocks of the working set in turn, past the first-level cache."""
    program = tl.program_id(0)
    stride = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for turn in range(rounds):
        which = (program + turn * stride) % num_blocks
        total += tl.load(source + which.to(tl.int64) * BLOCK + lane, cache_modifier=".cg")
    tl.store(out + program * BLOCK + lane, total)


@triton.jit
def busy_kernel(out, rounds, BLOCK: tl.constexpr):
    """A fixed amount of arithmetic and one store: a task as long as every other."""
    lane = tl.arange(0, BLOCK)
    x = lane.to(tl.float32) * 1e-4
    for _ in range(rounds):
        x = x * 0.999 + 0.5
    tl.store(out + tl.program_id(0) * BLOCK + lane, x)


class Chase:
    """A random cycle through a table on the device; `__call__` follows it for `hops`, from where the last call ended."""

    def __init__(self, size_bytes: int, line_bytes: int, hops: int, device: str = "cuda") -> None:
        lines, step = size_bytes // line_bytes, line_bytes // 4
        generator = torch.Generator(device).manual_seed(lines)
        order = torch.randperm(lines, device=device, generator=generator)
        self.table = torch.zeros(lines * step, dtype=torch.int32, device=device)
        self.table[order * step] = (torch.roll(order, -1) * step).to(torch.int32)
        self.place = torch.zeros(1, dtype=torch.int32, device=device)
        self.hops = hops

    def __call__(self, hops: int | None = None) -> None:
        # One warp suffices, and writing the place back lets the next call continue.
        chase_kernel[(1,)](self.table, self.place, self.place, hops or self.hops, num_warps=1)


class DeviceStream:
    """Reads a working set over and over in one launch; `moved_bytes` is what one call reads."""

    def __init__(self, size_bytes: int, num_sms: int, moved_bytes: int, device: str = "cuda") -> None:
        self.programs = num_sms * 8
        self.num_blocks = max(1, size_bytes // (4 * BLOCK))
        self.rounds = max(1, round(moved_bytes / (self.programs * 4 * BLOCK)))
        self.moved_bytes = self.rounds * self.programs * 4 * BLOCK
        generator = torch.Generator(device).manual_seed(1)
        length = self.num_blocks * BLOCK
        self.source = torch.randint(0, 1000, (length,), device=device, generator=generator, dtype=torch.int32)
        self.out = torch.empty(self.programs * BLOCK, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        grid: Any = (self.programs,)
        read_kernel[grid](self.source, self.out, self.num_blocks, self.rounds, BLOCK=BLOCK, num_warps=8)


class Tasks:
    """A number of equal tasks, each a program of 1024 threads that fills a multiprocessor's arithmetic units."""

    def __init__(self, most: int, rounds: int, device: str = "cuda") -> None:
        self.out = torch.empty(most * 1024, dtype=torch.float32, device=device)
        self.rounds = rounds

    def __call__(self, number: int) -> None:
        grid: Any = (number,)
        busy_kernel[grid](self.out, self.rounds, BLOCK=1024, num_warps=32)


class ChainPrograms:
    """Independent chains of multiply-adds, one a thread: a warp, then a whole program, then many of them."""

    def __init__(self, threads: int, rounds: int, device: str = "cuda") -> None:
        self.block = min(1024, threads)
        self.programs = max(1, threads // self.block)
        self.threads, self.rounds = self.programs * self.block, rounds
        self.out = torch.empty(self.threads, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        grid: Any = (self.programs,)
        busy_kernel[grid](self.out, self.rounds, BLOCK=self.block, num_warps=self.block // 32)
