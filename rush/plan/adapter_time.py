"""Time of a frozen base and its adapters: thin matmuls, and dequantized weights.

A matmul with a dim of 16 is bound by reading and writing its wide operand. And a quantized weight is dequantized for
every matmul that needs it: forward, backward, and recomputation.
"""

from __future__ import annotations

from collections import Counter

from rush.plan.efficiencies import Efficiencies
from rush.plan.spec import Spec, Weights, adapted_weights, adapter_settings
from rush.plan.target import TargetMachine

SHARED = {"k": "q", "v": "q", "mlp_up": "mlp_gate"}
"""Layers that share their input with another layer."""


def recomputed_share(spec: Spec, weights: Weights) -> float:
    """Fraction of a block's matmuls that is recomputed: never the last one, whose output is not needed."""
    again = spec.work.number("blocks.recomputed")
    return again if again < 1 else 1 - spec.shape.hidden * spec.shape.intermediate / weights.block_linear


def concatenated_a_bytes(spec: Spec) -> float:
    """Bytes of one block's concatenated matrices A: layers with one input share a matmul, which saves them."""
    found = adapter_settings(spec)
    if found is None:
        return 0.0
    rank, layers = found[0], adapted_weights(spec.shape, found[1])
    groups = Counter(SHARED.get(layer.role, layer.role) for layer in layers)
    numbers = sum(rank * layer.dims[1] for layer in layers if groups[SHARED.get(layer.role, layer.role)] > 1)
    return spec.effects.size("compute", 4) * numbers


def adapters_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies, weights: Weights) -> float:
    """Seconds of one block's thin matmuls, bound by bandwidth.

    Forward the input of each group of layers is read, and each output read and written. Backward the output's gradient is
    read for both matrices, the input for the gradient of A, and the input's gradient is accumulated.
    """
    found = adapter_settings(spec)
    if found is None:
        return 0.0
    rank, layers = found[0], adapted_weights(spec.shape, found[1])
    inputs = {SHARED.get(layer.role, layer.role): layer.dims[1] for layer in layers}
    wide_in, wide_out = sum(inputs.values()), sum(layer.dims[0] for layer in layers)
    forward = wide_in + 2 * wide_out
    backward = 2 * wide_out + wide_in + 2 * wide_in
    thin = 2 * rank * len(layers)
    numbers = (1 + recomputed_share(spec, weights)) * (forward + thin) + backward + 2 * thin
    moved = spec.effects.size("compute", 4) * spec.tokens * numbers / spec.size("tp")
    return moved / (target.bytes_per_s * efficiency.fused)


def dequantize_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies, weights: Weights) -> float:
    """Seconds to dequantize one block's weights, for every matmul that needs them."""
    quantized = spec.effects.size("blocks", 4)
    if quantized >= 2:
        return 0.0
    moved = (quantized + spec.effects.size("compute", 4)) * weights.block_linear / spec.size("tp")
    reached = spec.work.number("dequantize.efficiency", efficiency.eager)
    return (2 + recomputed_share(spec, weights)) * moved / (target.bytes_per_s * reached)
