"""int8 base: LoRA over a base quantized to int8.

Like `qlora`, with less rounding: int8 weights with one scale per row, half the bytes of bf16. The error is 15
times smaller than with NF4, dequantizing is one multiplication, and the base of an 8B model takes 8 GB
instead of 4. Choose it if 4 bits lose too much quality and 16 do not fit; if they fit, `lora` is faster.
Matmuls run in the compute dtype: int8 is the storage format, not the arithmetic.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.models.quantized_formats import Form
from rush.techniques.adapters.lora import FROZEN_MEMORY, KNOBS, add_adapters, dora_in_fp32
from rush.techniques.adapters.qlora import BACKEND, QuantizedBase, dequantized_twice, has_library, quantize


def apply(build: api.Build, knobs: api.Knobs) -> None:
    quantize(build, Form("int8", str(knobs["backend"])))
    add_adapters(build, knobs)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The linear layers take 8 to 10 bits per weight, their weights were dequantized forward and backward, and only
    adapters were trained."""
    proof = dequantized_twice(seen, knobs)
    noted = seen.facts.noted(QuantizedBase)
    return api.Proof(proof.took_effect and noted is not None and 8 <= noted.bits < 10, proof.what)


technique = api.Technique(
    name="int8_base",
    relative_error=2**-7,
    stage=api.Stage.ADAPT,
    apply=apply,
    requires=(has_library("int8_base"), dora_in_fp32),
    conflicts=("fp16_matmul", "fp8", "fused_projections", "lora", "qlora", "tp"),
    knobs={"backend": BACKEND, **KNOBS},
    claim=api.Claim(
        "bytes of the base",
        -0.5,
        regime="weights of the linear layers, against bf16; no loss of quality up to 175B in inference",
        source="Dettmers et al. 2022, arXiv:2208.07339",
        of_memory=True,
    ),
    parity=api.Parity.CHANGES,
    evidence=evidence,
    memory=(
        api.MemoryEffect("blocks", 1.0, "one byte per weight; embeddings and head unchanged", size=1.01),
        *FROZEN_MEMORY,
    ),
    work=(api.WorkEffect("dequantize.launches", 3.5, "host time, in usual operator calls"),),
)
