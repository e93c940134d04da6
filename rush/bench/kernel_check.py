"""Did a contender compute the right thing? Held against the exact result, at the size that is timed.

The yardstick is what plain torch itself gets wrong in the same dtype: twice that is allowed for results,
three times for gradients (which hold two roundings), and never less than a fraction of one rounding, where
plain torch is exact by luck. Errors are root mean squares, relative to the exact result's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rush.kernels.study import Call, Contender, Inputs

FORWARD_FACTOR, BACKWARD_FACTOR = 2.0, 3.0
PLAIN_MAY_BE_OFF = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-9}
"""A few dozen roundings: beyond that plain torch did something else than the reference, and is no yardstick."""

Results = dict[str, Tensor]


@dataclass(frozen=True)
class ExactResults:
    """The exact results of one size, and by how much plain torch misses them."""

    exact: Results
    plain_errors: Mapping[str, float]
    dtype: torch.dtype


def fresh(inputs: Inputs) -> dict[str, Tensor]:
    """A copy of the inputs, since some contenders write into theirs."""
    return {name: _leaf(tensor.detach().clone(), tensor.requires_grad) for name, tensor in inputs.items()}


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def widened(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values in a wider dtype; whole numbers stay."""
    return {
        name: _leaf(
            tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype), tensor.requires_grad
        )
        for name, tensor in inputs.items()
    }


def _leaf(tensor: Tensor, needs_gradient: bool) -> Tensor:
    return tensor.requires_grad_(needs_gradient)


def outputs_of(call: Call, inputs: Inputs) -> tuple[Tensor, ...]:
    found = call(**inputs)
    return found if isinstance(found, tuple) else (found,)


def wanted_gradients(inputs: Inputs) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}


def incoming(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that flow into the op: ones for a loss, otherwise random, the same for every contender."""
    found = []
    for place, output in enumerate(outputs):
        if output.dim() == 0:
            found.append(torch.ones_like(output))
            continue
        generator = torch.Generator(output.device).manual_seed(1000 + place)
        drawn = torch.randn(output.shape, device=output.device, generator=generator)
        found.append(drawn.to(output.dtype))
    return found


def results_of(call: Call, inputs: Inputs, flowing: Sequence[Tensor] | None = None) -> Results:
    """Everything the op returns: its results, and the gradient of every input that requires one.

    Some contenders write into what flows in, so `flowing` must be the caller's to lose.
    """
    outputs = outputs_of(call, inputs)
    found = {_result_name(place, len(outputs)): output.detach() for place, output in enumerate(outputs)}
    found |= backward_of(outputs, inputs, incoming(differentiable(outputs)) if flowing is None else flowing)
    return found


def differentiable(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [output for output in outputs if output.requires_grad]


def backward_of(outputs: Sequence[Tensor], inputs: Inputs, flowing: Sequence[Tensor]) -> Results:
    """The gradients, given those that flow in from above."""
    wanted, roots = wanted_gradients(inputs), differentiable(outputs)
    if not wanted or not roots:
        return {}
    above = [
        gradient.to(root.dtype) for gradient, root in zip(flowing, roots, strict=True)
    ]  # mostly as they are
    found = torch.autograd.grad(roots, list(wanted.values()), above)
    return {f"gradient of {name}": part for name, part in zip(wanted, found, strict=True)}


def _result_name(place: int, count: int) -> str:
    return "the result" if count == 1 else f"result {place + 1}"


def measure_up(
    reference: Call, plain: Call, inputs: Inputs, exact: torch.dtype, dtype: torch.dtype
) -> tuple[ExactResults, list[Tensor]]:
    """The yardstick of a size, and the gradients that flow into every contender."""
    mine = fresh(inputs)
    outputs = outputs_of(plain, mine)
    flowing = incoming(differentiable(outputs))
    found = {_result_name(place, len(outputs)): output.detach() for place, output in enumerate(outputs)}
    found |= backward_of(outputs, mine, copies(flowing))
    del outputs, mine
    right = results_of(reference, widened(inputs, exact), copies(flowing))
    return ExactResults(right, errors_of(found, right), dtype), flowing


def errors_of(found: Results, exact: Results) -> dict[str, float]:
    """The relative error of everything; infinite where something is missing or not finite."""
    return {name: error(found.get(name), right) for name, right in exact.items()}


@torch.no_grad()
def error(found: Tensor | None, right: Tensor) -> float:
    if found is None or found.shape != right.shape:
        return math.inf
    size = float(right.norm())
    off = float((found.to(right.dtype) - right).norm())
    if not math.isfinite(off):
        return math.inf
    return off / size if size else off


def judge(contender: Contender, found: Results, yardstick: ExactResults | None) -> dict[str, Any]:
    """The record's correctness part: verdict, the error nearest to (or farthest beyond) what is allowed."""
    if yardstick is None:
        return {"verdict": "not judged", "error": None, "allowed": None, "worst": None,
                "why": "the exact result could not be computed here"}  # fmt: skip
    errors = errors_of(found, yardstick.exact)
    allowed = {name: _allowed(name, contender, yardstick) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    equal = errors[worst] <= allowed[worst]
    finite = math.isfinite(errors[worst])
    said = f"off by {errors[worst]:.1e}" if finite else "missing or not finite"
    return {
        "verdict": "equal" if equal else "different",
        "error": errors[worst] if finite else None,
        "allowed": allowed[worst],
        "worst": worst,
        "why": f"{worst} is {said}, {'within' if equal else 'beyond'} {allowed[worst]:.1e}",
    }


def _allowed(name: str, contender: Contender, yardstick: ExactResults) -> float:
    if contender.tolerance is not None:
        return contender.tolerance
    if contender.kind == "plain":
        return PLAIN_MAY_BE_OFF[yardstick.dtype]
    factor = BACKWARD_FACTOR if name.startswith("gradient") else FORWARD_FACTOR
    # A root mean square over many values is a fraction of one rounding; a single number may be off by a whole one.
    least = torch.finfo(yardstick.dtype).eps / (4 if yardstick.exact[name].numel() > 16 else 1)
    return max(factor * yardstick.plain_errors.get(name, 0.0), least)
