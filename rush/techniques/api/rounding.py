"""How far a run's numbers may be from those of plain fp32, by what its techniques round."""

from __future__ import annotations

from rush.recipe import Recipe
from rush.techniques import registry
from rush.techniques.api.contract import Stage, Technique

FP32 = 1e-5
"""fp32 sums in another order."""
UNKNOWN = 2**-4
"""Bound for techniques from users' files."""


def rounding(recipe: Recipe) -> float:
    """Relative error of the run's matmuls against plain fp32, as its techniques declare it."""
    known = registry()
    errors = (known[n].relative_error if n in known else UNKNOWN for n, _ in recipe.technique_uses())
    return max([4 * FP32, *errors])


def trains_adapters(recipe: Recipe) -> bool:
    """Whether the run trains adapters on a frozen base."""
    return bool(_adapter_techniques(recipe))


def adapts_plain_weights(recipe: Recipe) -> bool:
    """Whether the run trains adapters on a base that is not quantized."""
    found = _adapter_techniques(recipe)
    return any(all(effect.term != "blocks" for effect in technique.memory) for technique in found)


def _adapter_techniques(recipe: Recipe) -> list[Technique]:
    known = registry()
    names = [name for name, _ in recipe.technique_uses() if name in known]
    return [known[name] for name in names if known[name].stage is Stage.ADAPT]
