"""QLoRA: LoRA over a base quantized to 4 bits.

LoRA leaves one large thing in memory, the frozen base: 16 GB for an 8B model in bf16. Here the linear
layers of the blocks are stored in NF4 (a table of 16 values, a scale per block of 64, scales quantized once
more: 4.13 bits per weight), 4 GB, and one layer's weight is dequantized for each matmul, forward and again
backward. Embeddings, norms and head are unchanged. An 8B model then trains on a 24 GB GPU. It costs time:
every pass dequantizes every weight, which is small next to the matmuls only when there are many tokens; and
the base starts a little worse than the original. Weights are quantized one by one as they arrive: the model
never exists on the device in full precision. `lora` is faster where memory allows. On CUDA our own kernel
dequantizes what bitsandbytes stored, bit for bit the same: scales and weights in one pass, 1.8 times as fast
as the library's three on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

import rush.techniques.api.contract as api
from rush.hardware import Machine
from rush.models.quantized import QuantizedLinear, quantize_linears
from rush.models.quantized_formats import BLOCK, Form, register_dequantizer, stored_parts
from rush.recipe import Knob, Recipe
from rush.techniques.adapters.lora import FROZEN_MEMORY, KNOBS, add_adapters, dora_in_fp32
from rush.techniques.adapters.lora import evidence as adapters_trained
from rush.techniques.api.evidence import read_back
from rush.techniques.api.seams import needs_triton

BACKENDS = ("bitsandbytes", "torchao")
# With an adapter and without.
FORWARD = ("rush::adapted_quantized_linears", "rush::quantized_linear")
BACKWARD = ("rush::adapted_quantized_linears_backward", "rush::quantized_linear_backward")
OPERATORS = {"rush": "rush::dequantize_nf4", "bitsandbytes": "bitsandbytes::dequantize_4bit"}
KERNELS = {"rush": "dequantize_nf4_kernel", "bitsandbytes": "Dequantize", "torchao": "triton_"}
"""Names in a profile of each implementation of dequantize; torchao's has no operator of its own."""
OURS = "nf4/bitsandbytes, by rush"


@dataclass(frozen=True)
class QuantizedBase:
    """How the linear layers are stored."""

    bits: float
    """Per weight, with scales."""
    layers: int
    modules: Sequence[QuantizedLinear]
    dequantized_by: str
    """"rush" or the library."""


def quantize(build: api.Build, form: Form, dequantizer: str | None = None) -> None:
    """Quantize the blocks' linear layers."""
    quantize_linears(build.model, form)
    layers = [
        layer for role, layers in build.model.linears().items() if role != "head" for _, layer in layers
    ]
    for layer in layers:
        assert isinstance(layer, QuantizedLinear)
        layer.dequantizer = dequantizer or str(form)
    # The tables of values are shared by all layers.
    stored = sum(
        buffer.numel() * buffer.element_size()
        for layer in layers
        for name, buffer in layer.named_buffers()
        if name != "scale_table"
    )
    build.facts.note(
        QuantizedBase(
            bits=8 * stored / sum(layer.in_features * layer.out_features for layer in layers),
            layers=len(layers),
            modules=[layer for layer in layers if isinstance(layer, QuantizedLinear)],
            dequantized_by="rush" if dequantizer == OURS else form.backend,
        )
    )


def apply(build: api.Build, knobs: api.Knobs) -> None:
    ours = knobs["unpack"] == "rush" or (
        knobs["unpack"] == "auto" and _can_be_ours(build.machine, build.recipe)
    )
    if ours:
        register_dequantizer(OURS, _by_rush)
    quantize(build, Form("nf4", str(knobs["backend"])), OURS if ours else None)
    add_adapters(build, knobs)


def _by_rush(parts: Sequence[Tensor], dims: tuple[int, int], dtype: torch.dtype) -> Tensor:
    from rush.kernels.nf4 import dequantize_nf4_unchecked  # needs Triton

    return dequantize_nf4_unchecked(parts, dims, dtype)


def _can_be_ours(machine: Machine, recipe: Recipe) -> bool:
    """On CUDA with Triton, for weights that bitsandbytes quantized."""
    stored_by = api.knob_of(recipe, "qlora", "backend", BACKENDS[0])
    return machine.device == "cuda" and machine.triton is not None and stored_by == "bitsandbytes"


