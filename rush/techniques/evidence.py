"""Ready pieces of evidence: what most techniques need to show that they took effect."""

from __future__ import annotations

from collections.abc import Mapping

from rush.recipe import Knob
from rush.techniques.contract import Evidence, Observation, Proof


def ran(*parts: str, instead_of: tuple[str, ...] = ()) -> Evidence:
    """Each of `parts` is in the name of a kernel or operator that ran, and none of `instead_of` is."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        names = [*seen.kernels, *seen.ops]
        found = {part: next((name for name in names if part in name), None) for part in parts}
        missing = [part for part, name in found.items() if name is None]
        other = [name for part in instead_of for name in names if part in name]
        if missing:
            return Proof(False, f"no kernel or operator named {', '.join(missing)} ran")
        if other:
            return Proof(False, f"{other[0]} still ran")
        return Proof(True, f"ran {', '.join(str(name)[:80] for name in found.values())}")

    return evidence


def matmuls_in(dtype: str) -> Evidence:
    """Matrix products took their inputs in `dtype`."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        listed = ", ".join(sorted(seen.matmul_dtypes)) or "none seen"
        return Proof(dtype in seen.matmul_dtypes, f"matmul inputs were {listed}")

    return evidence


def weights_in(dtype: str) -> Evidence:
    """All weights are kept in `dtype`."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        return Proof(seen.weight_dtypes == {dtype}, f"weights are {', '.join(sorted(seen.weight_dtypes))}")

    return evidence
