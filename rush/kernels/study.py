"""The definition of a fair benchmark of an op: its inputs, its contenders, its minimum work.

Each op's folder has a `study.py` with one `STUDY`; the bench finds them, so adding a kernel is adding a folder. A study
has no timers and no files: the bench calls its functions, checks their results and times them.

Bytes and FLOPs are those of the op, not of an implementation: every input read once, every result written once, every
matmul computed once. A contender that moves more reaches less of the ceiling, which is the point.
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
"""Forward as in training (with saved activations), backward alone, or both."""
Kind = Literal["ours", "plain", "compiled", "baseline"]
Bound = Literal["memory", "matmul"]
Inputs = Mapping[str, Tensor]
Results = Tensor | tuple[Tensor, ...]
Call = Callable[..., Results]
"""Takes the inputs by name."""


@dataclass(frozen=True)
class Size:
    """One size of the op."""

    label: str
    dims: Mapping[str, int]
    target: bool = True
    """Whether targets apply here; a quick bench measures only these sizes."""

    def __getitem__(self, dim: str) -> int:
        return self.dims[dim]


@dataclass(frozen=True)
class Work:
    """The least bytes and FLOPs of a pass."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Contender:
    """One implementation of the op."""

    name: str
    kind: Kind
    call: Call
    absent: Callable[[torch.device], str | None] = lambda device: None
    """Why it cannot run here, None if it can. Called before `call`, which may import its library."""
    tolerance: float | None = None
    """The relative error allowed where the format rounds (fp8, 8-bit moments); by default twice plain torch's error
    forward and three times backward."""
    compile: bool = False
    """Whether the bench wraps `call` in torch.compile."""


@dataclass(frozen=True)
class Target:
    """What our kernel must reach at every size with `target`."""

    metric: Literal["ceiling", "speed", "time", "memory"]
    """Fraction of the ceiling; speedup over `against`; time relative to `against`; or memory beyond the results
    relative to `of(size)` bytes."""
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
    """The dim on the x axis of the chart."""
    sizes: tuple[Size, ...]
    small: tuple[Size, ...]
    """For a CPU under the interpreter: checked, not timed."""
    make: Callable[[Size, torch.device, torch.dtype], Inputs]
    """Random inputs, the same for the same size; differentiable ones require grad."""
    reference: Call
    """The op in plain torch, in any dtype; contenders are checked against it in `exact`."""
    contenders: tuple[Contender, ...]
    work: Callable[[Size, int, Pass], Work]
    """The least work of a pass, given the element size in bytes."""
    on_cpu: tuple[Size, ...] = ()
    """For a CPU where our kernel is in C++ and timed; none otherwise."""
    targets: tuple[Target, ...] = ()
    passes: tuple[Pass, ...] = ("forward", "both")
    """Only `forward` for an op without gradients, such as an optimizer step."""
    dtype: torch.dtype = torch.bfloat16
    matmul_dtype: str | None = None
    """Whose measured matmul rate is the ceiling of a compute-bound op; by default `dtype`'s."""
    exact: torch.dtype = torch.float64
    series: Callable[[Size], str] = field(default=lambda size: "")
    """Sizes of one series share a chart: for attention, those of one head dim."""


def names() -> list[str]:
    """The ops with a study, found without importing a kernel."""
    root = Path(__file__).parent
    return sorted(path.parent.name for path in root.glob("*/study.py"))


def load(name: str) -> Study:
    study: Study = import_module(f"rush.kernels.{name}.study").STUDY
    assert study.op == name, f"{name}/study.py studies {study.op}"
    return study


def needs(*libraries: str) -> Callable[[torch.device], str | None]:
    """For a baseline that needs these libraries and a CUDA device."""

    def absent(device: torch.device) -> str | None:
        if missing := [library for library in libraries if find_spec(library) is None]:
            return f"{', '.join(missing)} is not installed"
        return None if device.type == "cuda" else "it needs a CUDA GPU"

    return absent


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it needs a CUDA GPU"


def normal(device: torch.device, seed: int, *dims: int, scale: float = 1.0) -> Tensor:
    """Normal fp32 values from a seed, so that all contenders get the same."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*dims, device=device, generator=generator) * scale


def ours(call: Call) -> Contender:
    return Contender("rush", "ours", call)


def torch_pair(call: Call) -> tuple[Contender, Contender]:
    """Plain torch, eager and compiled."""
    compiled = Contender("compiled torch", "compiled", call, compile=True)
    return Contender("plain torch", "plain", call), compiled


def liger(call: Call) -> Contender:
    return Contender("Liger", "baseline", call, needs("liger_kernel"))


def matrix_work(forward: int, backward: int) -> Callable[[Size, int, Pass], Work]:
    """The work of a memory-bound op on a matrix: how many of its size each pass reads and writes."""

    def work(size: Size, element: int, step: Pass) -> Work:
        passes = {"forward": forward, "backward": backward, "both": forward + backward}[step]
        return Work(float(passes * size["rows"] * size["columns"] * element))

    return work


def matrix_study(
    op: str,
    about: str,
    reference: Call,
    contenders: tuple[Contender, ...],
    work: tuple[int, int],
    targets: tuple[Target, ...],
    inputs: tuple[str, ...] = ("x",),
) -> Study:
    """The study of a memory-bound op on matrices of one size; `work` as in `matrix_work`."""

    def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
        drawn = (normal(device, seed, size["rows"], size["columns"]).to(dtype) for seed in (1, 2))
        return {name: tensor.requires_grad_() for name, tensor in zip(inputs, drawn, strict=False)}

    return Study(
        op=op,
        about=about,
        bound="memory",
        axis="columns",
        sizes=MATRICES,
        small=SMALL_MATRICES,
        on_cpu=MATRICES_ON_CPU,
        make=make,
        reference=reference,
        contenders=contenders,
        work=matrix_work(*work),
        targets=targets,
    )


def labels(device: torch.device, count: int, classes: int) -> Tensor:
    """Random labels, one in twenty ignored."""
    generator = torch.Generator(device).manual_seed(9)
    drawn = torch.randint(0, classes, (count,), device=device, generator=generator)
    drawn[::20] = -100
    return drawn


# 16k rows (a batch of 8 × 2048 tokens), the widths of small and large models.
TOKENS = 16384
MATRICES = (
    Size("16k × 2048", {"rows": TOKENS, "columns": 2048}),
    Size("16k × 4096", {"rows": TOKENS, "columns": 4096}, target=False),
    Size("16k × 8192", {"rows": TOKENS, "columns": 8192}),
)
SMALL_MATRICES = tuple(Size(f"64 × {width}", {"rows": 64, "columns": width}) for width in (128, 512))
# For a CPU: 2k rows, as in a small model.
MATRICES_ON_CPU = tuple(
    Size(f"2k × {width}", {"rows": 2048, "columns": width}) for width in (512, 2048, 8192)
)
MEMORY_TARGETS = (
    Target("ceiling", ("forward", "both"), at_least=0.85),
    Target("speed", ("forward", "both"), at_least=1.0, against="Liger"),
)


def with_residual(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The same sizes, without and with the residual add before the op."""
    added = (Size(f"{s.label}, residual add", {**s.dims, "add": 1}, s.target) for s in sizes if s.target)
    return (*(Size(s.label, {**s.dims, "add": 0}, s.target) for s in sizes), *added)