def dequantized_twice(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Matmuls dequantized their weights, forward and backward, and only adapters were trained."""
    noted = seen.facts.noted(QuantizedBase)
    if noted is None:
        return api.Proof(False, "no weight was quantized")
    trained = adapters_trained(seen, knobs)
    counts = [sum(seen.ops.get(op, 0) for op in ops) for ops in (FORWARD, BACKWARD)]
    # A replayed CUDA graph shows kernels only.
    ran = all(counts) or any(KERNELS[noted.dequantized_by] in name for name in seen.kernels)
    return api.Proof(
        trained.took_effect and ran,
        f"{noted.layers} layers at {noted.bits:.2f} bits per weight; dequantizing matmuls in the profiled steps: "
        f"{counts[0]} forward, {counts[1]} backward; {trained.what}",
    )


def _dequantized_by(seen: api.Observation) -> set[str]:
    """Implementations of dequantize that the profile names."""
    return {
        who
        for who, operator in OPERATORS.items()
        if operator in seen.ops or any(KERNELS[who] in name for name in seen.kernels)
    }


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The linear layers take less than 6 bits per weight, their weights were dequantized forward and backward, by our
    kernel or the library's as the knobs say, and only adapters were trained."""
    proof = dequantized_twice(seen, knobs)
    noted, found = seen.facts.noted(QuantizedBase), _dequantized_by(seen)
    if noted is None:
        return proof
    by = noted.dequantized_by
    # (DoRA's magnitudes are always computed with the library's.)
    as_asked = ("rush" in found) == (by == "rush") and (by in found or by not in OPERATORS)
    return api.Proof(
        proof.took_effect and as_asked and noted.bits < 6,
        f"dequantized by {' and '.join(sorted(found)) or by}; {proof.what}",
    )


def _stored_by(seen: api.Observation) -> list[Knob]:
    """The library of each layer, if its quantized parts are laid out as that library does."""
    noted = seen.facts.noted(QuantizedBase)
    return [
        layer.form.backend
        if set(layer.part_names) == set(stored_parts(layer.form, layer.out_features, layer.in_features))
        else "another layout"
        for layer in (noted.modules if noted is not None else [])
    ]


BACKEND = api.KnobRange(
    BACKENDS,
    "library that quantizes",
    read_back("backend", "libraries that quantized the layers", _stored_by),
)


def _unpack_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile names our dequantizing kernel, or only the library's; auto is ours on CUDA with backend bitsandbytes."""
    noted, found = seen.facts.noted(QuantizedBase), _dequantized_by(seen)
    can = bool(seen.kernels) and knobs["backend"] == "bitsandbytes"
    wanted = {"rush": True, "library": False, "auto": can}[str(knobs["unpack"])]
    return api.Proof(
        noted is not None and ("rush" in found) == wanted,
        f"dequantized by {' and '.join(sorted(found)) or (noted.dequantized_by if noted else 'nobody')}",
    )


def has_library(name: str) -> api.Requirement:
    return api.Requirement(
        "it needs the library that its backend knob names, bitsandbytes or torchao: "
        'pip install "optimization-rush[quant]"',
        lambda machine, recipe: find_spec(str(api.knob_of(recipe, name, "backend", BACKENDS[0]))) is not None,
        library=True,
    )


def _asks_for_ours(recipe: Recipe) -> bool:
    return api.knob_of(recipe, "qlora", "unpack", "auto") == "rush"


def _plans_ours(knobs: api.Knobs) -> bool:
    """The bits per weight that the planner assumes, for GPUs."""
    return knobs["unpack"] != "library" and knobs["backend"] == "bitsandbytes"


def _whole_blocks(machine: Machine, recipe: Recipe) -> bool:
    shape = recipe.shape()
    heads = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    widths = (heads[0], heads[1], shape.intermediate)
    return all(shape.hidden * width % BLOCK == 0 for width in widths)


technique = api.Technique(
    name="qlora",
    stage=api.Stage.ADAPT,
    apply=apply,
    requires=(
        has_library("qlora"),
        api.Requirement(
            f"it needs linear layers whose weights are a multiple of blocks of {BLOCK}", _whole_blocks
        ),
        dora_in_fp32,
        api.Requirement(
            "unpack = rush is for weights that bitsandbytes quantized; set backend bitsandbytes, or unpack auto or library",
            lambda machine, recipe: (
                not _asks_for_ours(recipe)
                or api.knob_of(recipe, "qlora", "backend", BACKENDS[0]) == "bitsandbytes"
            ),
        ),
        api.Requirement(
            f"with unpack = rush {needs_triton.message}",
            lambda machine, recipe: not _asks_for_ours(recipe) or needs_triton.met(machine, recipe),
        ),
    ),
    conflicts=("fp16_matmul", "fp8", "fused_projections", "int8_base", "lora", "tp"),
    knobs={
        "backend": BACKEND,
        "unpack": api.KnobRange(
            ("auto", "rush", "library"),
            "kernel that dequantizes, bit for bit the same: ours (CUDA, backend bitsandbytes) or the backend's; auto is "
            "ours where possible",
            _unpack_seen,
        ),
        **KNOBS,
    },
    claim=api.Claim(
        "bytes of a 65B model being fine-tuned",
        -0.94,
        regime="65B on one 48 GB GPU instead of more than 780 GB; quality of 16-bit fine-tuning kept",
        source="Dettmers et al. 2023, arXiv:2305.14314",
        of_memory=True,
    ),
    parity=api.Parity.CHANGES,
    evidence=evidence,
    memory=(
        api.MemoryEffect("blocks", 1.0, "4.13 bits per weight; embeddings and head unchanged", size=4.13 / 8),
        *FROZEN_MEMORY,
    ),
    work=(
        api.WorkEffect(
            "dequantize.efficiency",
            0.83,
            "measured on an H200 for our kernel; bitsandbytes' three reach half of it",
            by_knob=lambda knobs: 0.83 if _plans_ours(knobs) else 0.42,
        ),
        api.WorkEffect(
            "dequantize.launches", 7.0, "host time of bitsandbytes' two operators, in usual operator calls"
        ),
    ),
)
