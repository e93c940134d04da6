"""fp8: the linear layers' matrix products with 8-bit factors, forward and both gradients.

Hopper's units do twice as many 8-bit products as 16-bit ones. Each factor is scaled to the 8-bit range and
rounded on its way into the product; weights and optimizer stay as they are. What is left of the factor of
two depends on the casts, which read every activation and gradient again, and on the shapes: it pays for wide
layers and many tokens, and can cost time where layers are narrow. Use it beside `compile`, which
fuses the casts; eager it is slower than bf16. A 3-bit mantissa is coarse: losses follow those of bf16, step
by step they differ. One scale per tensor is fastest; one per row spares small values beside large ones. Beside `tp`
every rank scales its own part of a tensor by that part's largest value, and nothing is exchanged for it: scales are
powers of two, so the same number gets the same 8-bit mantissa under each, unless it is below 2⁻¹³ of the largest. With
`mlp` kernel Llama's SwiGLU goes from 16 bits to 8 in kernels of ours, rounded once, where a compiler rounds twice. A small
model's head is a fifth of its arithmetic: `scope` head, beside `fused_loss`, makes its three products in 8 bits and nothing
else; the gradient of the logits goes from 16 bits to 8 in one kernel that needs no scale to be looked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from rush.hardware import Machine
from rush.models.layers import GatedMLP
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
from rush.techniques.api.evidence import describe_dtypes
from rush.techniques.api.seams import needs_triton, rush_kernels_ran
from rush.techniques.kernels.fused_loss import FusedLossHead
from rush.techniques.kernels.vocab_pad import ProjectedLossHead
from rush.techniques.precision.fp8_layers import ALIGNMENT, Fp8GatedMLP, Fp8Linear, Fp8Projection

RECIPES, SCOPES = ("tensorwise", "rowwise"), ("blocks", "blocks_and_head", "head")
CASTS = MLPS = ("compiler", "kernel")
OTHER_HEADS = ("chunked_loss", "liger")
OTHER_MLPS = ("fused_mlp", "liger")
SWIGLU = tuple(f"fp8_swiglu{step}" for step in ("_largest", "", "_bound", "_backward"))
"""The kernels of the MLP as one function, and the ends of its operators' names."""


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    from rush.kernels.fp8_linear import fp8_linear
    from rush.kernels.fp8_mlp import fp8_mlp

    options: Any = {"fast": knobs["fast"], "casts": knobs["casts"]}
    recipe: Any = knobs["recipe"]
    product = partial(fp8_linear, recipe=recipe, **options)
    # What speeds are held against: the rate of 8-bit products, although heads and attention stay at 16 bits.
    if _takes_blocks(knobs):
        build.facts["matmul_dtype"] = "float8"
    for role, layers in build.model.linears().items():
        for name, plain in layers if role != "head" and _takes_blocks(knobs) else []:
            parent, _, own = name.rpartition(".")
            setattr(build.model.get_submodule(parent), own, Fp8Linear(plain, product))
    if _with_one_mlp(knobs):
        for block in build.model.blocks:
            plain_mlp = block.get_submodule("mlp")
            assert isinstance(plain_mlp, GatedMLP), type(plain_mlp)
            block.mlp = Fp8GatedMLP(plain_mlp, partial(fp8_mlp, **options))
    # The head's gradients never in the short accumulator: with it Llama 3.2 1B fell behind (docs/negative-results.md). A word's is
    # the sum of a few large numbers and thousands of small ones, over as many terms as there are words.
    head = build.model.loss_head
    if isinstance(head, FusedLossHead) and knobs["scope"] != "blocks":
        head.products = "fp8"
        build.facts["fused_head"] = True
    elif knobs["scope"] != "blocks":
        padded = build.facts.get("padded_vocab_size", build.model.shape.vocab_size)
        of_head = partial(fp8_linear, recipe=recipe, **(options | {"fast": "forward"}))
        build.model.loss_head = ProjectedLossHead(Fp8Projection(padded, of_head))


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Matrix products took 8-bit inputs (or 8-bit kernels of a compiled graph ran); on a CPU the emulation
    `rush::fp8_emulated_matmul` ran, which proves the arithmetic and nothing about speed. With `mlp` kernel also our
    kernels `fp8_swiglu…`, forward and backward (on a CPU the operators `rush::fp8_swiglu…`), and where the head is fused with
    its loss the kernel `fp8_logits_gradient`."""
    proofs = [_products_ran(seen)]
    names = SWIGLU if _with_one_mlp(knobs) else ()
    if knobs["scope"] != "blocks" and seen.facts.get("fused_head"):
        names = (*names, "fp8_logits_gradient")
    if names:
        kernels = rush_kernels_ran(
            tuple(f"{name}_kernel" for name in names), tuple(f"rush::{name}" for name in names)
        )
        proofs.append(kernels(seen, knobs))
    return Proof(all(proof.took_effect for proof in proofs), "; ".join(proof.what for proof in proofs))


def _products_ran(seen: Observation) -> Proof:
    if emulated := seen.ops.get("rush::fp8_emulated_matmul", 0):
        return Proof(not seen.kernels, f"emulated on a CPU: {emulated} products of dequantized 8-bit factors")
    kernels = [name for name in seen.kernels if "e4m3" in name or "_scaled_mm" in name]
    eight_bits = any(dtype.startswith("float8") for dtype in seen.matmul_dtypes)
    return Proof(
        eight_bits or bool(kernels),
        describe_dtypes(seen) + (f"; ran {', '.join(kernels)[:120]}" if kernels else ""),
    )


def _can_multiply(machine: Machine, recipe: Recipe) -> bool:
    if machine.device == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    # AMD's MI300X multiplies other 8-bit formats (fnuz) than are made here.
    return machine.hip is None and machine.capability is not None and machine.capability >= (8, 9)


def _widths_fit(machine: Machine, recipe: Recipe) -> bool:
    shape, layout = recipe.shape(), recipe.layout
    cut = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.intermediate)
    # Every batch must fit, the last one of a validation too, which may hold fewer rows.
    sizes = (shape.hidden, *(size // layout.tp for size in cut), recipe.batch.sequence // layout.cp)
    return all(size % ALIGNMENT == 0 for size in sizes)


def _with_one_mlp(knobs: Mapping[str, Knob]) -> bool:
    return knobs["mlp"] == "kernel"


def _one_mlp(recipe: Recipe) -> bool:
    return knob_of(recipe, "fp8", "mlp", MLPS[0]) == "kernel"


def _tensorwise(knobs: Mapping[str, Knob]) -> bool:
    return knobs["recipe"] == "tensorwise" and _takes_blocks(knobs)


def _rowwise(knobs: Mapping[str, Knob]) -> bool:
    return knobs["recipe"] == "rowwise" and _takes_blocks(knobs)


def _takes_blocks(knobs: Mapping[str, Knob]) -> bool:
    return knobs["scope"] != "head"


def _takes_head(recipe: Recipe) -> bool:
    return knob_of(recipe, "fp8", "scope", SCOPES[0]) != "blocks"


technique = Technique(
    name="fp8",
    stage=Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        Requirement(
            "it needs an NVIDIA GPU with 8-bit matmuls (compute capability 8.9 or above); on a CPU TRITON_INTERPRET=1 "
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
            "with mlp kernel it makes all that Llama's MLP does, SwiGLU included, with one scale for a tensor: it needs a Llama "
            f"and recipe tensorwise, and no {' or '.join(OTHER_MLPS)} beside it; or set mlp to compiler",
            lambda machine, recipe: (
                not _one_mlp(recipe)
                or (
                    recipe.shape().family == "llama"
                    and knob_of(recipe, "fp8", "recipe", RECIPES[0]) == "tensorwise"
                    and not used(recipe, *OTHER_MLPS)
                )
            ),
        ),
        Requirement(
            "with mlp kernel gate and up are one product; add fused_projections with groups all or mlp, or set mlp to compiler",
            lambda machine, recipe: (
                not _one_mlp(recipe)
                or (
                    used(recipe, "fused_projections")
                    and knob_of(recipe, "fused_projections", "groups", "all") in ("all", "mlp")
                )
            ),
        ),
        Requirement(
            "in fused_loss the head has one scale for a tensor; set recipe to tensorwise, or scope to blocks",
            lambda machine, recipe: (
                not (_takes_head(recipe) and used(recipe, "fused_loss"))
                or knob_of(recipe, "fp8", "recipe", RECIPES[0]) == "tensorwise"
            ),
        ),
        Requirement(
            "with mlp kernel it needs a scope that has the blocks; set mlp to compiler, or scope to blocks_and_head",
            lambda machine, recipe: (
                not _one_mlp(recipe) or knob_of(recipe, "fp8", "scope", SCOPES[0]) != "head"
            ),
        ),
        Requirement(
            "beside layout.tp the logits are made by the loss over parts of the vocabulary; set scope to blocks",
            lambda machine, recipe: recipe.layout.tp == 1 or not _takes_head(recipe),
        ),
        Requirement(
            "with a scope that has the head it makes the logits itself, or fused_loss does so with it: take out "
            f"{', '.join(OTHER_HEADS)}, or set scope to blocks",
            lambda machine, recipe: not (_takes_head(recipe) and used(recipe, *OTHER_HEADS)),
        ),
        Requirement(
            f"with a scope that has the head it needs a vocabulary in multiples of {ALIGNMENT}; add vocab_pad, or fused_loss",
            lambda machine, recipe: (
                not _takes_head(recipe)
                or used(recipe, "fused_loss")
                or recipe.shape().vocab_size % ALIGNMENT == 0
                or used(recipe, "vocab_pad")
            ),
        ),
    ),
    conflicts=("fp16_matmul", "int8_base", "qlora"),
    after=("chunked_loss", "fused_loss", "vocab_pad"),
    knobs={
        "recipe": KnobRange(
            RECIPES, "one scale for a tensor (gradients in e5m2), or one for each row (all e4m3)"
        ),
        "scope": KnobRange(SCOPES, "the linear layers of the blocks, the head as well, or the head alone"),
        "fast": KnobRange(
            ("forward", "all"),
            "the products that may use the short accumulator: quicker, coarser; of a head never those of its gradients",
        ),
        "casts": KnobRange(
            ("compiler", "kernel"),
            "plain operators for compile to fuse, or one kernel for both layouts (tensorwise); of a head in fused_loss always a "
            "kernel",
        ),
        "mlp": KnobRange(
            MLPS,
            "Llama's MLP as layers with an activation between them for compile to fuse, or as one function with kernels that "
            "go from 16 bits to 8 in SwiGLU and its gradient",
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
        MemoryEffect("inputs.cast", 1.0, "in 8 bits", size=1.0, when=_tensorwise),
        MemoryEffect("inputs.cast", 1.0, "other casts, from the wide values", size=2.0, when=_rowwise),
        MemoryEffect("inputs.opaque", 1.0, when=lambda knobs: knobs["casts"] == "kernel"),
        MemoryEffect("casts", 0.0, "made again", when=_takes_blocks),
        MemoryEffect("head.cast", 1.0, "in 8 bits, both ways", when=lambda knobs: knobs["scope"] != "blocks"),
        MemoryEffect("mlp.whole", 1.0, when=_with_one_mlp),
        MemoryEffect("mlp.activated", 0.0, "with mlp kernel only gate and up are kept", when=_with_one_mlp),
    ),
    settings=(
        Setting(),
        Setting({"mlp": "kernel"}, {"fused_projections": {}}),
        Setting({"mlp": "kernel", "fast": "all"}, {"fused_projections": {}}),
        Setting({"casts": "kernel"}),
        Setting({"scope": "blocks_and_head"}),
        Setting({"scope": "head"}),
    ),
    work=(
        WorkEffect("blocks.dtype", "float8", when=_takes_blocks),
        WorkEffect("head.dtype", "float8", when=lambda knobs: knobs["scope"] != "blocks"),
        WorkEffect(
            "blocks.casts",
            8.5,
            "largest value, cast and both layouts; twice where nothing is compiled. With mlp kernel 22 instead of 32 bytes for "
            "each value of the MLP's width, which is a quarter of all",
            by_knob=lambda knobs: 6.4 if _with_one_mlp(knobs) else 8.5,
            when=_takes_blocks,
        ),
        WorkEffect("mlp.fused", 1.0, when=_with_one_mlp),
        WorkEffect(
            "launches.more",
            54.0,
            "scale and casts of Llama's 7 weights, 4 inputs and 7 gradients: three each",
            when=_takes_blocks,
        ),
    ),
)
