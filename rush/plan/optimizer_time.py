"""Time of the update and of kernel launches: the parts of a step that do not grow with its tokens."""

from __future__ import annotations

from rush.plan.efficiencies import Efficiencies
from rush.plan.spec import Spec, block_matrices, weights_of
from rush.plan.target import TargetMachine

KERNEL_S = 0.65e-6
"""Device overhead per operation of an update."""
UPDATE_LAUNCH = 0.85
"""Launch time of an update's operation relative to one of a pass: no module, no autograd, but no views. Measured."""
THIN = 33
"""Launches of a compiled block's adapters: 4 and 7 matmuls forward; 7, 7, 4 and 4 backward."""


def trained_weights(spec: Spec) -> float:
    """Trained weights of the whole model."""
    weights, blocks = weights_of(spec), spec.shape.num_layers
    if spec.effects.factor("frozen"):
        return blocks * weights.adapters
    return blocks * (weights.block_linear + weights.block_other) + weights.embedding + weights.head


def update_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> tuple[float, float]:
    """Device and launch seconds of an update."""
    effects, blocks = spec.effects, spec.shape.num_layers
    tensors = 14 * blocks
    if not effects.factor("frozen"):
        tensors = blocks * weights_of(spec).block_tensors + 4
    trained = trained_weights(spec) / (spec.size("tp") * spec.size("pp") * spec.shards)
    each = effects.size("parameters", 4) if not effects.factor("master") else 4
    work, launches = spec.work, spec.work.number("update.launches", 10)
    if moved := work.number("update.bytes"):
        reached = work.number("update.efficiency", efficiency.update)
        seconds = (moved * each + work.number("update.extra_bytes")) / reached
    else:
        seconds = 24 * each / efficiency.eager_update
    if effects.factor("master"):
        seconds, launches = seconds + 12, launches + 2
    operations = tensors / spec.size("pp") * launches
    return (
        trained * seconds / target.bytes_per_s
        + (operations * KERNEL_S if target.kind == "cuda" else 0.0)
        + iteration_time(spec, target, efficiency),
        operations * UPDATE_LAUNCH * efficiency.launch_s,
    )


def iteration_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """Seconds of Newton–Schulz iterations: each multiplies a matrix by its transpose, that by itself, and the result by the matrix.
    Ranks of fsdp share the matrices; replicas repeat the work."""
    iterations = spec.work.number("update.iterations")
    if not iterations:
        return 0.0
    flops = 0.0
    for stored, columns in block_matrices(spec.shape):
        # Queries, keys and values that are stored as one are iterated one by one.
        joined = spec.shape.joined_qkv and stored == sum(spec.shape.qkv_rows)
        for rows in spec.shape.qkv_rows if joined else (stored,):
            short, long = min(rows, columns), max(rows, columns)
            flops += 2 * (2 * short * short * long + short**3)
    dtype = "bfloat16" if target.kind == "cuda" else "float32"
    rate = target.rate(dtype) * efficiency.matmul.get(dtype, 1.0)
    return iterations * flops * spec.shape.num_layers / (spec.size("pp") * spec.shards) / rate


def launches(spec: Spec) -> float:
    """Operator calls per pass; those of eager blocks as counted on a CPU, including views."""
    work, shape = spec.work, spec.shape
    llama = shape.norm == "rms"  # with a gated MLP; GPT-2's blocks have fewer operators
    norms = 2 * shape.norms_before + 2 * shape.norms_after + 2 * (shape.qk_norm != "none")
    if whole := work.number("launches.pass"):
        return whole
    each = work.number("launches.block") * (1 + 0.5 * work.number("attention.recomputed"))
    if each:
        each += THIN if spec.effects.factor("frozen") else 0
    else:
        each = 227.0 if llama else 100.0
        each += (40 if llama else 55) if not work.number("attention") else 0
        if spec.effects.size("casts", 0):
            each += 34 if llama else 22
        elif spec.effects.size("stream", 4) == 2:
            each += 16 if llama else 0  # norms compute in fp32
        each += 22 * (norms - 2) if llama else 0
        each -= 22 * norms * work.number("norms.fused") if llama else 0
        each -= 32 * work.number("rope.fused") if llama else 0
        each *= 1.6 if work.number("blocks.recomputed") else 1.0
        each += (140 if llama else 88) if spec.effects.factor("frozen") else 0
    each += work.number("launches.extra")
    layers = 7 if llama else 4
    dequantized = layers * 2 + (layers - 1) * (work.number("blocks.recomputed") > 0)
    each += work.number("dequantize.launches") * dequantized
    return (80 if llama else 57) + each * spec.shape.num_layers / spec.size("pp")
