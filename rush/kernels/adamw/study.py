"""How the optimizer step is measured: through the optimizers people use, over a list of tensors.

The check is the first step from zero moments. Timed steps continue with the same gradient: the speed does not depend on
the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.adamw import RushAdamW
from rush.kernels.adamw.reference import adamw_
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Target, Work

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TENSORS = 8
Make = Callable[..., torch.optim.Optimizer]


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    dtype = torch.float32 if size["bits"] == 32 else dtype
    each = size["parameters"] // TENSORS
    found = {}
    for index in range(TENSORS):
        found[f"parameter_{index}"] = study.normal(device, index, each, scale=0.02).to(dtype)
        found[f"gradient_{index}"] = study.normal(device, 100 + index, each).to(dtype)
        for moment in ("exp_avg", "exp_avg_sq"):  # for those that keep no state of their own
            found[f"{moment}_{index}"] = torch.zeros(each, device=device, dtype=dtype)
    return found


class OptimizerStep:
    """One step of an optimizer over the inputs; one optimizer per set of inputs."""

    def __init__(self, make: Make, **options: Any) -> None:
        self.make, self.options = make, options
        self.inputs: Tensor | None = None
        self.step: Callable[[], Any] = lambda: None

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        parameters = [inputs[f"parameter_{index}"] for index in range(TENSORS)]
        if self.inputs is not parameters[0]:
            for index, parameter in enumerate(parameters):
                parameter.grad = inputs[f"gradient_{index}"]
            self.step = self.make(parameters, **SETTINGS, **self.options).step
            self.inputs = parameters[0]
        self.step()
        return tuple(parameters)


def defined(**inputs: Tensor) -> tuple[Tensor, ...]:
    """The first step of the reference."""
    found = []
    for index in range(TENSORS):
        parameter, gradient = inputs[f"parameter_{index}"].clone(), inputs[f"gradient_{index}"]
        adamw_(
            parameter, gradient, torch.zeros_like(gradient), torch.zeros_like(gradient), step=1, **SETTINGS
        )
        found.append(parameter)
    return tuple(found)


def in_place(**inputs: Tensor) -> tuple[Tensor, ...]:
    """The reference over the list of tensors, for torch.compile to fuse; in place."""
    for index in range(TENSORS):
        tensors = (inputs[f"{name}_{index}"] for name in ("parameter", "gradient", "exp_avg", "exp_avg_sq"))
        adamw_(*tensors, step=1, **SETTINGS)
    return tuple(inputs[f"parameter_{index}"] for index in range(TENSORS))


def work(size: Size, element: int, step: Pass) -> Work:
    """Weight, gradient and two moments read; weight and moments written."""
    return Work(7.0 * size["parameters"] * (4 if size["bits"] == 32 else element))


def _size(millions: int, bits: int) -> Size:
    return Size(
        f"{millions}M, {'fp32' if bits == 32 else 'bf16'}", {"parameters": millions * 2**20, "bits": bits}
    )


STUDY = Study(
    op="adamw",
    about="AdamW over a list of tensors: every weight and moment read and written once, so it is memory-bound.",
    bound="memory",
    axis="parameters",
    sizes=(_size(64, 16), _size(256, 16), _size(256, 32)),
    small=tuple(Size(f"{count:,}", {"parameters": count, "bits": 32}) for count in (4096, 16384)),
    make=make,
    reference=defined,
    contenders=(
        Contender("rush", "ours", OptimizerStep(RushAdamW)),
        Contender("plain torch", "plain", OptimizerStep(torch.optim.AdamW, foreach=False)),
        Contender("compiled torch", "compiled", in_place, compile=True),
        Contender("torch foreach", "baseline", OptimizerStep(torch.optim.AdamW, foreach=True)),
        Contender("torch fused", "baseline", OptimizerStep(torch.optim.AdamW, fused=True)),
    ),
    work=work,
    targets=(
        Target("ceiling", ("forward",), at_least=0.85),
        Target("speed", ("forward",), at_least=1.0, against="torch fused"),
    ),
    passes=("forward",),
    series=lambda size: "fp32" if size["bits"] == 32 else "bf16 weights and moments",
)
