"""Fused MLP activations: SwiGLU (or GeGLU, or GELU) is one kernel forward and one backward.

The widest tensors of a model are in its MLP, with only elementwise work between the matmuls. Plain SwiGLU
writes silu(gate), reads it again to multiply, and saves it for the backward pass. The kernel fuses both,
saves only gate and up, and recomputes the sigmoid: one wide tensor less in memory and a third less traffic.
Gemma's GeGLU likewise. It wins eager on both; torch's GELU is one kernel already, so GPT-2 gains next to
nothing on a GPU; and a compiler does the same fusion. On a CPU the kernel is C++ (built at first use), and
wins by its arithmetic: torch's gradient of GELU calls tanh for each number; ours uses a short polynomial for
the exponential.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import rush.techniques.api.contract as api
from rush.models.layers import GeGLU, GeluTanh, SwiGLU
from rush.techniques.api.seams import FunctionModule, needs_kernels, rush_kernels_ran


def apply(build: api.Build, knobs: api.Knobs) -> None:
    from rush.kernels.geglu import geglu
    from rush.kernels.gelu import gelu
    from rush.kernels.swiglu import swiglu

    kernels: dict[type, Callable[..., Tensor]] = {SwiGLU: swiglu, GeGLU: geglu, GeluTanh: gelu}
    for block in build.model.blocks:
        mlp = block.get_submodule("mlp")
        mlp.activation = FunctionModule(kernels[type(mlp.get_submodule("activation"))])


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """In the profile: our kernels `swiglu_`, `geglu_` or `gelu_`, forward and backward (on a CPU the operators
    `rush::swiglu`, `rush::geglu` or `rush::gelu` and their backward)."""
    proofs = [
        rush_kernels_ran(
            kernels=(f"{name}_forward_kernel", f"{name}_backward_kernel"),
            ops=(f"rush::{name}", f"rush::{name}_backward"),
        )(seen, knobs)
        for name in ("swiglu", "geglu", "gelu")
    ]
    return next((proof for proof in proofs if proof.took_effect), proofs[0])


technique = api.Technique(
    name="fused_mlp",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(needs_kernels,),
    conflicts=("fused_bias", "liger"),
    claim=api.Claim(
        "bytes saved by the activation for backward",
        -0.33,
        regime="SwiGLU: gate and up instead of gate, up and silu(gate)",
        source="arithmetic; the same idea: Hsu et al. 2024, arXiv:2410.10989",
        of_memory=True,
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "mlp.activated", 0.0, "with a gate: one tensor of the MLP's width less; GPT-2 has none"
        ),
        api.MemoryEffect("mlp.opaque", 1.0, "with fp8: a cast of its output is saved"),
    ),
    work=(api.WorkEffect("mlp.fused", 1.0),),
)
