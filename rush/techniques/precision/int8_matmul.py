"""int8 matmuls in the linear layers, forward and both gradients, for GPUs without fp8.

int8 tensor cores multiply at twice the bf16 rate on an A100, and at four times on GeForce cards, whose 16-bit rate
with fp32 accumulation is halved. Every GPU since Ampere has them. int8 has no exponent, so every row of an operand
has its own scale, amax / 127, along the outer dims of the matmul: then the scales factor out of the sum, which int32
holds exactly. Inputs and weights are rounded to nearest, within half a step. Gradients have a few large values among
thousands of small ones, which would all become zero: stochastic rounding keeps them unbiased. Weights and optimizer
state are unchanged, and so is the LM head, whose gradients have the largest outliers. It needs wide layers, many
tokens and `compile`, which fuses casts and scaling. The one GPU it was measured on is an H200, where it loses:
cuBLAS int8 matmuls are only ×1.2 as fast as bf16 there, and casts and int32 results take twice as long as the
matmuls. Whether it gains on another GPU is for `rush ladder` to show. Where a GPU has fp8 (Hopper), use `fp8`.
`checkpoint_selective` saves the int32 sums, twice the bytes of 16-bit outputs, which a plan does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import rush.techniques.api.contract as api
from rush.hardware import Machine
from rush.kernels.int8_linear import ALIGNMENT, CAPABILITY, LEAST, LONGEST, int8_linear
from rush.recipe import Recipe
from rush.techniques.precision.cast_linear import CastLinear, block_widths, cast_blocks

MATMUL = "aten::_int_mm"
STRIDE = 1_000_003
"""Between the seeds of runs, so that the steps of two runs rarely share one."""


@dataclass(frozen=True)
class Int8Layers:
    """The layers with int8 matmuls."""

    layers: tuple[CastLinear, ...]
    seed: Tensor
    """The seed of this step's stochastic rounding."""


def apply(build: api.Build, knobs: api.Knobs) -> None:
    # By the number of the step, not from a generator: a resumed run compiles and captures once more, which may draw. In memory,
    # so that a compiled or captured step reads what is new.
    seed = torch.zeros((), dtype=torch.int32, device=build.device)

    def seeded(step: int) -> None:
        seed.fill_((build.recipe.run.seed * STRIDE + step) % 2**31)

    build.before_step.append(seeded)
    # A batch may have any number of tokens; a GPU matmul needs at least LEAST.
    layers = cast_blocks(build.model, partial(int8_linear, seed=seed), LEAST)
    build.facts.note(Int8Layers(tuple(layers), seed))
    # MFU is relative to the int8 peak, although LM head and attention stay at 16 bits.
    build.facts.rate_dtype = build.facts.operand_dtype = "int8"


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """`aten::_int_mm` ran three times per layer of the blocks and micro batch; the shapes show forward, input gradient and
    weight gradient of every role (at least the forward one where weights are frozen; only the count where layers are joined
    or sharded)."""
    noted = seen.facts.noted(Int8Layers)
    layers = noted.layers if noted is not None else ()
    frozen = seen.facts.adapters is not None
    wanted = (1 if frozen else 3) * (len(layers) - seen.facts.matmuls_saved) * max(1, seen.micro_batches)
    made = seen.matmuls_by_op.get(MATMUL, 0.0)
    absent = [] if seen.facts.matmuls_saved or seen.facts.tp else _absent(seen, layers, frozen)
    return api.Proof(
        0 < wanted <= made and not absent,
        f"{made:.0f} matmuls per step by `{MATMUL}`, where {len(layers)} layers need {wanted}"
        + (f"; not seen: {', '.join(absent)}" if absent else ""),
    )


