"""fp8: the linear layers' matrix products with 8-bit factors, forward and both gradients.

Hopper's units do twice as many 8-bit products as 16-bit ones. Each factor is scaled to the 8-bit range and
rounded on its way into the product; weights and optimizer stay as they are. What is left of the factor of
two depends on the casts, which read every activation and gradient again, and on the shapes: it pays for wide
layers and many tokens, and can cost time where layers are narrow. Use it beside `compile`, which
fuses the casts; eager it is slower than bf16. A 3-bit mantissa is coarse: losses follow those of bf16, step
by step they differ. One scale per tensor is fastest; one per row spares small values beside large ones. Beside `tp`
every rank scales its own part of a tensor by that part's largest value, and nothing is exchanged for it: scales are
powers of two, so the same number gets the same 8-bit mantissa under each, unless it is below 2⁻¹³ of the largest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rush.hardware import Machine
from rush.recipe import Knob, Recipe
from rush.techniques.chunked_loss import Projection
from rush.techniques.contract import (
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
from rush.techniques.evidence import say_dtypes
from rush.techniques.seams import needs_triton, to_autocast_dtype
from rush.techniques.vocab_pad import ProjectedLossHead

# Shapes: n tokens, d hidden, v vocabulary.

Product = Callable[[Tensor, Tensor], Tensor]
ALIGNMENT = 16
RECIPES, SCOPES = ("tensorwise", "rowwise"), ("blocks", "blocks_and_head")
CASTS = ("compiler", "kernel")
OTHER_HEADS = ("chunked_loss", "fused_loss", "liger")


class Fp8Linear(nn.Linear):
    """A linear layer over the same weight and bias, with 8-bit products."""

    def __init__(self, plain: nn.Linear, product: Product) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias, self.product = plain.weight, plain.bias, product

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product alone, with a weight of its own or one that several layers share."""
        (x,) = to_autocast_dtype(x)
        return self.product(x, weight)


