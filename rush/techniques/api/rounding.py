"""How far a run's numbers may be from those of the plain fp32 model, by what its techniques round."""

from __future__ import annotations

from rush.recipe import Recipe
from rush.techniques import registry
from rush.techniques.api.contract import Stage, used

FP32 = 1e-5
"""Sums in another order, in fp32."""
UNKNOWN = 2**-4
"""Of a technique that is not ours and does not promise to stay close."""
ROUNDING = {
    "fp8": 2**-4,
    "int8_base": 2**-7,
    **dict.fromkeys(("amp_bf16", "bf16_master", "pure_bf16"), 2**-8),
    **dict.fromkeys(("amp_fp16", "fp16_matmul", "tf32"), 2**-11),
}
"""Of the matmuls of the techniques that round more than fp32 does, relative."""


def rounding(recipe: Recipe) -> float:
    """How far the matmuls of the run may be from those of plain fp32, relative."""
    names = [name for name, _ in recipe.technique_uses()]
    strangers = [UNKNOWN] if any(name not in registry() for name in names) else []
    return max([4 * FP32, *strangers, *(ROUNDING.get(name, 0.0) for name in names)])


def trains_adapters(recipe: Recipe) -> bool:
    """Whether the run trains adapters beside a frozen base."""
    known = registry()
    return any(known[name].stage is Stage.ADAPT for name, _ in recipe.technique_uses() if name in known)


def adapts_plain_weights(recipe: Recipe) -> bool:
    """Whether its adapters are beside weights as they were, not beside quantized ones."""
    return used(recipe, "lora")
