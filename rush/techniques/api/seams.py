"""How techniques replace parts of a model, one instance at a time.

An attention core or a loss head is simply replaced by another module. To wrap a whole block (to recompute it,
to offload its activations) the instance gets a forward of its own; the class, and every other model in the
process, is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rush.hardware import Machine
from rush.models import AttentionForm
from rush.recipe import Knob, Recipe
from rush.techniques.api.contract import Evidence, Observation, Proof, Requirement

needs_triton = Requirement(
    "it needs Triton and a CUDA GPU (on a CPU, TRITON_INTERPRET=1 in the environment interprets its kernels, "
    "slowly)",
    lambda machine, recipe: (
        machine.triton is not None and (machine.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    ),
)


def _has_kernels(machine: Machine, recipe: Recipe) -> bool:
    """Triton's kernels, compiled or interpreted, or those for a CPU."""
    from rush.kernels import cpu

    if machine.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return cpu.cannot_run() is None
    return machine.device in ("cuda", "cpu") and machine.triton is not None


needs_kernels = Requirement(
    "it needs a CUDA GPU and Triton; or a CPU (ARM or x86, under Linux) and a C++ compiler to build its kernels with, or the "
    "built ones in the cache",
    _has_kernels,
)


def rush_kernels_ran(kernels: tuple[str, ...], ops: tuple[str, ...]) -> Evidence:
    """Kernels with these prefixes ran on a GPU (a replayed CUDA graph shows no operators); on a CPU the `ops`."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        wanted, names = (kernels, seen.kernels) if seen.kernels else (ops, seen.ops)
        found = {part: [name for name in names if name.startswith(part)] for part in wanted}
        if missing := [part for part, names in found.items() if not names]:
            return Proof(False, f"nothing named {', '.join(missing)} ran")
        return Proof(True, f"ran {', '.join(sorted({name for names in found.values() for name in names}))}")

    said = [" and ".join(f"`{part}`" for part in parts) for parts in (kernels, ops)]
    evidence.__doc__ = f"In the profile: {said[0]} on a GPU, {said[1]} on a CPU."
    return evidence


class FunctionModule(nn.Module):
    """A function, such as a kernel, in the place of a module without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give this instance its own `forward(self, ...)`; `type(self).forward` is the original.

    One function for all blocks, with the block as its argument, so that they share one compiled graph.
    """
    assert "forward" not in module.__dict__, "two techniques override the forward of one module"
    module.__dict__["forward"] = MethodType(forward, module)


def set_attention_core(
    model: nn.Module, core: Callable[[AttentionForm], nn.Module], document_form: nn.Module | None = None
) -> None:
    """Replace the attention core of every block, and the form of packed documents if it is not ids.

    `core` builds one from how its layer attends: scale, window, soft cap."""
    for block in model.get_submodule("blocks").children():
        attention = block.get_submodule("attention")
        attention.core = core(getattr(attention, "form"))  # noqa: B009 (of any kind of attention)
    if document_form is not None:
        model.document_form = document_form


def to_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """Cast the inputs of an operator that autocast does not know."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]


def repeat_heads(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for every query head, for kernels without grouped-query attention."""
    groups = q_bhtd.shape[1] // k_bktd.shape[1]
    if groups == 1:
        return k_bktd, v_bktd
    return k_bktd.repeat_interleave(groups, 1), v_bktd.repeat_interleave(groups, 1)
