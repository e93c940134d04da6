"""QLoRA: LoRA over a base whose frozen weights are stored in 4 bits.

LoRA leaves one large thing in memory, the frozen base: 16 GB for an 8B model in bf16. Here the linear layers of
the blocks are kept as NF4 codes (a table of 16 values, a scale for each block of 64, the scales quantised once
more: 4.13 bits a weight), 4 GB, and one layer's weight is unpacked for each product, forward and again backward.
Embeddings, norms and head stay as they are. An 8B model then trains on a 24 GB card. It costs time: every
pass unpacks every weight, which hides behind the products only when there are many tokens; and the base is
rounded to 16 levels, so it starts a little worse than what it was made from. Weights are quantised one by
one as they arrive: the model never exists on the device in full precision. `lora` is faster where memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from rush.hardware import Machine
from rush.models.codes import BLOCK, Form
from rush.models.quantised import quantise_linears
from rush.recipe import Knob, Recipe
from rush.techniques.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Requirement,
    Stage,
    Technique,
    knob_of,
)
from rush.techniques.lora import FROZEN_MEMORY, KNOBS, add_adapters, lengths_in_fp32
from rush.techniques.lora import evidence as adapters_trained

BACKENDS = ("bitsandbytes", "torchao")
# With an adapter and without.
FORWARD = ("rush::adapted_quantised_linears", "rush::quantised_linear")
BACKWARD = ("rush::adapted_quantised_linears_backward", "rush::quantised_linear_backward")
KERNELS = {"bitsandbytes": "Dequantize", "torchao": "triton_"}


def quantise(build: Build, form: Form) -> None:
    """Codes in place of the blocks' weights; what they come to is noted for the evidence."""
    quantise_linears(build.model, form)
    layers = [
        layer for role, layers in build.model.linears().items() if role != "head" for _, layer in layers
    ]
    # The tables of values are the same for all layers and do not grow with them.
    stored = sum(
        buffer.numel() * buffer.element_size()
        for layer in layers
        for name, buffer in layer.named_buffers()
        if name != "scale_table"
    )
    build.facts["quantised"] = {
        "bits": 8 * stored / sum(layer.in_features * layer.out_features for layer in layers),
        "layers": len(layers),
    }


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    quantise(build, Form("nf4", str(knobs["backend"])))
    add_adapters(build, knobs)


def unpacked_twice(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Layers were multiplied from their codes, forward and backward, on top of what adapters show."""
    noted = seen.facts.get("quantised")
    if noted is None:
        return Proof(False, "no weight was quantised")
    trained = adapters_trained(seen, knobs)
    counts = [sum(seen.ops.get(op, 0) for op in ops) for ops in (FORWARD, BACKWARD)]
    # A replayed recording shows kernels only; bitsandbytes' unpacking is known by name.
    replayed = seen.kernels and any(KERNELS[str(knobs["backend"])] in name for name in seen.kernels)
    ran = all(counts) or bool(replayed)
    return Proof(
        trained.took_effect and ran,
        f"{noted['layers']} layers in {noted['bits']:.2f} bits a weight; products from codes in the profiled steps: "
        f"{counts[0]} forward, {counts[1]} backward; {trained.what}",
    )


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """The linear layers' weights come to less than 5 bits each, products from their codes ran forward and backward, and
    only adapters were trained."""
    proof = unpacked_twice(seen, knobs)
    bits = seen.facts.get("quantised", {}).get("bits", 32)
    return Proof(proof.took_effect and bits < 6, proof.what)


def has_library(name: str) -> Requirement:
    return Requirement(
        "it needs the library that its backend knob names, bitsandbytes or torchao: "
        'pip install "optimization-rush[quant]" -c constraints.txt',
        lambda machine, recipe: find_spec(str(knob_of(recipe, name, "backend", BACKENDS[0]))) is not None,
    )


def _whole_blocks(machine: Machine, recipe: Recipe) -> bool:
    shape = recipe.shape()
    heads = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    widths = (heads[0], heads[1], shape.intermediate)
    return all(shape.hidden * width % BLOCK == 0 for width in widths)


technique = Technique(
    name="qlora",
    stage=Stage.ADAPT,
    apply=apply,
    requires=(
        has_library("qlora"),
        Requirement(f"it needs linear layers whose weights come in blocks of {BLOCK}", _whole_blocks),
        lengths_in_fp32,
    ),
    conflicts=("fp8", "fused_projections", "int8_base", "lora", "tp"),
    knobs={"backend": KnobRange(BACKENDS, "whose quantising and unpacking"), **KNOBS},
    claim=Claim(
        "bytes of a 65B model being fine-tuned",
        -0.94,
        regime="65B on one 48 GB GPU instead of more than 780 GB; quality of 16-bit fine-tuning kept",
        source="Dettmers et al. 2023, arXiv:2305.14314",
    ),
    parity=Parity.CHANGES,
    evidence=evidence,
    memory=(
        MemoryEffect("blocks", 1.0, "4.13 bits a weight; embeddings and head as they were", size=4.13 / 8),
        *FROZEN_MEMORY,
    ),
)
