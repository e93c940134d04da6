"""fp8 matmuls in the linear layers, forward and both gradients.

Hopper's tensor cores run fp8 matmuls at twice the bf16 rate. Each operand is scaled to the fp8 range and
cast on the way into the matmul; weights and optimizer state are unchanged. How much of the factor of two is
left depends on the casts, which read every activation and gradient once more, and on the shapes: it pays
for wide layers and many tokens, and can cost time where layers are narrow. Use it with `compile`, which
fuses the casts; eager fp8 is slower than bf16. With a 3-bit mantissa the loss curve follows that of bf16,
but single steps differ. Tensorwise scaling is fastest; rowwise scaling preserves small values next to large
ones. With `tp` every rank scales its own shard by that shard's absolute maximum, without communication:
scales are powers of two, so a number gets the same mantissa under each, unless it is below 2⁻¹³ of the
maximum. With `mlp` kernel Llama's SwiGLU goes from 16 bits to fp8 in our own kernels, rounded once, where a
compiler rounds twice. A small model's LM head is a fifth of its FLOPs: `scope` head, with `fused_loss`,
gives an fp8 LM head and nothing else; the gradient of the logits is cast in one kernel, whose scale is known
in advance.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import rush.techniques.api.contract as api
from rush.hardware import Machine
from rush.models.layers import GatedMLP
from rush.recipe import Recipe
from rush.techniques.api.seams import needs_triton
from rush.techniques.kernels.fused_loss import FusedLossHead
from rush.techniques.kernels.vocab_pad import PaddedProjection, ProjectedLossHead
from rush.techniques.precision import fp8_evidence
from rush.techniques.precision.cast_linear import ALIGNMENT, block_widths, cast_blocks, projection
from rush.techniques.precision.fp8_layers import Fp8GatedMLP

RECIPES, SCOPES = ("tensorwise", "rowwise"), ("blocks", "blocks_and_head", "head")
CASTS = MLPS = ("compiler", "kernel")
OTHER_HEADS = ("chunked_loss", "liger")
OTHER_MLPS = ("fused_mlp", "liger")


def apply(build: api.Build, knobs: api.Knobs) -> None:
    from rush.kernels.fp8_linear import fp8_linear
    from rush.kernels.fp8_mlp import fp8_mlp

    options: Any = {"fast_accum": knobs["fast"], "casts": knobs["casts"]}
    recipe: Any = knobs["recipe"]
    matmul = partial(fp8_linear, recipe=recipe, **options)
    # MFU is relative to the fp8 peak, although LM head and attention stay at 16 bits.
    if _takes_blocks(knobs):
        build.facts.rate_dtype = build.facts.operand_dtype = "float8"
        cast_blocks(build.model, matmul)
    if _with_one_mlp(knobs):
        for block in build.model.blocks:
            plain_mlp = block.get_submodule("mlp")
            assert isinstance(plain_mlp, GatedMLP), type(plain_mlp)
            block.mlp = Fp8GatedMLP(plain_mlp, partial(fp8_mlp, **options))
    # No fast accumulation for the LM head's gradients: with it the loss of Llama 3.2 1B fell behind
    # (docs/negative-results.md). A token's gradient sums a few large and thousands of small numbers.
    head = build.model.loss_head
    if isinstance(head, FusedLossHead) and knobs["scope"] != "blocks":
        head.matmuls = "fp8"
        build.facts.note(head)
    elif knobs["scope"] != "blocks":
        of_head = partial(fp8_linear, recipe=recipe, **(options | {"fast_accum": "forward"}))
        padded = PaddedProjection(build.head_width, projection(of_head))
        build.model.loss_head = ProjectedLossHead(padded, build.model.shape.logit_softcap)


def _can_multiply(machine: Machine, recipe: Recipe) -> bool:
    if machine.device == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    # AMD's MI300X uses other fp8 formats (fnuz).
    return machine.hip is None and machine.capability is not None and machine.capability >= (8, 9)


def _widths_fit(machine: Machine, recipe: Recipe) -> bool:
    # Every batch must fit, also the last one of a validation, which may have fewer rows.
    sizes = (*block_widths(recipe), recipe.batch.sequence // recipe.layout.cp)
    return all(size % ALIGNMENT == 0 for size in sizes)


def _with_one_mlp(knobs: api.Knobs) -> bool:
    return knobs["mlp"] == "kernel"


def _one_mlp(recipe: Recipe) -> bool:
    return api.knob_of(recipe, "fp8", "mlp", MLPS[0]) == "kernel"


def _tensorwise(knobs: api.Knobs) -> bool:
    return knobs["recipe"] == "tensorwise" and _takes_blocks(knobs)


def _rowwise(knobs: api.Knobs) -> bool:
    return knobs["recipe"] == "rowwise" and _takes_blocks(knobs)


def _takes_blocks(knobs: api.Knobs) -> bool:
    return knobs["scope"] != "head"


def _takes_head(recipe: Recipe) -> bool:
    return api.knob_of(recipe, "fp8", "scope", SCOPES[0]) != "blocks"


technique = api.Technique(
    name="fp8",
    alternative=api.Alternative.EIGHT_BIT,
    relative_error=2**-4,
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        needs_triton,
        api.Requirement(
            "it needs an NVIDIA GPU with fp8 matmuls (compute capability 8.9 or above); on a CPU TRITON_INTERPRET=1 "
            "emulates them",
            _can_multiply,
        ),
        api.Requirement(
            "on a GPU it needs activations in bf16; add amp_bf16, bf16_master or pure_bf16",
            lambda machine, recipe: (
                machine.device != "cuda" or api.used(recipe, "amp_bf16", "bf16_master", "pure_bf16")
            ),
        ),
        api.Requirement(
            f"it needs every width of the linear layers and batch.sequence to be a multiple of {ALIGNMENT}, also after "
            "sharding (layout.tp shards widths, layout.cp the sequence)",
            _widths_fit,
        ),
        api.Requirement(
            "with recipe rowwise its casts are the compiler's: set casts to compiler, or recipe to tensorwise",
            lambda machine, recipe: (
                api.knob_of(recipe, "fp8", "recipe", RECIPES[0]) == "tensorwise"
                or api.knob_of(recipe, "fp8", "casts", CASTS[0]) == "compiler"
            ),
        ),
        api.Requirement(
            "with mlp kernel it replaces Llama's whole MLP, with tensorwise scales: it needs an MLP with SwiGLU and recipe "
            f"tensorwise, and no {' or '.join(OTHER_MLPS)}; or set mlp to compiler",
            lambda machine, recipe: (
                not _one_mlp(recipe)
                or (
                    recipe.shape().gated_mlp
                    and recipe.shape().activation == "silu"
                    and api.knob_of(recipe, "fp8", "recipe", RECIPES[0]) == "tensorwise"
                    and not api.used(recipe, *OTHER_MLPS)
                )
            ),
        ),
        api.Requirement(
            "with mlp kernel gate and up are one matmul; add fused_projections with groups all or mlp, or set mlp to compiler",
            lambda machine, recipe: (
                not _one_mlp(recipe)
                or (
                    api.used(recipe, "fused_projections")
                    and api.knob_of(recipe, "fused_projections", "groups", "all") in ("all", "mlp")
                )
            ),
        ),
        api.Requirement(
            "in fused_loss the LM head is scaled tensorwise; set recipe to tensorwise, or scope to blocks",
            lambda machine, recipe: (
                not (_takes_head(recipe) and api.used(recipe, "fused_loss"))
                or api.knob_of(recipe, "fp8", "recipe", RECIPES[0]) == "tensorwise"
            ),
        ),
        api.Requirement(
            "with mlp kernel scope must include the blocks; set mlp to compiler, or scope to blocks_and_head",
            lambda machine, recipe: (
                not _one_mlp(recipe) or api.knob_of(recipe, "fp8", "scope", SCOPES[0]) != "head"
            ),
        ),
        api.Requirement(
            "gradients of the LM head never use fast accumulation, so fast all needs a scope with the blocks; set fast to "
            "forward, or scope to blocks_and_head",
            lambda machine, recipe: (
                api.knob_of(recipe, "fp8", "fast", "forward") == "forward"
                or api.knob_of(recipe, "fp8", "scope", SCOPES[0]) != "head"
            ),
        ),
        api.Requirement(
            "with layout.tp the loss computes the logits of a vocab shard; set scope to blocks",
            lambda machine, recipe: recipe.layout.tp == 1 or not _takes_head(recipe),
        ),
        api.Requirement(
            "if scope includes the head it computes the logits itself, or fused_loss does: remove "
            f"{', '.join(OTHER_HEADS)}, or set scope to blocks",
            lambda machine, recipe: not (_takes_head(recipe) and api.used(recipe, *OTHER_HEADS)),
        ),
        api.Requirement(
            f"if scope includes the head it needs a vocabulary that is a multiple of {ALIGNMENT}; add vocab_pad, or fused_loss",
            lambda machine, recipe: (
                not _takes_head(recipe)
                or api.used(recipe, "fused_loss")
                or recipe.shape().vocab_size % ALIGNMENT == 0
                or api.used(recipe, "vocab_pad")
            ),
        ),
    ),
    conflicts=("fp16_matmul", "int8_base", "qlora"),
    after=("chunked_loss", "fused_loss", "vocab_pad"),
    knobs={
        "recipe": api.KnobRange(
            RECIPES,
            "one scale per tensor (gradients in e5m2), or one per row (all e4m3)",
            fp8_evidence.recipe_seen,
        ),
        "scope": api.KnobRange(
            SCOPES,
            "the linear layers of the blocks, the LM head as well, or the LM head alone",
            fp8_evidence.scope_seen,
        ),
        "fast": api.KnobRange(
            ("forward", "all"),
            "matmuls with fast accumulation: faster, less precise; never for gradients of the LM head",
            fp8_evidence.fast_seen,
        ),
        "casts": api.KnobRange(
            ("compiler", "kernel"),
            "plain operators for compile to fuse, or one kernel that writes both layouts (tensorwise); an LM head in "
            "fused_loss always uses a kernel",
            fp8_evidence.casts_seen,
        ),
        "mlp": api.KnobRange(
            MLPS,
            "Llama's MLP as layers and an activation for compile to fuse, or as one function whose kernels cast to fp8 "
            "inside SwiGLU and its gradient",
            fp8_evidence.mlp_seen,
        ),
    },
    claim=api.Claim(
        "tokens_per_s",
        0.25,
        regime="Llama 3 8B on 8 H100, one scale per tensor, after compile in bf16",
        source="torchao's documentation of fp8 training; 5,760 against 7,186 tokens/s in a torchtitan commit",
    ),
    parity=api.Parity.STATISTICAL,
    evidence=fp8_evidence.evidence,
    memory=(
        api.MemoryEffect("inputs.cast", 1.0, "in fp8", size=1.0, when=_tensorwise),
        api.MemoryEffect("inputs.cast", 1.0, "other casts, from the 16-bit values", size=2.0, when=_rowwise),
        api.MemoryEffect("inputs.opaque", 1.0, when=lambda knobs: knobs["casts"] == "kernel"),
        api.MemoryEffect("casts", 0.0, "recomputed", when=_takes_blocks),
        api.MemoryEffect(
            "head.cast", 1.0, "in fp8, also transposed", when=lambda knobs: knobs["scope"] != "blocks"
        ),
        api.MemoryEffect("mlp.whole", 1.0, when=_with_one_mlp),
        api.MemoryEffect(
            "mlp.activated", 0.0, "with mlp kernel only gate and up are saved", when=_with_one_mlp
        ),
    ),
    settings=(
        api.Setting(),
        api.Setting({"mlp": "kernel"}, {"fused_projections": {}}),
        api.Setting({"mlp": "kernel", "fast": "all"}, {"fused_projections": {}}),
        api.Setting({"casts": "kernel"}),
        api.Setting({"scope": "blocks_and_head"}),
        api.Setting({"scope": "head"}),
    ),
    work=(
        api.WorkEffect("blocks.dtype", "float8", when=_takes_blocks),
        api.WorkEffect("head.dtype", "float8", when=lambda knobs: knobs["scope"] != "blocks"),
        api.WorkEffect(
            "blocks.casts",
            8.5,
            "absolute maximum, cast and both layouts; twice when eager. With mlp kernel 22 instead of 32 bytes per value "
            "of the MLP's width, a quarter of all values",
            by_knob=lambda knobs: 6.4 if _with_one_mlp(knobs) else 8.5,
            when=_takes_blocks,
        ),
        api.WorkEffect("mlp.fused", 1.0, when=_with_one_mlp),
        api.WorkEffect(
            "launches.extra",
            54.0,
            "scales and casts of Llama's 7 weights, 4 inputs and 7 gradients: three launches each",
            when=_takes_blocks,
        ),
    ),
)