def _absent(seen: api.Observation, layers: tuple[CastLinear, ...], frozen: bool) -> list[str]:
    """Passes of which no matmul was seen: its outer and inner dims are those of the weight, the others tokens."""
    shapes = [(*call.shapes[0], call.shapes[1][1]) for call in seen.calls.get(MATMUL, {})]
    by_width = {(inner, columns) for _, inner, columns in shapes}
    gradients = {(rows, columns) for rows, _, columns in shapes}
    missing = []
    for outputs, inputs in sorted({(layer.out_features, layer.in_features) for layer in layers}):
        passes = {"output": (inputs, outputs) in by_width}
        if not frozen:
            passes["input gradient"] = (outputs, inputs) in by_width
            passes["weight gradient"] = (outputs, inputs) in gradients
        missing += [f"the {name} of {outputs} × {inputs}" for name, found in passes.items() if not found]
    return missing


def _has_units(machine: Machine, recipe: Recipe) -> bool:
    if machine.device == "cpu":
        return True
    return machine.hip is None and machine.capability is not None and machine.capability >= CAPABILITY


def _widths_fit(machine: Machine, recipe: Recipe) -> bool:
    fit = all(size % ALIGNMENT == 0 and size >= LEAST for size in block_widths(recipe))
    return machine.device == "cpu" or fit


def _sums_fit(machine: Machine, recipe: Recipe) -> bool:
    rows = recipe.batch.micro if isinstance(recipe.batch.micro, int) else 1
    pairs = 2 if recipe.objective.kind == "dpo" else 1
    return pairs * rows * recipe.batch.sequence // recipe.layout.cp <= LONGEST


technique = api.Technique(
    name="int8_matmul",
    alternative=api.Alternative.EIGHT_BIT,
    relative_error=2**-5,
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            "it needs an NVIDIA GPU of compute capability 8.0 (Ampere) or above, or a CPU, to check with",
            _has_units,
        ),
        api.half_precision,
        api.Requirement(
            f"on a GPU it needs every width of the linear layers to be a multiple of {ALIGNMENT} and at least {LEAST}, also "
            "after sharding (layout.tp shards widths)",
            _widths_fit,
        ),
        api.Requirement(
            f"a weight gradient sums the tokens of a micro batch in int32, which surely holds {LONGEST:,}; lower batch.micro",
            _sums_fit,
        ),
    ),
    conflicts=("fp16_matmul", "fp8", "int8_base", "qlora", "torchao_float8"),
    reasons={
        "fp8": "both replace the matmuls of the linear layers; fp8 has cheaper casts where a GPU has fp8 at the same rate",
        "fp16_matmul": "both replace the matmuls of the linear layers",
        "int8_base": "its linear layers hold quantized weights, which they dequantize themselves; use lora",
        "torchao_float8": "both replace the matmuls of the linear layers",
        "qlora": "its linear layers hold quantized weights, which they dequantize themselves; use lora",
    },
    claim=api.Claim(
        "tokens_per_s",
        0.70,
        regime="a Llama 2 of 1B parameters, 32 × 2,048 tokens a step, on one RTX 4090, over bf16: about 17k and 29k tokens/s. By a "
        "Triton matmul, and gradients rounded to nearest",
        source="torchao, torchao/prototype/quantized_training/README.md",
    ),
    parity=api.Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        api.MemoryEffect("inputs.cast", 1.0, "other casts, from the 16-bit values", size=2.0),
        api.MemoryEffect("casts", 0.0, "recomputed"),
        api.MemoryEffect("matmul.sums", 1.0, "int32 results", size=4.0),
    ),
    work=(
        api.WorkEffect("blocks.dtype", "int8"),
        api.WorkEffect(
            "blocks.casts",
            96.0,
            "measured on an H200: a compiled layer of 16k × 2048 → 8192 takes 5.6 ms forward and backward, its matmuls 1.7. Counted "
            "it would be 16: amax and cast by rows (3) and by columns (5), and an int32 result (8). Eager it is three times that",
        ),
        api.WorkEffect(
            "launches.extra",
            75.0,
            "compiled: Llama's 7 weights, 4 inputs and 7 gradients, a launch for each cast by rows, two by columns, one for each "
            "of 21 results; counted, not measured. Eager a layer calls 135 operators",
        ),
    ),
)