class Fp8Projection(Projection):
    """From hidden vectors to logits by an 8-bit product; the vocabulary padded with zeros where it must be."""

    def __init__(self, padded: int, product: Product) -> None:
        super().__init__()
        self.padded, self.product = padded, product

    def forward(self, hidden_nd: Tensor, head_weight_vd: Tensor) -> Tensor:
        vocab_size = head_weight_vd.shape[0]
        weight = F.pad(head_weight_vd, (0, 0, 0, self.padded - vocab_size))
        (hidden_nd,) = to_autocast_dtype(hidden_nd)
        return self.product(hidden_nd, weight)[..., :vocab_size]


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    from rush.kernels.fp8_linear import fp8_linear

    options: Any = {"recipe": knobs["recipe"], "fast": knobs["fast"], "casts": knobs["casts"]}
    product = partial(fp8_linear, **options)
    # What speeds are held against: the rate of 8-bit products, although heads and attention stay at 16 bits.
    build.facts["matmul_dtype"] = "float8"
    for role, layers in build.model.linears().items():
        for name, plain in layers if role != "head" else []:
            parent, _, own = name.rpartition(".")
            setattr(build.model.get_submodule(parent), own, Fp8Linear(plain, product))
    if knobs["scope"] == "blocks_and_head":
        padded = build.facts.get("padded_vocab_size", build.model.shape.vocab_size)
        build.model.loss_head = ProjectedLossHead(Fp8Projection(padded, product))


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Matrix products took 8-bit inputs (or 8-bit kernels of a compiled graph ran); on a CPU the emulation
    `rush::fp8_emulated_product` ran, which proves the arithmetic and nothing about speed."""
    if emulated := seen.ops.get("rush::fp8_emulated_product", 0):
        return Proof(not seen.kernels, f"emulated on a CPU: {emulated} products of dequantised 8-bit factors")
    kernels = [name for name in seen.kernels if "e4m3" in name or "_scaled_mm" in name]
    eight_bits = any(dtype.startswith("float8") for dtype in seen.matmul_dtypes)
    return Proof(
        eight_bits or bool(kernels),
        say_dtypes(seen) + (f"; ran {', '.join(kernels)[:120]}" if kernels else ""),
    )


def _can_multiply(machine: Machine, recipe: Recipe) -> bool:
    if machine.device == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    return machine.capability is not None and machine.capability >= (8, 9)


def _widths_fit(machine: Machine, recipe: Recipe) -> bool:
    shape, layout = recipe.shape(), recipe.layout
    cut = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.intermediate)
    # Every batch must fit, the last one of a validation too, which may hold fewer rows.
    sizes = (shape.hidden, *(size // layout.tp for size in cut), recipe.batch.sequence // layout.cp)
    return all(size % ALIGNMENT == 0 for size in sizes)


def _takes_head(recipe: Recipe) -> bool:
    return knob_of(recipe, "fp8", "scope", SCOPES[0]) == "blocks_and_head"


technique = Technique(
    name="fp8",
    stage=Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        Requirement(
            "it needs a GPU with 8-bit matmuls (compute capability 8.9 or above); on a CPU TRITON_INTERPRET=1 "
            "emulates them",
            _can_multiply,
        ),
        Requirement(
            "on a GPU it needs activations in bf16; add amp_bf16, bf16_master or pure_bf16",
            lambda machine, recipe: (
                machine.device != "cuda" or used(recipe, "amp_bf16", "bf16_master", "pure_bf16")
            ),
        ),
        Requirement(
            f"it needs every width of the linear layers and batch.sequence in multiples of {ALIGNMENT}, a rank's parts of them "
            "too (layout.tp cuts widths, layout.cp the sequence)",
            _widths_fit,
        ),
        Requirement(
            "with recipe rowwise its casts are the compiler's: set casts to compiler, or recipe to tensorwise",
            lambda machine, recipe: (
                knob_of(recipe, "fp8", "recipe", RECIPES[0]) == "tensorwise"
                or knob_of(recipe, "fp8", "casts", CASTS[0]) == "compiler"
            ),
        ),
        Requirement(
            "beside layout.tp the logits are made by the loss over parts of the vocabulary; set scope to blocks",
            lambda machine, recipe: recipe.layout.tp == 1 or not _takes_head(recipe),
        ),
        Requirement(
            "with scope blocks_and_head it makes the logits itself: take out "
            f"{', '.join(OTHER_HEADS)}, or set scope to blocks",
            lambda machine, recipe: not (_takes_head(recipe) and used(recipe, *OTHER_HEADS)),
        ),
        Requirement(
            f"with scope blocks_and_head it needs a vocabulary in multiples of {ALIGNMENT}; add vocab_pad",
            lambda machine, recipe: (
                not _takes_head(recipe)
                or recipe.shape().vocab_size % ALIGNMENT == 0
                or used(recipe, "vocab_pad")
            ),
        ),
    ),
    conflicts=("int8_base", "qlora"),
    after=("chunked_loss", "vocab_pad"),
    knobs={
        "recipe": KnobRange(
            RECIPES, "one scale for a tensor (gradients in e5m2), or one for each row (all e4m3)"
        ),
        "scope": KnobRange(SCOPES, "the linear layers of the blocks, or the head as well"),
        "fast": KnobRange(
            ("forward", "all"), "the products that may use the short accumulator: quicker, coarser"
        ),
        "casts": KnobRange(
            ("compiler", "kernel"),
            "plain operators for compile to fuse, or one kernel for both layouts (tensorwise)",
        ),
    },
    claim=Claim(
        "tokens_per_s",
        0.25,
        regime="Llama 3 8B on 8 H100, one scale per tensor, after compile in bf16",
        source="torchao's documentation of fp8 training; 5,760 against 7,186 tokens/s in a torchtitan commit",
    ),
    parity=Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        MemoryEffect(
            "attention.flat",
            0.0,
            "compiled, casts of a product's input are made again from what is kept anyway",
        ),
        MemoryEffect("norm.output", 0.0, "as above"),
        MemoryEffect("mlp.product", 0.0, "as above"),
        MemoryEffect("casts", 0.0, "made again"),
    ),
    worth=(Setting(), Setting({"casts": "kernel"}), Setting({"scope": "blocks_and_head"})),
    work=(
        WorkEffect("blocks.dtype", "float8"),
        WorkEffect(
            "blocks.casts", 8.5, "largest value, cast and both layouts; twice where nothing is compiled"
        ),
    ),
)
