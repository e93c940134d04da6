"""What shows that `fp8` took effect: fp8 matmuls and casts, and the arguments they were called with."""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import describe_dtypes
from rush.techniques.api.seams import rush_kernels_ran
from rush.techniques.kernels.fused_loss import FusedLossHead

SWIGLU = tuple(f"fp8_swiglu{step}" for step in ("_amax", "", "_bound", "_backward"))
"""Kernels of the fused MLP; its operators have the same names."""
E5M2 = 23
"""torch's number of that dtype."""
MATMUL, EMULATED, CAST = "aten::_scaled_mm", "rush::fp8_emulated_matmul", "rush::fp8_cast_transpose"
FAST = {MATMUL: 7, EMULATED: -1}
"""Which argument asks for fast accumulation. Compiled code calls the variant with `out`, which comes after it."""


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Matmuls took fp8 inputs (or fp8 kernels of a compiled graph ran); on a CPU the emulation
    `rush::fp8_emulated_matmul` ran, which proves the arithmetic and nothing about speed. With `fused_loss` and an fp8 LM
    head also the kernel `fp8_logits_gradient`."""
    proofs = [_matmuls_ran(seen)]
    if knobs["scope"] != "blocks" and seen.facts.noted(FusedLossHead) is not None:
        kernels = rush_kernels_ran(("fp8_logits_gradient_kernel",), ("rush::fp8_logits_gradient",))
        proofs.append(kernels(seen, knobs))
    return api.Proof(all(proof.took_effect for proof in proofs), "; ".join(proof.what for proof in proofs))


def _matmuls_ran(seen: api.Observation) -> api.Proof:
    if emulated := seen.ops.get("rush::fp8_emulated_matmul", 0):
        return api.Proof(
            not seen.kernels, f"emulated on a CPU: {emulated} matmuls of dequantized fp8 operands"
        )
    kernels = [name for name in seen.kernels if "e4m3" in name or "_scaled_mm" in name]
    eight_bits = any(dtype.startswith("float8") for dtype in seen.matmul_dtypes)
    return api.Proof(
        eight_bits or bool(kernels),
        describe_dtypes(seen) + (f"; ran {', '.join(kernels)[:120]}" if kernels else ""),
    )


def recipe_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The matmuls were called with one scale per operand, or with one per row."""
    scales = {call.shapes[2 if name == MATMUL else 1] for name, call in _matmuls(seen)}
    found = {"rowwise" if dims and max(dims) > 1 else "tensorwise" for dims in scales}
    return api.Proof(
        found == {knobs["recipe"]},
        f"shapes of the scales: {', '.join(str(dims) if dims else 'one number' for dims in sorted(scales)) or 'none seen'}",
    )


def scope_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The matmuls have the vocabulary as a dim, or not, or both, as the scope says."""
    found = {_is_head(seen, call) for _, call in _matmuls(seen)}
    wanted = {"blocks": {False}, "blocks_and_head": {False, True}, "head": {True}}[str(knobs["scope"])]
    if not seen.holds_head:  # a rank of a pipeline with the blocks only
        wanted = wanted - {True}
    named = {False: "blocks", True: "LM head"}
    return api.Proof(
        bool(found) and found == wanted,
        f"fp8 matmuls of the {' and the '.join(named[one] for one in sorted(found)) or 'model: none seen'}",
    )


def fast_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The blocks' matmuls were called with fast accumulation, all of them or one of three (the forward one)."""
    flags = [call.values[FAST[name]] for name, call in _matmuls(seen) if not _is_head(seen, call)]
    fast, slow = flags.count(True), flags.count(False)
    if not flags:  # the LM head alone: its gradients never use it
        heads = {call.values[FAST[name]] for name, call in _matmuls(seen)}
        return api.Proof(heads == {False, True} and knobs["fast"] == "forward", "the LM head's: forward only")
    return api.Proof(
        fast > 0 and (slow == 0) == (knobs["fast"] == "all"),
        f"{fast} kinds of the blocks' matmuls with fast accumulation, {slow} without",
    )


def casts_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The kernel that casts and transposes gradients ran, or plain operators did it (an LM head in `fused_loss` never
    uses it for gradients)."""
    # Gradients are e5m2, which no other operand is.
    ran = sum(n for call, n in seen.calls.get(CAST, {}).items() if E5M2 in call.values)
    fused = seen.facts.noted(FusedLossHead) is not None and knobs["scope"] == "head"
    return api.Proof(
        fused or (bool(seen.calls) and (ran > 0) == (knobs["casts"] == "kernel")),
        "the LM head in fused_loss casts by a kernel" if fused else f"{ran} casts of gradients by our kernel",
    )


def mlp_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Our kernels `fp8_swiglu…` ran, forward and backward (on a CPU the operators `rush::fp8_swiglu…`), or none did."""
    kernels = rush_kernels_ran(
        tuple(f"{name}_kernel" for name in SWIGLU), tuple(f"rush::{name}" for name in SWIGLU)
    )
    found = kernels(seen, knobs)
    some = any(part in name for part in SWIGLU for name in [*seen.kernels, *seen.ops])
    return api.Proof(
        found.took_effect if knobs["mlp"] == "kernel" else not some and bool(seen.calls),
        found.what if knobs["mlp"] == "kernel" or some else "SwiGLU is the model's own",
    )


def _matmuls(seen: api.Observation) -> list[tuple[str, api.Call]]:
    return [(name, call) for name in (MATMUL, EMULATED) for call in seen.calls.get(name, {})]


def _is_head(seen: api.Observation, call: api.Call) -> bool:
    """Whether a matmul is the LM head's: it has the vocabulary, as it is padded, as a dim."""
    return any(seen.head_widths.intersection(dims) for dims in call.shapes if len(dims) == 2)
