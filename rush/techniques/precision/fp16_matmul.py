"""Half products: the linear layers' matrix products with fp16 factors, on ARM CPUs.

An ARM core with fp16 arithmetic multiplies and adds eight fp16 numbers in the instruction that does four in fp32; torch's
fast products do not use it. Our kernel casts both factors on their way into each product, forward and both gradients, blocks of
64 by 128 values with a scale each, so no loss needs scaling and no gradient is lost; sums over 128 products are made in fp16,
the rest in fp32. Weights, activations, gradients and optimizer stay fp32. A bias's gradient comes out of the same kernel.
It wins where products are most of a step, and the more the wider the layers: casting a factor costs the same for narrow
ones. Each product is off by two thousandths, as with bf16 factors. The kernel is C++, built
when it is first used (ten seconds, once). Newer ARM cores have bf16 units, which `amp_bf16` uses; measure both there. The
head is left in fp32 unless it is asked for: a word's gradient is the sum of a few large numbers and thousands of small ones, which
short sums can lose beside them. (At a steady learning rate `tiny` learned the same with and without it: docs/negative-results.md.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rush.hardware import Machine
from rush.kernels import fp16_linear as kernel
from rush.recipe import Knob, Recipe
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Requirement,
    Setting,
    Stage,
    Technique,
    WorkEffect,
    knob_of,
    used,
)
from rush.techniques.kernels.chunked_loss import Projection
from rush.techniques.kernels.vocab_pad import ProjectedLossHead

SCOPES = ("blocks", "blocks_and_head")
RATE = "half_kernel"
"""What the ceilings call the rate of a large product by our kernel."""
OTHER_HEADS = ("fused_loss", "liger")
OPERATORS = ("rush::fp16_matmul", "rush::fp16_matmul_with_row_sums")

# Shapes: n tokens, d hidden, v vocabulary.


class Fp16Linear(nn.Linear):
    """A linear layer over the same weight and bias, whose products have fp16 factors."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return kernel.fp16_linear(x, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product alone, with a weight of its own or one that several layers share."""
        return kernel.fp16_linear(x, weight)


class Fp16Projection(Projection):
    """From hidden vectors to logits; the vocabulary padded with zeros where another technique asks for it."""

    def __init__(self, padded: int) -> None:
        super().__init__()
        self.padded = padded

    def forward(self, hidden_nd: Tensor, head_weight_vd: Tensor) -> Tensor:
        vocab_size = head_weight_vd.shape[0]
        if self.padded == vocab_size:
            return kernel.fp16_linear(hidden_nd, head_weight_vd)
        weight = F.pad(head_weight_vd, (0, 0, 0, self.padded - vocab_size))
        return kernel.fp16_linear(hidden_nd, weight)[..., :vocab_size]


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    kernel.load()  # before a compiler traces it
    layers = 0
    for role, named in build.model.linears().items():
        for name, plain in named if role != "head" else []:
            parent, _, own = name.rpartition(".")
            setattr(build.model.get_submodule(parent), own, Fp16Linear(plain))
            layers += 1
    if _with_head(knobs) and build.model.holds("head.weight"):
        head: Any = build.model.loss_head
        projection = Fp16Projection(build.facts.get("padded_vocab_size", build.model.shape.vocab_size))
        if hasattr(head, "project"):
            head.project = projection
        else:
            build.model.loss_head = ProjectedLossHead(projection)
        layers += 1
    # What speeds are held against, what rounding is judged by, and how many layers must show up.
    build.facts |= {"matmul_dtype": RATE, "operand_dtype": "float16", "half_layers": layers}


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Our operators `rush::fp16_matmul…` made three products a step and micro batch for each layer: forward, and both
    gradients (at least the forward one, where weights are frozen). Layers that another technique makes one product of are one."""
    layers = int(seen.facts.get("half_layers", 0)) - int(seen.facts.get("products_saved", 0))
    made = sum(seen.facts["products_by"].get(name, 0.0) for name in OPERATORS)
    others = sum(seen.facts["products_by"].values()) - made
    each = 1 if "adapters" in seen.facts else 3
    wanted = each * layers * max(1, seen.micro_batches)
    return Proof(
        0 < wanted <= made,
        f"{made:.0f} products a step by `rush::fp16_matmul…`, where {layers} layers need {wanted}; {others:.0f} other "
        "products of matrices",
    )


def _with_head(knobs: Mapping[str, Knob]) -> bool:
    return knobs["scope"] == "blocks_and_head"


def _takes_head(recipe: Recipe) -> bool:
    return knob_of(recipe, "fp16_matmul", "scope", SCOPES[0]) == "blocks_and_head"


def _has_units(machine: Machine, recipe: Recipe) -> bool:
    return machine.device == "cpu" and {"neon", "fp16"} <= set(machine.cpu.features)


technique = Technique(
    name="fp16_matmul",
    stage=Stage.MODEL,
    apply=apply,
    requires=(
        Requirement(
            "it needs an ARM CPU with fp16 arithmetic (asimdhp among the features of /proc/cpuinfo) to compute on; on a GPU use "
            "amp_bf16 or amp_fp16",
            _has_units,
        ),
        Requirement(
            "it needs a C++ compiler to build its kernel with, or the built kernel in the cache",
            lambda machine, recipe: kernel.cannot_build() is None or kernel.is_built(),
        ),
        Requirement(
            "layout.tp cuts the layers' weights among ranks, which our kernel does not know; set layout.tp to 1",
            lambda machine, recipe: recipe.layout.tp == 1,
        ),
        Requirement(
            f"with scope blocks_and_head it makes the logits itself: take out {' and '.join(OTHER_HEADS)}, or set scope to blocks",
            lambda machine, recipe: not (_takes_head(recipe) and used(recipe, *OTHER_HEADS)),
        ),
    ),
    conflicts=("amp_bf16", "amp_fp16", "bf16_master", "fp8", "int8_base", "pure_bf16", "qlora"),
    after=("chunked_loss", "vocab_pad"),
    knobs={
        "scope": KnobRange(
            SCOPES,
            "the linear layers of the blocks, or the head as well",
        )
    },
    claim=Claim(
        "matmul rate",
        1.0,
        regime="fused multiply-adds of 128-bit vectors: eight fp16 numbers where there are four of fp32, two instructions a cycle "
        "with either",
        source="Arm Neoverse N1 Software Optimization Guide, ASIMD floating-point instructions (measured on one: 39.9 and 79.9 "
        "GFLOP/s a core at 2.5 GHz, factors in registers)",
    ),
    # Not CLOSE: in 20 steps of `tiny` the gradient norm of step 14 was 2 to 5 % off, where fp16 factors are allowed 1 %.
    parity=Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        MemoryEffect("buffers", 1.0, "one factor of a product at a time in fp16, while that product is made"),
    ),
    settings=(Setting(),),
    work=(
        WorkEffect("blocks.dtype", RATE),
        WorkEffect("head.dtype", RATE, when=_with_head),
        WorkEffect("sums.fused", 1.0, "the gradients of all biases"),
    ),
)
