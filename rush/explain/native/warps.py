# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""Divergence on a GPU: up to 32 ways through a program, taken by whole warps or by the lanes of one.

Triton has no branch for a single lane (`tl.where` computes both sides), so the ways are PTX inside a Triton kernel: one
loop of multiply-adds for each way, jumped over by every lane that does not take it. Every lane does the same amount of
arithmetic, whichever way it takes.
Imported only where a CUDA device is measured: it needs Triton. The interpreter cannot run PTX, so on a CPU the kernel is
only compiled (tests/kernels/test_compiles_for_gpus.py).
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

WARP, WAYS, THREADS = 32, 32, 1024


def factor(way: int) -> float:
    """What the way multiplies with: another one for each, so that no two of them can be compiled into one."""
    return 0.5 + way / 128


OFFSET = 0.5


def _bits(value: float) -> str:
    """An fp32 number as PTX writes it exactly."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _ptx() -> str:
    lines = ["{", ".reg .pred taken;", ".reg .s32 left;", ".reg .f32 y;", "mov.f32 y, $2;"]
    for way in range(WAYS):
        lines += [
            f"setp.ne.s32 taken, $1, {way};",
            f"@taken bra SKIP_{way};",
            "mov.s32 left, $3;",
            f"AGAIN_{way}:",
            f"fma.rn.f32 y, y, {_bits(factor(way))}, {_bits(OFFSET)};",
            "sub.s32 left, left, 1;",
            "setp.gt.s32 taken, left, 0;",
            f"@taken bra AGAIN_{way};",
            f"SKIP_{way}:",
        ]
    return "\n".join([*lines, "mov.f32 $0, y;", "}"])


PTX = tl.constexpr(_ptx())


@triton.jit
def ways_kernel(out, rounds, NUM_WAYS: tl.constexpr, WHOLE_WARPS: tl.constexpr, BLOCK: tl.constexpr):
    """Every thread takes one of the ways: the one of its warp, or one of its own."""
    thread = tl.arange(0, BLOCK)
    way = (thread // 32 if WHOLE_WARPS else thread) % NUM_WAYS
    start = thread.to(tl.float32)
    y = tl.inline_asm_elementwise(
        PTX, "=f,r,f,r", [way, start, rounds], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + tl.program_id(0) * BLOCK + thread, y)


class Ways:
    """A launch of as many programs of 1024 threads as fill the device, each thread on one of `ways` ways."""

    def __init__(self, programs: int, rounds: int, device: str = "cuda") -> None:
        self.programs, self.rounds = programs, rounds
        self.out = torch.empty(programs * THREADS, dtype=torch.float32, device=device)

    def __call__(self, ways: int, *, whole_warps: bool) -> None:
        # A thread holds one number: 32 warps for 1024 of them.
        ways_kernel[(self.programs,)](
            self.out,
            self.rounds,
            NUM_WAYS=ways,
            WHOLE_WARPS=whole_warps,
            BLOCK=THREADS,
            num_warps=THREADS // WARP,
        )


def expected(ways: int, rounds: int, *, whole_warps: bool) -> Tensor:
    """What the threads of one program end with, in float64: the test's reference."""
    thread = torch.arange(THREADS)
    way = (thread // WARP if whole_warps else thread) % ways
    y, multiplier = thread.double(), 0.5 + way.double() / 128
    for _ in range(rounds):
        y = y * multiplier + OFFSET
    return y
