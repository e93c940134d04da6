# mypy: allow-untyped-decorators
"""`adamw8bit_`: tensors grouped by dtype and alignment, one launch per group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from rush.kernels.adamw.table import Division, Divisions, aligned, division_of, table_of
from rush.kernels.adamw.update import DTYPES, STOCHASTIC_ROUNDING
from rush.kernels.adamw8bit import triton as kernels
from rush.kernels.adamw8bit.quantization_map import code_of_zero
from rush.kernels.support import op, require, require_device


class QuantizedMoment(NamedTuple):
    """An 8-bit moment: a code per element, a scale per block of 256."""

    codes: Tensor
    scales: Tensor


def quantized_zeros(parameter: Tensor, signed: bool) -> QuantizedMoment:
    """The initial moment of a parameter."""
    codes = torch.full_like(parameter, code_of_zero(signed), dtype=torch.uint8)
    blocks = -(-parameter.numel() // kernels.BLOCK)
    return QuantizedMoment(codes, parameter.new_zeros(blocks, dtype=torch.float32))


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(parameter, "placements")


def in_rows(parameter: Tensor) -> bool:
    """Whether blocks of 256 do not cross rows, so that sharding by rows keeps them whole."""
    return parameter.dim() == 2 and parameter.shape[1] % kernels.BLOCK == 0


def adamw8bit_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[QuantizedMoment],
    exp_avg_sqs: Sequence[QuantizedMoment],
    values: tuple[Tensor, Tensor],
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
) -> None:
    """Step number `step` (the first is 1) for all parameters, in place.

    `values` are `dynamic_map(True)` and `dynamic_map(False)` on the parameters' device. `numbers` identify the parameters
    for the random generator; by default their place in the list. Only bf16 weights are rounded stochastically.
    """
    numbers = range(len(parameters)) if numbers is None else numbers
    divisions = {} if divisions is None else divisions
    kinds: dict[Any, list[int]] = {}
    for index, (parameter, gradient, m, v) in enumerate(
        zip(parameters, gradients, exp_avgs, exp_avg_sqs, strict=True)
    ):
        _check(parameter, gradient, m, v)
        addresses = [tensor.data_ptr() for tensor in (parameter, gradient, m.codes, v.codes)]
        kind = (parameter.dtype, gradient.dtype, aligned(addresses, parameter.numel()))
        kinds.setdefault(kind, []).append(index)
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    for kind, members in kinds.items():
        sizes = tuple(parameters[index].numel() for index in members)
        device = parameters[members[0]].device
        division = division_of("adamw8bit", sizes, kernels.PIECE, device, divisions)
        _adamw8bit(
            [parameters[index].detach() for index in members],
            [gradients[index].detach() for index in members],
            [exp_avgs[index].codes for index in members],
            [exp_avgs[index].scales for index in members],
            [exp_avg_sqs[index].codes for index in members],
            [exp_avg_sqs[index].scales for index in members],
            division.rows,
            division.starts,
            *values,
            lr if on_device else None,
            0.0 if on_device else float(lr),
            kernels.scaled_hyperparameters(betas, eps, weight_decay, step),
            step,
            stochastic_rounding and kind[0] == torch.bfloat16,
            seed,
            [numbers[index] for index in members],
            kind[-1],
        )


def _check(parameter: Tensor, gradient: Tensor, m: QuantizedMoment, v: QuantizedMoment) -> None:
    require_device("adamw8bit", parameter, gradient, *m, *v)
    require(
        parameter.dtype in DTYPES and gradient.dtype in DTYPES,
        f"adamw8bit takes fp32 and bf16; found {parameter.dtype} and {gradient.dtype}.",
    )
    blocks = -(-parameter.numel() // kernels.BLOCK)
    require(
        gradient.shape == m.codes.shape == v.codes.shape == parameter.shape
        and m.scales.shape == v.scales.shape == (blocks,)
        and {m.codes.dtype, v.codes.dtype} == {torch.uint8}
        and {m.scales.dtype, v.scales.dtype} == {torch.float32},
        "adamw8bit needs moments from quantized_zeros: codes of the parameter's shape, an fp32 scale per block.",
    )
    require(
        all(tensor.is_contiguous() for tensor in (parameter, gradient, *m, *v)),
        "adamw8bit needs contiguous tensors.",
    )


@op("adamw8bit", mutates=("parameters", "m_codes", "m_scales", "v_codes", "v_scales"))
def _adamw8bit(
    parameters: list[Tensor],
    gradients: list[Tensor],
    m_codes: list[Tensor],
    m_scales: list[Tensor],
    v_codes: list[Tensor],
    v_scales: list[Tensor],
    rows: Tensor,
    starts: Tensor,
    signed_values: Tensor,
    unsigned_values: Tensor,
    lr_on_device: Tensor | None,
    lr: float,
    hyperparameters: list[float],
    step: int,
    stochastic_rounding: bool,
    seed: int,
    numbers: list[int],
    is_aligned: bool,
) -> None:
    table = table_of(parameters, gradients, m_codes, m_scales, v_codes, v_scales, numbers=numbers)
    with record_function(STOCHASTIC_ROUNDING) if stochastic_rounding else nullcontext():
        kernels.update(
            table,
            Division(rows, starts),
            (signed_values, unsigned_values),
            lr if lr_on_device is None else lr_on_device,
            hyperparameters,
            dtypes=(parameters[0].dtype, gradients[0].dtype),
            step=step,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            is_aligned=is_aligned,
        )
