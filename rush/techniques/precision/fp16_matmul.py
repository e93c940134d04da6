"""fp16 matmuls on ARM CPUs: linear layers with fp16 operands, forward and both gradients.

An ARM core with fp16 arithmetic does eight fp16 multiply-adds in the instruction that does four in fp32;
torch's matmuls do not use it. Our kernel casts both operands on the fly, in blocks of 64 × 128 values with
one scale each, so no loss scaling is needed. It accumulates 128 products in fp16 and the rest in fp32.
Weights, activations, gradients and optimizer state stay fp32; bias gradients come out of the same kernel.
It wins where matmuls dominate, the more the wider the layers are. The error of a matmul is 2e-3, as with
bf16 operands. The kernel is C++, built at first use (ten seconds, once). Newer ARM cores have bf16 units,
which `amp_bf16` uses; measure both there. The LM head stays fp32 unless `scope` asks for it: a token's
gradient sums a few large and thousands of small numbers, which fp16 accumulation can lose. (At a constant
learning rate the loss of `tiny` was the same with and without it: docs/negative-results.md.)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.hardware import Machine
from rush.kernels import fp16_linear as kernel
from rush.recipe import Recipe
from rush.techniques.kernels.vocab_pad import PaddedProjection, set_projection

SCOPES = ("blocks", "blocks_and_head")
RATE = "half_kernel"
"""The name of this kernel's matmul rate among the ceilings."""
OTHER_HEADS = ("fused_loss", "liger")
OPERATORS = ("rush::fp16_matmul", "rush::fp16_matmul_with_row_sums")

# Shapes: n tokens, d hidden, v vocabulary.


class Fp16Linear(nn.Linear):
    """nn.Linear over the same weight and bias with fp16 matmuls."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return kernel.fp16_linear(x, self.weight, self.bias)

    def matmul_with(self, x: Tensor, weight: Tensor) -> Tensor:
        """The matmul without bias, with this layer's weight or one that several layers share."""
        return kernel.fp16_linear(x, weight)


@dataclass(frozen=True)
class Fp16Layers:
    """The layers with fp16 matmuls, the LM head included."""

    count: int


def apply(build: api.Build, knobs: api.Knobs) -> None:
    kernel.load()  # before a compiler traces it
    layers = 0
    for role, named in build.model.linears().items():
        for name, plain in named if role != "head" else []:
            parent, _, own = name.rpartition(".")
            setattr(build.model.get_submodule(parent), own, Fp16Linear(plain))
            layers += 1
    if _with_head(knobs) and build.model.holds("head.weight"):
        set_projection(build.model, PaddedProjection(build.head_width, kernel.fp16_linear))
        layers += 1
    build.facts.rate_dtype, build.facts.operand_dtype = RATE, "float16"
    build.facts.note(Fp16Layers(layers))


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Our operators `rush::fp16_matmul…` ran three matmuls per layer and micro batch: forward and both gradients (at
    least the forward one where weights are frozen). Layers that another technique joins count once."""
    noted = seen.facts.noted(Fp16Layers) or Fp16Layers(0)
    layers = noted.count - seen.facts.matmuls_saved
    made = sum(seen.matmuls_by_op.get(name, 0.0) for name in OPERATORS)
    others = sum(seen.matmuls_by_op.values()) - made
    each = 3 if seen.facts.adapters is None else 1
    wanted = each * layers * max(1, seen.micro_batches)
    return api.Proof(
        0 < wanted <= made,
        f"{made:.0f} matmuls per step by `rush::fp16_matmul…`, where {layers} layers need {wanted}; {others:.0f} other "
        "matmuls",
    )


def _scope_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Our operators were called with the vocabulary as a dim if, and only if, the LM head is included."""
    calls = [call for name in OPERATORS for call in seen.calls.get(name, {})]
    of_head = [call for call in calls if any(seen.head_widths.intersection(dims) for dims in call.shapes)]
    return api.Proof(
        bool(calls) and bool(of_head) == (_with_head(knobs) and seen.holds_head),
        f"{'the LM head is' if of_head else 'the LM head is not'} among our operators' matmuls",
    )


def _with_head(knobs: api.Knobs) -> bool:
    return knobs["scope"] == "blocks_and_head"


def _takes_head(recipe: Recipe) -> bool:
    return api.knob_of(recipe, "fp16_matmul", "scope", SCOPES[0]) == "blocks_and_head"


def _has_units(machine: Machine, recipe: Recipe) -> bool:
    return machine.device == "cpu" and {"neon", "fp16"} <= set(machine.cpu.features)


technique = api.Technique(
    name="fp16_matmul",
    relative_error=2**-11,
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            "it needs an ARM CPU with fp16 arithmetic (asimdhp among the features of /proc/cpuinfo) to compute on; on a GPU use "
            "amp_bf16 or amp_fp16",
            _has_units,
        ),
        api.Requirement(
            "it needs a C++ compiler to build its kernel with, or the built kernel in the cache",
            lambda machine, recipe: kernel.cannot_build() is None or kernel.is_built(),
        ),
        api.Requirement(
            "layout.tp shards the layers' weights, which our kernel does not support; set layout.tp to 1",
            lambda machine, recipe: recipe.layout.tp == 1,
        ),
        api.Requirement(
            f"with scope blocks_and_head it computes the logits itself: remove {' and '.join(OTHER_HEADS)}, or set scope to blocks",
            lambda machine, recipe: not (_takes_head(recipe) and api.used(recipe, *OTHER_HEADS)),
        ),
    ),
    conflicts=("amp_bf16", "amp_fp16", "bf16_master", "fp8", "int8_base", "pure_bf16", "qlora"),
    after=("chunked_loss", "vocab_pad"),
    knobs={
        "scope": api.KnobRange(SCOPES, "the linear layers of the blocks, or the LM head as well", _scope_seen)
    },
    claim=api.Claim(
        "matmul rate",
        1.0,
        regime="fused multiply-adds of 128-bit vectors: eight fp16 numbers where there are four of fp32, two instructions a cycle "
        "with either",
        source="Arm Neoverse N1 Software Optimization Guide, ASIMD floating-point instructions (measured on one: 39.9 and 79.9 "
        "GFLOP/s per core at 2.5 GHz, operands in registers)",
    ),
    # Not CLOSE: in 20 steps of `tiny` the gradient norm of step 14 was 2 to 5 % off, where fp16 is allowed 1 %.
    parity=api.Parity.STATISTICAL,
    evidence=evidence,
    matmul_ops=dict.fromkeys(OPERATORS, "float16"),
    memory=(api.MemoryEffect("buffers", 1.0, "one operand at a time in fp16, during its matmul"),),
    settings=(api.Setting(),),
    work=(
        api.WorkEffect("blocks.dtype", RATE),
        api.WorkEffect("head.dtype", RATE, when=_with_head),
        api.WorkEffect("bias_grad.fused", 1.0, "all bias gradients"),
    ),
)
