"""Whether a contender is correct: compared with the exact result, at the size that is timed.

The measure is the error of plain torch in the same dtype: twice that is allowed for results,
three times for gradients (which hold two roundings), and never less than a fraction of one rounding, where
plain torch happens to be exact. Errors are root mean squares, relative to the exact result's.
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
"""A few dozen roundings: beyond that plain torch did something else than the reference, and is no measure."""

Results = dict[str, Tensor]


@dataclass(frozen=True)
class ExactResults:
    """The exact results of one size, and by how much plain torch misses them."""

    exact: Results
    plain_errors: Mapping[str, float]
    dtype: torch.dtype
    gradients: frozenset[str]
    """Those of the results that are gradients."""


def fresh(inputs: Inputs) -> dict[str, Tensor]:
    """A copy of the inputs, since some contenders write into theirs."""
    return {name: _leaf(tensor.detach().clone(), tensor.requires_grad) for name, tensor in inputs.items()}


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def widened(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values in a wider dtype; integers stay."""
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


def random_grad_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the outputs: ones for a loss, otherwise random, the same for every contender."""
    found = []
    for place, output in enumerate(outputs):
        if output.dim() == 0:
            found.append(torch.ones_like(output))
            continue
        generator = torch.Generator(output.device).manual_seed(1000 + place)
        drawn = torch.randn(output.shape, device=output.device, generator=generator)
        found.append(drawn.to(output.dtype))
    return found


def results_of(call: Call, inputs: Inputs, grad_outputs: Sequence[Tensor] | None = None) -> Results:
    """Everything the op returns: its results, and the gradient of every input that requires one.

    Some contenders overwrite `grad_outputs`, so the caller passes a copy.
    """
    outputs = outputs_of(call, inputs)
    found = {_result_name(place, len(outputs)): output.detach() for place, output in enumerate(outputs)}
    found |= backward_of(
        outputs,
        inputs,
        random_grad_outputs(differentiable(outputs)) if grad_outputs is None else grad_outputs,
    )
    return found


def differentiable(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [output for output in outputs if output.requires_grad]


def backward_of(outputs: Sequence[Tensor], inputs: Inputs, grad_outputs: Sequence[Tensor]) -> Results:
    """The gradients, given those of the outputs."""
    wanted, roots = wanted_gradients(inputs), differentiable(outputs)
    if not wanted or not roots:
        return {}
    grads = [gradient.to(root.dtype) for gradient, root in zip(grad_outputs, roots, strict=True)]
    found = torch.autograd.grad(roots, list(wanted.values()), grads)
    return {f"gradient of {name}": part for name, part in zip(wanted, found, strict=True)}


def _result_name(place: int, count: int) -> str:
    return "the result" if count == 1 else f"result {place + 1}"


def exact_results(
    reference: Call, plain: Call, inputs: Inputs, exact: torch.dtype, dtype: torch.dtype
) -> tuple[ExactResults, list[Tensor]]:
    """The exact results of a size, and the output gradients of every contender."""
    mine = fresh(inputs)
    outputs = outputs_of(plain, mine)
    grad_outputs = random_grad_outputs(differentiable(outputs))
    found = {_result_name(place, len(outputs)): output.detach() for place, output in enumerate(outputs)}
    gradients = backward_of(outputs, mine, copies(grad_outputs))
    del outputs, mine
    right = results_of(reference, widened(inputs, exact), copies(grad_outputs))
    errors = errors_of(found | gradients, right)
    return ExactResults(right, errors, dtype, frozenset(gradients)), grad_outputs


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


def judge(contender: Contender, found: Results, expected: ExactResults | None) -> dict[str, Any]:
    """The record's correctness part: verdict, the error nearest to (or farthest beyond) what is allowed."""
    if expected is None:
        return {"verdict": "not judged", "error": None, "allowed": None, "worst": None,
                "why": "the exact result could not be computed here"}  # fmt: skip
    errors = errors_of(found, expected.exact)
    allowed = {name: _allowed(name, contender, expected) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    equal = errors[worst] <= allowed[worst]
    finite = math.isfinite(errors[worst])
    how = f"off by {errors[worst]:.1e}" if finite else "missing or not finite"
    return {
        "verdict": "equal" if equal else "different",
        "error": errors[worst] if finite else None,
        "allowed": allowed[worst],
        "worst": worst,
        "why": f"{worst} is {how}, {'within' if equal else 'beyond'} {allowed[worst]:.1e}",
    }


def _allowed(name: str, contender: Contender, expected: ExactResults) -> float:
    if contender.tolerance is not None:
        return contender.tolerance
    if contender.kind == "plain":
        return PLAIN_MAY_BE_OFF[expected.dtype]
    factor = BACKWARD_FACTOR if name in expected.gradients else FORWARD_FACTOR
    # A root mean square over many values is a fraction of one rounding; a single number may be off by a whole one.
    least = torch.finfo(expected.dtype).eps / (4 if expected.exact[name].numel() > 16 else 1)
    return max(factor * expected.plain_errors.get(name, 0.0), least)
