"""What a fair measurement of an op needs: its inputs, who competes, how much work it is at the least.

Each op's folder has a `study.py` with one `STUDY`; the bench finds them by walking this package, so adding
a kernel is adding a folder. A study says nothing about clocks or files: it gives functions, and the bench
calls them, checks what they return and times them.

Bytes and FLOPs are those of the op, not of an implementation: every input read once, every result written
once, every product computed once. A contender that moves more than that reaches less of the ceiling,
which is the point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Pass = Literal["forward", "backward", "both"]
"""The pass forward as training does it (keeping what the backward pass needs), the backward pass by itself, or
one after the other."""
Kind = Literal["ours", "plain", "compiled", "rival"]
Bound = Literal["memory", "matmul"]
Inputs = Mapping[str, Tensor]
Call = Callable[..., "Tensor | tuple[Tensor, ...]"]
"""Takes the inputs by name, returns the results."""


@dataclass(frozen=True)
class Size:
    """One size of the op: a name for people, and the numbers."""

    label: str
    dims: Mapping[str, int]
    target: bool = True
    """Whether a target is judged here; a quick bench measures only these."""

    def __getitem__(self, dim: str) -> int:
        return self.dims[dim]


@dataclass(frozen=True)
class Work:
    """What a pass must do at the least."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Contender:
    """One way to compute the op."""

    name: str
    kind: Kind
    call: Call
    absent: Callable[[torch.device], str | None] = lambda device: None
    """Why it cannot run here, None when it can. Asked before `call`, which may import its library."""
    tolerance: float | None = None
    """The relative error allowed where the format itself rounds (fp8, 8 bits); otherwise plain torch's own
    error, doubled forward and tripled backward, is the measure."""
    compile: bool = False
    """Whether the bench puts torch.compile around `call`."""


@dataclass(frozen=True)
class Target:
    """A figure our kernel must reach at every size marked for it."""

    metric: Literal["ceiling", "speed", "time", "memory"]
    """Fraction of the ceiling; how many times as fast as `against`; its time over that of `against`; or memory
    beyond the results over `of(size)` bytes."""
    passes: tuple[Pass, ...]
    at_least: float | None = None
    at_most: float | None = None
    against: str | None = None
    of: Callable[[Size], float] | None = None
    of_what: str = ""


@dataclass(frozen=True)
class Study:
    op: str
    about: str
    """One sentence: what it computes and what bounds it."""
    bound: Bound
    axis: str
    """The dim that grows along the picture."""
    sizes: tuple[Size, ...]
    small: tuple[Size, ...]
    """For a CPU, where our kernels are interpreted: checked, not timed."""
    make: Callable[[Size, torch.device, torch.dtype], Inputs]
    """Random inputs; the same ones for the same size. Those that need a gradient require it."""
    reference: Call
    """The op in plain torch, in any dtype; what contenders are checked against, computed in `exact`."""
    contenders: tuple[Contender, ...]
    work: Callable[[Size, int, Pass], Work]
    """The least work of a pass, given the bytes of an element."""
    on_cpu: tuple[Size, ...] = ()
    """For a CPU, where our kernel has a side in C++ and is timed; none where it has not."""
    targets: tuple[Target, ...] = ()
    passes: tuple[Pass, ...] = ("forward", "both")
    """Only `forward` for an op without gradients, such as an update of weights."""
    dtype: torch.dtype = torch.bfloat16
    matmul_dtype: str | None = None
    """Whose measured matmul rate is the ceiling of a matmul-bound op; `dtype`'s without it."""
    exact: torch.dtype = torch.float64
    series: Callable[[Size], str] = field(default=lambda size: "")
    """Sizes of one series form one picture: for attention, those of one head dim."""


def names() -> list[str]:
    """The ops that have a study, found without importing a kernel."""
    root = Path(__file__).parent
    return sorted(path.parent.name for path in root.glob("*/study.py"))


def load(name: str) -> Study:
    """The study of one op."""
    study: Study = import_module(f"rush.kernels.{name}.study").STUDY
    assert study.op == name, f"{name}/study.py studies {study.op}"
    return study


def needs(*libraries: str) -> Callable[[torch.device], str | None]:
    """A rival that needs these libraries and a CUDA device."""

    def absent(device: torch.device) -> str | None:
        if missing := [library for library in libraries if find_spec(library) is None]:
            return f"{', '.join(missing)} is not installed"
        return None if device.type == "cuda" else "it needs a CUDA GPU"

    return absent


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it needs a CUDA GPU"


def normal(device: torch.device, seed: int, *dims: int, scale: float = 1.0) -> Tensor:
    """Normal values in fp32 from a generator of their own, so that every contender meets the same."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*dims, device=device, generator=generator) * scale


def ours(call: Call) -> Contender:
    return Contender("rush", "ours", call)


def torch_pair(call: Call) -> tuple[Contender, Contender]:
    """Plain torch, and the same function compiled."""
    return Contender("plain torch", "plain", call), Contender(
        "compiled torch", "compiled", call, compile=True
    )


def liger(call: Call) -> Contender:
    return Contender("Liger", "rival", call, needs("liger_kernel"))


def labels(device: torch.device, count: int, classes: int) -> Tensor:
    """Random labels, one in twenty ignored."""
    generator = torch.Generator(device).manual_seed(9)
    drawn = torch.randint(0, classes, (count,), device=device, generator=generator)
    drawn[::20] = -100
    return drawn


# Matrices of 16k rows (a batch of 8 × 2048 tokens), as wide as small and large models are.
TOKENS = 16384
MATRICES = (
    Size("16k × 2048", {"rows": TOKENS, "columns": 2048}),
    Size("16k × 4096", {"rows": TOKENS, "columns": 4096}, target=False),
    Size("16k × 8192", {"rows": TOKENS, "columns": 8192}),
)
SMALL_MATRICES = (
    Size("64 × 128", {"rows": 64, "columns": 128}),
    Size("64 × 512", {"rows": 64, "columns": 512}),
)
# What fits a CPU: 2k rows, as a small model has them.
MATRICES_ON_CPU = tuple(
    Size(f"2k × {columns}", {"rows": 2048, "columns": columns}) for columns in (512, 2048, 8192)
)
MEMORY_TARGETS = (
    Target("ceiling", ("forward", "both"), at_least=0.85),
    Target("speed", ("forward", "both"), at_least=1.0, against="Liger"),
)


def with_residual(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The same sizes once more, with the residual add before the op."""
    added = (Size(f"{s.label}, residual add", {**s.dims, "add": 1}, s.target) for s in sizes if s.target)
    return (*(Size(s.label, {**s.dims, "add": 0}, s.target) for s in sizes), *added)
