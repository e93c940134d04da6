"""Common pieces of evidence that a technique took effect.

Each looks at what ran in the observed steps, never at what was asked for, and each can fail.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rush.recipe import Knob
from rush.techniques.api.contract import Evidence, Observation, Proof, Use
from rush.techniques.api.facts import CompileCounts

# The softmax of plain attention, as an operator or in a fused kernel's name; not the loss's.
# (The compiler's prepare_softmax_online may be either.)
_ATTENTION_SOFTMAX = re.compile(r"^(?:aten::|triton_).*(?<!log_)(?<!prepare_)softmax")


def ran(*parts: str) -> Evidence:
    """Each of `parts` occurs in the name of a kernel or operator that ran."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        return _all_ran(parts, [*seen.kernels, *seen.ops])

    evidence.__doc__ = f"In the profile: {_listed(parts)}."
    return evidence


def attention_ran(kernels: tuple[str, ...], ops: tuple[str, ...]) -> Evidence:
    """The attention `kernels` ran (on a CPU: the `ops`), and plain attention's softmax did not."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        names = [*seen.kernels, *seen.ops]
        if plain := next((name for name in names if _ATTENTION_SOFTMAX.search(name)), None):
            return Proof(False, f"{plain[:80]} still ran")
        return _all_ran(kernels, list(seen.kernels)) if seen.kernels else _all_ran(ops, list(seen.ops))

    evidence.__doc__ = f"In the profile: {_listed(kernels)} on a GPU, {_listed(ops)} on a CPU, and no softmax of plain attention."
    return evidence


def _listed(parts: tuple[str, ...]) -> str:
    return " and ".join(f"`{part}`" for part in parts)


def _all_ran(parts: tuple[str, ...], names: list[str]) -> Proof:
    found = {part: next((name for name in names if part in name), None) for part in parts}
    if missing := [part for part, name in found.items() if name is None]:
        return Proof(False, f"nothing named {', '.join(missing)} ran")
    return Proof(True, f"ran {', '.join(str(name)[:80] for name in found.values())}")


def matmuls_in(dtype: str, weights: str) -> Evidence:
    """Matmuls took inputs in `dtype`, none in float32, and the weights are in `weights`."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        held = matmuls_took(seen, dtype) and seen.weight_dtypes == {weights}
        return Proof(held, f"{describe_dtypes(seen)}; weights are {', '.join(sorted(seen.weight_dtypes))}")

    evidence.__doc__ = f"All matmuls took their inputs in {dtype}, and the weights are {weights}."
    return evidence


def matmuls_took(seen: Observation, dtype: str) -> bool:
    """Whether matmuls took inputs in `dtype`, or in fp8, and none in another dtype.

    float64 is ignored: kernels interpreted on a CPU may use it.
    """
    others = seen.matmul_dtypes & ({"float32", "float16", "bfloat16"} - {dtype})
    found = any(name == dtype or name.startswith("float8") for name in seen.matmul_dtypes)
    return found and not others


def describe_dtypes(seen: Observation) -> str:
    listed = ", ".join(sorted(seen.matmul_dtypes)) or "not seen"
    eager = " (in an eager step without CUDA graph)"
    return f"matmul inputs were {listed}{eager if seen.eager_step else ''}"


def state_per_parameter(seen: Observation) -> float:
    """Bytes of optimizer state per parameter."""
    return sum(seen.state_bytes.values()) / seen.num_parameters


def head_rows(seen: Observation) -> int:
    """The most tokens that one LM head matmul covered; 0 where none was seen."""
    rows, widths, hidden = [0], seen.head_widths, seen.shape.hidden
    for shape in seen.matmul_shapes:
        if widths.intersection(shape):
            # The three dims are vocabulary, hidden size and tokens, in some order.
            rest = sorted(shape, key=lambda size: size not in widths)[1:]
            if hidden in rest:
                rest.remove(hidden)
            rows.append(max(rest))
    return max(rows)


def read_back(knob: str, what: str, read: Callable[[Observation], Iterable[Knob]]) -> Evidence:
    """`read` gives the value in force of each module, tensor or call; all must have the one that was asked for."""

    def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
        found = set(read(seen))
        return Proof(found == {knobs[knob]}, f"{what}: {', '.join(map(str, found)) or 'none seen'}")

    evidence.__doc__ = f"{what[0].upper()}{what[1:]}."
    return evidence


def prove_use(use: Use, seen: Observation) -> Proof:
    """The proof of a technique: its own evidence, and that of the value of every knob."""
    technique, knobs = use.technique, use.knobs
    proof = technique.evidence(seen, knobs)
    holds, said = proof.took_effect, [proof.what]
    for name, knob in technique.knobs.items():
        if knob.evidence is technique.evidence:
            continue
        found = Proof(False, "nothing shows it") if knob.evidence is None else knob.evidence(seen, knobs)
        holds &= found.took_effect
        said.append(f"{name} = {knobs[name]}{'' if found.took_effect else ' not seen'}: {found.what}")
    return Proof(holds, "; ".join(said))


def prove(uses: Iterable[Use], seen: Observation) -> dict[str, Proof]:
    """The proof of every technique in use; a rank without the LM head leaves out those of the head."""
    return {
        use.technique.name: prove_use(use, seen)
        for use in uses
        if seen.holds_head or not use.technique.head_only
    }


def evidence_rows(uses: Iterable[Use], seen: Observation) -> list[dict[str, Any]]:
    """The proofs as they are recorded."""
    return [
        {"technique": name, "took_effect": proof.took_effect, "what": proof.what}
        for name, proof in prove(uses, seen).items()
    ]


def compile_counts() -> CompileCounts:
    """Graphs, graph breaks and recompiles of this process so far."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return CompileCounts()
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    return CompileCounts(
        graphs=int(counters["stats"]["unique_graphs"]),
        graph_breaks=int(sum(counters["graph_break"].values())),
        recompiles=sum(max(0, times - 1) for times in FRAME_COMPILE_COUNTER.values()),
    )
