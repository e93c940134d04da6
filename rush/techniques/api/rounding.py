"""How far a run's numbers may be from those of plain fp32, by what its techniques round."""

from __future__ import annotations

from rush.recipe import Recipe
from rush.techniques import registry
from rush.techniques.api.contract import Stage, used

FP32 = 1e-5
"""fp32 sums in another order."""
UNKNOWN = 2**-4
"""Bound for techniques from users' files."""
ROUNDING = {
    "fp8": 2**-4,
    "int8_base": 2**-7,
    **dict.fromkeys(("amp_bf16", "bf16_master", "pure_bf16"), 2**-8),
    **dict.fromkeys(("amp_fp16", "fp16_matmul", "tf32"), 2**-11),
}
"""Relative error of matmuls, for techniques that round more than fp32."""


def rounding(recipe: Recipe) -> float:
    """Relative error of the run's matmuls against plain fp32."""
    names = [name for name, _ in recipe.technique_uses()]
    unknown = [UNKNOWN] if any(name not in registry() for name in names) else []
    return max([4 * FP32, *unknown, *(ROUNDING.get(name, 0.0) for name in names)])


def trains_adapters(recipe: Recipe) -> bool:
    """Whether the run trains adapters on a frozen base."""
    known = registry()
    return any(known[name].stage is Stage.ADAPT for name, _ in recipe.technique_uses() if name in known)


def adapts_plain_weights(recipe: Recipe) -> bool:
    """Whether the base of its adapters is not quantized."""
    return used(recipe, "lora")
