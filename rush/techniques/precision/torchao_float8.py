"""torchao's float8 training, the library, as a baseline: its linear layers in place of ours.

torchao replaces every linear layer by one that casts input, weight and gradient to fp8 before each of the
three matmuls, with scales computed from the current values (dynamic scaling). It is plain PyTorch around
`torch._scaled_mm`: the compiler fuses scales and casts into the neighboring operations. Most people who train
in fp8 with PyTorch use it (torchtitan does), so it is the baseline of our own `fp8`, in our model, with the
same attention, loss, optimizer and loop. It wins for wide layers and many tokens, and loses where layers are
narrow. One scale per tensor is fastest; one per row keeps small values; `rowwise_with_gw_hp` leaves the weight
gradient in 16 bits. The LM head stays at 16 bits. The library's conversion also sets how this process's
compiler writes minimum and maximum, to the same numbers, because of a miscompiled store (Triton issue 11111).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

import rush.techniques.api.contract as api
from rush.hardware import Machine
from rush.libraries import load_library
from rush.recipe import Recipe
from rush.techniques.api.evidence import read_back
from rush.techniques.precision.cast_linear import ALIGNMENT, block_widths

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MATMUL = "aten::_scaled_mm"
REPLACED = "both replace the matmuls of the linear layers"
QUANTIZED = "quantized weights need their own linear layers; use fp8 with lora"
BYPASSED = "fused kernels multiply by the weights, past torchao's layers; use fp8"


@dataclass(frozen=True)
class TorchaoLayers:
    """The library's layers, which hold their configuration."""

    layers: tuple[nn.Linear, ...]


def apply(build: api.Build, knobs: api.Knobs) -> None:
    library = load_library("torchao.float8")
    names = {name for role, layers in build.model.linears().items() if role != "head" for name, _ in layers}
    library.convert_to_float8_training(
        build.model,
        module_filter_fn=lambda module, name: name in names,
        config=library.Float8LinearConfig.from_recipe_name(knobs["recipe"]),
    )
    layers = [build.model.get_submodule(name) for name in sorted(names)]
    build.facts.note(TorchaoLayers(tuple(layer for layer in layers if isinstance(layer, nn.Linear))))
    # MFU is relative to the fp8 peak, although LM head and attention stay at 16 bits.
    build.facts.rate_dtype = build.facts.operand_dtype = "float8"


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The layers of the blocks are the library's, and `aten::_scaled_mm` was called with the widths of each of them."""
    noted = seen.facts.noted(TorchaoLayers)
    layers = noted.layers if noted is not None else ()
    foreign = [layer for layer in layers if not type(layer).__module__.startswith("torchao.")]
    widths = {(call.shapes[0][1], call.shapes[1][1]) for call in seen.calls.get(MATMUL, {})}
    missing = {(layer.in_features, layer.out_features) for layer in layers} - widths
    named = ", ".join(f"{inputs} × {outputs}" for inputs, outputs in sorted(missing))
    return api.Proof(
        bool(layers) and not foreign and not missing,
        f"{len(layers) - len(foreign)} layers of torchao; `{MATMUL}` of {len(widths)} pairs of widths"
        + (f", not of {named}" if missing else ""),
    )


def _recipes(seen: api.Observation) -> Iterable[str]:
    library: Any = load_library("torchao.float8")
    noted = seen.facts.noted(TorchaoLayers)
    known = {library.Float8LinearConfig.from_recipe_name(name): name for name in RECIPES} if noted else {}
    return [known.get(getattr(layer, "config", None), "another") for layer in noted.layers] if noted else []


def _has_units(machine: Machine) -> bool:
    # AMD's MI300X uses other fp8 formats (fnuz), for which nothing here is tested.
    return machine.hip is None and machine.capability is not None and machine.capability >= (8, 9)


def _is_compiled(recipe: Recipe) -> bool:
    return api.used(recipe, "compile")


def _widths_fit(machine: Machine, recipe: Recipe) -> bool:
    sizes = (*block_widths(recipe), recipe.batch.sequence // recipe.layout.cp)
    return all(size % ALIGNMENT == 0 for size in sizes)


def _casts(knobs: api.Knobs) -> float:
    return 5.0 if knobs["recipe"] == "rowwise_with_gw_hp" else 9.0


technique = api.Technique(
    name="torchao_float8",
    relative_error=2**-4,
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            'it needs the library torchao: pip install "optimization-rush[quant]"',
            lambda machine, recipe: find_spec("torchao") is not None,
            library=True,
        ),
        api.Requirement(
            "it needs an NVIDIA GPU with fp8 matmuls (compute capability 8.9 or above); on a CPU fp8 matmuls are a check of "
            "arithmetic, which fp8 offers with TRITON_INTERPRET=1",
            lambda machine, recipe: _has_units(machine),
        ),
        api.half_precision,
        api.Requirement(
            "it needs compile, as the library says: eager, its casts make it slower than bf16",
            lambda machine, recipe: _is_compiled(recipe),
        ),
        api.Requirement(
            f"it needs every width of the linear layers and batch.sequence to be a multiple of {ALIGNMENT} (layout.cp shards the "
            "sequence): the library's layers do not pad",
            _widths_fit,
        ),
        api.Requirement(
            "it needs objective.kind lm: rows of other objectives have any number of tokens, which the library's layers do not "
            "pad; use fp8",
            lambda machine, recipe: recipe.objective.kind == "lm",
        ),
    ),
    conflicts=(
        "fp16_matmul",
        "fp8",
        "fused_bias",
        "fused_projections",
        "int8_base",
        "int8_matmul",
        "lora",
        "qlora",
        "tp",
    ),
    reasons={
        "fp16_matmul": REPLACED,
        "fp8": REPLACED,
        "fused_bias": BYPASSED,
        "fused_projections": BYPASSED,
        "int8_base": QUANTIZED,
        "int8_matmul": REPLACED,
        "lora": "torchao's layers compute gradients of frozen weights, too; use fp8",
        "qlora": QUANTIZED,
        "tp": "torchao's layers need torchao's own sharding styles, which rush does not use; use fp8",
    },
    knobs={
        "recipe": api.KnobRange(
            RECIPES,
            "one scale per tensor (gradients in e5m2), one per row (all e4m3), or that with weight gradients in 16 bits",
            read_back("recipe", "recipes of the library's layers", _recipes),
        ),
    },
    claim=api.Claim(
        "tokens_per_s",
        0.25,
        regime="Llama 3 8B on 8 H100 with FSDP, compiled, up to; 5,760 tokens/s in bf16, 7,186 with one scale per tensor and fp8 "
        "all-gathers, 6,412 with one per row",
        source="torchao's documentation of quantized training; torchtitan, commit 7a04053",
    ),
    parity=api.Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        api.MemoryEffect("inputs.cast", 1.0, "other casts, from the 16-bit values", size=2.0),
        api.MemoryEffect("casts", 0.0, "recomputed"),
    ),
    settings=(api.Setting(), api.Setting({"recipe": "rowwise"})),
    work=(
        api.WorkEffect("blocks.dtype", "float8"),
        api.WorkEffect(
            "blocks.casts",
            9.0,
            "absolute maximum (2 bytes) and cast (3), of each input in both passes, of each gradient in both layouts; counted, "
            "not measured. Half of it with weight gradients in 16 bits",
            by_knob=_casts,
        ),
        api.WorkEffect(
            "launches.extra", 54.0, "as fp8: scales and casts of Llama's 7 weights, 4 inputs and 7 gradients"
        ),
    ),
)
