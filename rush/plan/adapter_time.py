"""What a frozen base and its adapters add to a block's time: thin products, and codes that are unpacked.

A product with a side of 16 is no arithmetic: it takes what reading and writing its wide side takes. And a weight kept in
codes is written out for every product that needs it: forward, backward, and where the block is computed again.
"""

from __future__ import annotations

from collections import Counter

from rush.plan.efficiencies import Efficiencies
from rush.plan.spec import Spec, Weights, adapted, adapting
from rush.plan.target import TargetMachine

SHARED = {"k": "q", "v": "q", "mlp_up": "mlp_gate"}
"""Layers that have their input from the layer named: it is read once for all of them."""


def recomputed_share(spec: Spec, weights: Weights) -> float:
    """The share of a block's products that its backward pass makes again: of all, not the last one's, whose result nobody
    needs again."""
    again = spec.work.number("blocks.recomputed")
    return again if again < 1 else 1 - spec.shape.hidden * spec.shape.intermediate / weights.block_linear


def joined(spec: Spec) -> float:
    """Bytes of one block's matrices A that lie beside the adapters' own: of layers with one input they are joined for one
    product, and kept for its backward pass."""
    found = adapting(spec)
    if found is None:
        return 0.0
    rank, layers = found[0], adapted(spec.shape, found[1])
    groups = Counter(SHARED.get(layer.role, layer.role) for layer in layers)
    numbers = sum(rank * layer.dims[1] for layer in layers if groups[SHARED.get(layer.role, layer.role)] > 1)
    return spec.effects.size("compute", 4) * numbers


def adapters_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies, weights: Weights) -> float:
    """Seconds of one block's thin products, bound by what they move.

    Forward the input of each group of layers is read, and the adapter's part added to each output, which is read and
    written. Backward the output's gradient is read for both factors' sides, the input for the gradient of A, and the
    input's gradient is added to.
    """
    found = adapting(spec)
    if found is None:
        return 0.0
    rank, layers = found[0], adapted(spec.shape, found[1])
    inputs = {SHARED.get(layer.role, layer.role): layer.dims[1] for layer in layers}
    wide_in, wide_out = sum(inputs.values()), sum(layer.dims[0] for layer in layers)
    forward = wide_in + 2 * wide_out
    backward = 2 * wide_out + wide_in + 2 * wide_in
    thin = 2 * rank * len(layers)
    numbers = (1 + recomputed_share(spec, weights)) * (forward + thin) + backward + 2 * thin
    moved = spec.effects.size("compute", 4) * spec.tokens * numbers / spec.size("tp")
    return moved / (target.bytes_per_s * efficiency.fused)


def dequantize_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies, weights: Weights) -> float:
    """Seconds in which one block's codes are read and its weights written, each time that a product needs them."""
    codes = spec.effects.size("blocks", 4)
    if codes >= 2:
        return 0.0
    moved = (codes + spec.effects.size("compute", 4)) * weights.block_linear / spec.size("tp")
    reached = spec.work.number("dequantize.efficiency", efficiency.eager)
    return (2 + recomputed_share(spec, weights)) * moved / (target.bytes_per_s * reached)
