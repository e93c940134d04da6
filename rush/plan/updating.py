"""The update of the weights, and what a host launches: the part of a step's time that does not grow with its tokens."""

from __future__ import annotations

from rush.plan.efficiency import Efficiency
from rush.plan.spec import Spec, weights_of
from rush.plan.target import Target

KERNEL_S = 0.5e-6
"""Of each operation of an update on the device, besides its bytes: its start and its end, when most units have nothing to do."""


def update_time(spec: Spec, target: Target, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds of an update on the device, and of launching it."""
    weights = weights_of(spec)
    effects, blocks = spec.effects, spec.shape.num_layers
    trained: float
    if effects.factor("frozen"):
        trained, tensors = blocks * weights.adapters, 14 * blocks
    else:
        trained = blocks * (weights.block_linear + weights.block_other) + weights.embedding + weights.head
        tensors = blocks * (9 if spec.shape.family == "llama" else 12) + 4
    trained /= spec.size("tp") * spec.size("pp") * spec.shards
    each = effects.size("parameters", 4) if not effects.factor("master") else 4
    work, launches = spec.work, spec.work.number("update.launches", 13)
    if moved := work.number("update.bytes"):
        reached = work.number("update.reaches", efficiency.update)
        seconds = (moved * each + work.number("update.more")) / reached
    else:
        seconds = 24 * each / efficiency.eager_update
    if effects.factor("master"):
        seconds, launches = seconds + 12, launches + 3
    operations = tensors / spec.size("pp") * launches if target.kind == "cuda" else 0.0
    return (
        trained * seconds / target.bytes_per_s + operations * KERNEL_S,
        operations * 0.45 * efficiency.launch_s,
    )


def launches(spec: Spec) -> float:
    """Operations that the host launches for one pass."""
    work, llama = spec.work, spec.shape.family == "llama"
    if whole := work.number("launches.pass"):
        return whole
    each = work.number("launches.block") * (1 + 0.5 * work.number("attention.again"))
    if not each:
        each = 160.0 if llama else 80.0
        each += (44 if llama else 20) if spec.effects.size("casts", 0) else 0
        each -= 60 * work.number("norms.fused") if llama else 0
        each -= 45 * work.number("rotations.fused") if llama else 0
        each *= 1.33 if work.number("elementwise.again") else 1.0
        each += 20 if spec.effects.factor("frozen") else 0
    return 40 + each * spec.shape.num_layers / spec.size("pp")
