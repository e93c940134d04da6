# mypy: allow-untyped-decorators
"""`adamw_`: tensors grouped by dtype and alignment, one launch per group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rush.kernels.adamw import triton as kernels
from rush.kernels.adamw.table import Division, Divisions, aligned, division_of, table_of
from rush.kernels.support import op, require, require_device

DTYPES = (torch.float32, torch.bfloat16)
STOCHASTIC_ROUNDING = "rush::stochastic_rounding"
"""The profiler label of launches with stochastic rounding."""


def adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    stochastic_rounding: bool = False,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    divisions: Divisions | None = None,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> None:
    """Step number `step` (the first is 1) for all parameters, in place.

    `found_inf` and `grad_scale` are fp32 scalars that the device reads: the step is skipped unless the first is zero, and
    gradients are divided by the second. So the host launches the update without waiting for them. `numbers` identify the
    parameters for the random generator; by default their place in the list. Only bf16 weights and second moments are
    rounded stochastically.
    """
    numbers = range(len(parameters)) if numbers is None else numbers
    divisions = {} if divisions is None else divisions
    kinds: dict[Any, list[int]] = {}
    for index, tensors in enumerate(zip(parameters, gradients, exp_avgs, exp_avg_sqs, strict=True)):
        _check(*tensors)
        whole = aligned([tensor.data_ptr() for tensor in tensors], tensors[0].numel())
        kinds.setdefault((*(tensor.dtype for tensor in tensors[:3]), whole), []).append(index)
    for name, scalar in (("found_inf", found_inf), ("grad_scale", grad_scale)):
        if scalar is not None and parameters:
            require_device("adamw", parameters[0], scalar)
            require(
                scalar.dtype == torch.float32 and scalar.numel() == 1,
                f"adamw's {name} is one number in fp32; found {scalar.numel()} in {scalar.dtype}.",
            )
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    for kind, members in kinds.items():
        sizes = tuple(parameters[index].numel() for index in members)
        device = parameters[members[0]].device
        division = division_of("adamw", sizes, kernels.PIECE, device, divisions)
        _adamw(
            [parameters[index].detach() for index in members],
            [gradients[index].detach() for index in members],
            [exp_avgs[index] for index in members],
            [exp_avg_sqs[index] for index in members],
            division.rows,
            division.starts,
            lr if on_device else None,
            found_inf,
            grad_scale,
            0.0 if on_device else float(lr),
            kernels.hyperparameters(betas, eps, weight_decay, step),
            step,
            stochastic_rounding and torch.bfloat16 in (kind[0], kind[2]),
            seed,
            [numbers[index] for index in members],
            kind[-1],
        )


def _check(parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    tensors = (parameter, gradient, exp_avg, exp_avg_sq)
    require_device("adamw", *tensors)
    require(
        all(tensor.dtype in DTYPES for tensor in tensors) and exp_avg.dtype == exp_avg_sq.dtype,
        f"adamw takes fp32 and bf16, both moments alike; found {', '.join(str(t.dtype) for t in tensors)}.",
    )
    require(
        all(tensor.shape == parameter.shape for tensor in tensors),
        "adamw needs a gradient and moments of the parameter's shape.",
    )
    require(all(tensor.is_contiguous() for tensor in tensors), "adamw needs contiguous tensors.")


@op("adamw", mutates=("parameters", "exp_avgs", "exp_avg_sqs"))
def _adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    rows: Tensor,
    starts: Tensor,
    lr_on_device: Tensor | None,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
    lr: float,
    hyperparameters: list[float],
    step: int,
    stochastic_rounding: bool,
    seed: int,
    numbers: list[int],
    is_aligned: bool,
) -> None:
    table = table_of(parameters, gradients, exp_avgs, exp_avg_sqs, numbers=numbers)
    with record_function(STOCHASTIC_ROUNDING) if stochastic_rounding else nullcontext():
        kernels.update(
            table,
            Division(rows, starts),
            lr if lr_on_device is None else lr_on_device,
            found_inf,
            grad_scale,
            hyperparameters,
            dtypes=(parameters[0].dtype, gradients[0].dtype, exp_avgs[0].dtype),
            step=step,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            is_aligned=is_aligned,
        )
