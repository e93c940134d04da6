"""TF32: fp32 matmuls on the tensor cores.

With TF32 allowed, an fp32 matmul rounds its inputs to a 10-bit mantissa, runs on the tensor cores and
accumulates in fp32, several times faster than on the fp32 units. Weights, activations and everything but
matmuls stay fp32. It gains nothing where the step is bound by memory or launches, and nothing once matmuls
run in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import describe_dtypes


@contextmanager
def tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.step_contexts.append(tf32_allowed)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """An fp32 matmul inside the step has the rounding error of a 10-bit mantissa, and the run's matmuls are fp32."""
    # Kernel names differ between libraries; the rounding does not.
    error = seen.fp32_matmul_error
    took_effect = error > 2e-5 and "float32" in seen.matmul_dtypes
    return api.Proof(
        took_effect,
        f"an fp32 matmul inside the step is off by {error:.0e} (plain fp32: about 1e-7); {describe_dtypes(seen)}",
    )


technique = api.Technique(
    name="tf32",
    relative_error=2**-11,
    stage=api.Stage.ENV,
    apply=apply,
    requires=(
        api.Requirement(
            "it needs a CUDA GPU of compute capability 8.0 (Ampere) or newer",
            lambda machine, recipe: machine.device == "cuda" and (machine.capability or (0, 0)) >= (8, 0),
        ),
    ),
    claim=api.Claim(
        "matmul rate",
        7.0,
        regime="fp32 matmul on an A100: 156 TFLOP/s dense against 19.5",
        source="NVIDIA A100 Tensor Core GPU datasheet",
        relative_to="plain fp32",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    work=(api.WorkEffect("matmul.dtype", "tf32"),),
)
