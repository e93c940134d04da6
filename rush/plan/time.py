"""Time of a step, by part.

Matmuls take their FLOPs over the rate of a large matmul; attention its FLOPs over its kernel's rate (plain attention:
the bytes of the scores); everything else its bytes over the copy rate. Bytes are counted from the code, operation by
operation: eager operations read and write memory each time, compiled and fused ones once for a chain. The host
launches eager operations one by one, and if that takes longer than computing them, the step is host-bound.
Communication counts where it does not overlap. `rush/plan/efficiencies.py` holds the few fitted numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rush.models import flops_per_token
from rush.plan.adapter_time import adapters_time, dequantize_time, recomputed_share
from rush.plan.attention_time import attention_time, ring_time
from rush.plan.communication import STRAGGLING, CommunicationTime, communication_per_pass, communication_time
from rush.plan.efficiencies import DEFAULT, Efficiencies
from rush.plan.memory import offloaded_bytes
from rush.plan.model_state import PipelineStage, RankState
from rush.plan.optimizer_time import launches, trained_weights, update_time
from rush.plan.spec import Spec, Weights, weights_of
from rush.plan.spec import matmul_dtype as matmul_dtype
from rush.plan.target import TargetMachine

PCIE_BYTES_PER_S = 55e9
"""Pinned copies between host and device, measured on the H200s' PCIe 5; less where PCIe is the link between devices."""
DATA_S_PER_TOKEN = 80e-9
"""Host time to prepare a batch without worker threads: 60 to 95 ns per token in runs and ladders on an H200's host, from
tokenized shards on a local disk."""
BACKWARD = 2 / 3
"""Backward fraction of a pass, with which once-per-step communication overlaps."""
HOST_BYTES_PER_S = 60e9
"""Memory bandwidth of an update on the host; an assumption."""
UNALIGNED = {"float16": 0.17, "bfloat16": 0.17, "tf32": 0.32}
"""Efficiency of a matmul whose rows are not aligned to 16 bytes: GPT-2's LM head with a vocabulary of 50,257."""
BIAS_GRAD = 0.15
"""Efficiency of eager 16-bit bias gradients (sums over all tokens) relative to the copy rate, from three profiles of GPT-2."""
SOFT_MAX = 8
"""Exponent of the soft maximum of host and device time: where both are equal, a step takes 9 % more than either. (Measured: 5 to
20 %, GPT-2 compiled by blocks, Llama eager.)"""
FULL_UNIT = 64
"""A matmul whose smallest dim is k reaches k / (k + 64) of a large one's rate."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one device."""

    parts: Mapping[str, float]
    host: float
    """Seconds of launches and data; the excess over the device time is the part `launching`."""

    @property
    def step(self) -> float:
        return sum(self.parts.values())


def time_of(spec: Spec, target: TargetMachine, efficiency: Efficiencies = DEFAULT) -> StepTime:
    """Time of one step."""
    if target.launch_s:
        efficiency = replace(efficiency, launch_s=efficiency.launching * target.launch_s)
    depth = spec.size("pp")
    passes = spec.passes
    one = _pass_parts(spec, target, efficiency)
    parts = {name: seconds * passes for name, seconds in one.items()}
    parts["elementwise"] += _accumulation(spec, target, efficiency)
    computing = sum(parts.values())
    sent = communication_time(spec, target, efficiency.link)
    servers = max(1, -(-spec.world // target.devices_per_node))
    parts["communication"] = _exposed(sent, computing, passes, efficiency.contention) + (
        STRAGGLING * math.log2(servers) * computing
    )
    # Several stages per rank shorten the bubble; zero bubble schedules fill most of the rest.
    idle = (depth - 1) / passes / spec.stages
    idle *= 1 / 3 if str(spec.knob("pp", "schedule", "1f1b")) in ("zero_bubble", "zbv") else 1
    parts["bubble"] = idle * (computing + communication_per_pass(spec, target, efficiency.link).waiting)
    update, update_host = update_time(spec, target, efficiency)
    if spec.effects.factor("on_host"):
        # Weights cross PCIe for each all-gather, gradients after each pass; the update runs at host memory bandwidth.
        held = RankState(
            spec, PipelineStage(-(-spec.shape.num_layers // depth), True, True, 1), weights_of(spec)
        )
        whole = held.parameters / spec.shards
        learned = spec.effects.size("gradients", 4) * held.trained() / spec.shards
        parts["offload"] = passes * (2 * whole + learned) / _to_host(target)
        still = whole if spec.effects.factor("frozen") else 0.0
        # The ranks of a node share its memory bandwidth.
        sharing = min(spec.world, target.devices_per_node)
        update = 2 * sharing * (held.on_host() - still) / HOST_BYTES_PER_S
    parts["optimizer"] = update
    data = 0.0 if spec.work.number("data.workers") else DATA_S_PER_TOKEN * spec.tokens * passes
    device = sum(parts.values())
    host = data
    if target.kind == "cuda":
        launching = passes * launches(spec) * efficiency.launch_s
        host += launching + update_host
        if spec.work.number("update.launches", 10) > 1:
            # Only a fused update can skip a step on the device. For others the host waits for the loss before it launches
            # them; the rest of the update overlaps with the launches of the next pass.
            left = max(0.0, update - update_host)
            together = overlapped(launching, left + device - update) + update_host
            parts["launching"] = max(0.0, together - device)
        else:
            parts["launching"] = overlapped(launching + update_host, device) - device
        # Batches are prepared while the device computes.
        data = max(0.0, data - max(0.0, device - launching - update_host))
    elif target.launch_s:
        # On a CPU launches and compute do not overlap.
        parts["launching"] = passes * launches(spec) * efficiency.launch_s + update_host
    parts["data"] = data
    if target.kind == "cuda":
        parts["other"] = efficiency.step_s + efficiency.block_s * passes * spec.shape.num_layers / depth
    return StepTime({name: seconds for name, seconds in parts.items() if seconds}, host)


def overlapped(host: float, device: float) -> float:
    """Soft maximum of host and device seconds: each waits for the other now and then."""
    longer, shorter = max(host, device), min(host, device)
    return longer * (1 + (shorter / longer) ** SOFT_MAX) ** (1 / SOFT_MAX) if longer else 0.0


def _to_host(target: TargetMachine) -> float:
    """Bytes per second over PCIe."""
    return min(PCIE_BYTES_PER_S, target.link_bytes_per_s)


def _pass_parts(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> dict[str, float]:
    """Seconds of one pass (forward, backward, recomputation) on one rank, by part."""
    weights = weights_of(spec)
    depth = spec.size("pp")
    blocks = spec.shape.num_layers / depth * _imbalance(spec, weights)
    parts = {
        "matmul": _matmul(spec, target, efficiency, weights, blocks),
        "attention": blocks
        * (attention_time(spec, target, efficiency) + ring_time(spec, target, efficiency)),
        "elementwise": blocks
        * (_elementwise(spec, target, efficiency) + dequantize_time(spec, target, efficiency, weights))
        + _casts(spec, target, efficiency, weights, blocks),
        "loss": _loss(spec, target, efficiency) / spec.size("pp"),
        "embedding": _embedding(spec, target, efficiency),
    }
    if spec.reference:
        # One more forward pass: 2 FLOPs per weight where training has 6, or 4 with frozen weights.
        parts = {
            name: seconds * (4 / 3 if name != "matmul" or not spec.effects.factor("frozen") else 3 / 2)
            for name, seconds in parts.items()
            if name != "embedding"
        } | {"embedding": parts["embedding"]}
    if spec.work.number("offloaded") or spec.work.number("inputs.offloaded"):
        # Over PCIe, both ways, without overlap: measured.
        parts["offload"] = 2 * offloaded_bytes(spec, blocks) / _to_host(target)
    return parts


def _imbalance(spec: Spec, weights: Weights) -> float:
    """Longest stage of a pipeline relative to the mean: blocks are not split, and the LM head counts as some."""
    head = spec.shape.vocab_size * spec.shape.hidden / weights.block_linear
    share = (spec.shape.num_layers + head) / spec.size("pp")
    return math.ceil(share) / share if spec.size("pp") > 1 else 1.0


def _filled(side: float) -> float:
    return side / (side + FULL_UNIT)


def _matmul(
    spec: Spec, target: TargetMachine, efficiency: Efficiencies, weights: Weights, blocks: float
) -> float:
    shape, tp, tokens = spec.shape, spec.size("tp"), spec.tokens
    dtype = matmul_dtype(spec)
    flops = 4.0 if spec.effects.factor("frozen") else 6.0
    again = 2 * recomputed_share(spec, weights)
    inside = spec.work.name("blocks.dtype", dtype)
    narrow = min(shape.hidden, shape.intermediate / tp, shape.num_heads * shape.head_dim / tp, tokens)
    rate = target.rate(inside) * efficiency.matmul.get(inside, 1.0) * _filled(narrow)
    block = tokens * weights.block_linear / tp * (flops + again) / rate
    adapters = adapters_time(spec, target, efficiency, weights)
    head_flops = flops + spec.work.number("head.recomputed")
    # An unaligned vocabulary runs on the slow path, or is padded by a compiler.
    aligned = spec.work.number("head.unaligned", UNALIGNED.get(dtype, 1.0)) if shape.vocab_size % 8 else 1.0
    of_head = spec.work.name("head.dtype", dtype)
    head_rate = target.rate(of_head) * efficiency.matmul.get(of_head, 1.0)
    head_rate *= aligned * _filled(min(shape.hidden, tokens))
    head = tokens * shape.vocab_size * shape.hidden / tp * head_flops / head_rate / spec.size("pp")
    return blocks * (block + adapters) + head


def _elementwise(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """One block's norms, RoPE, activations, residual adds and casts: bytes over the rate of eager or fused operations."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    query, key = shape.num_heads * shape.head_dim / tp, shape.num_kv_heads * shape.head_dim / tp
    rotated = query + key if shape.has_rope else 0.0
    wide, hidden = shape.intermediate / tp, shape.hidden / tp
    work, llama = spec.work, shape.norm == "rms"
    compiled = work.number("stream.fused")
    eager_bytes = fused_bytes = summed_bytes = 0.0
    # Gradients of biases, and of weights and biases of norms: sums over all tokens.
    biases = (1 - work.number("bias_grad.fused")) * compute * (5 * hidden + wide)
    sums = (
        biases + 4 * stream * hidden if shape.all_biases else compute * (query + 2 * key) * shape.qkv_biases
    )
    sums = 0.0 if effects.factor("frozen") else sums
    # Norms that Llama does not have.
    extra = (query + key if shape.qk_norm != "none" else 0.0) + (
        2 * shape.norms_after + 2 * shape.norms_before - 2
    ) * hidden
    # Two norms: some twenty fp32 reads and writes each; GPT-2's are one kernel.
    if work.number("norms.fused") or (compiled and not llama):
        fused_bytes += (3 * stream + 2 * compute) * (2 * hidden + extra)
    else:
        eager_bytes += 96 * (2 * hidden + extra) if llama else 10 * stream * hidden
    if work.number("rope.fused"):
        fused_bytes += 4 * compute * rotated
    else:
        eager_bytes += 124 * rotated
    if work.number("mlp.fused"):
        fused_bytes += (8 if shape.gated_mlp else 5) * compute * wide
    else:
        eager_bytes += (14 if shape.gated_mlp else 5) * compute * wide
    if compiled:
        fused_bytes += (6 * stream + 7 * compute) * hidden + sums
    elif llama:
        cast = 60 if stream != compute and effects.factor("norm.copies") else 0
        eager_bytes += (2 * (2 * stream + compute) + 9 * compute + 6 * stream + cast) * hidden
        summed_bytes += sums
    else:
        # Residual adds, forward and backward, splitting queries, keys and values, casts before and after layers.
        eager_bytes += (
            10 * stream + 8 * compute + (6 * (stream + compute) if stream != compute else 0)
        ) * hidden
        summed_bytes += sums
    if (
        effects.factor("heads.repeated")
        and work.number("attention")
        and shape.num_kv_heads != shape.num_heads
    ):
        fused_bytes += 4 * compute * rotated
    if casts := work.number("blocks.casts"):
        inputs = 3 * shape.hidden + wide
        outputs = rotated + key + 2 * shape.hidden + 2 * wide
        fused_bytes += casts * (inputs + outputs) * (1 if compiled else 2)
    again = 1.0 + work.number("elementwise.recomputed")
    seconds = again * (eager_bytes / efficiency.eager + fused_bytes / efficiency.fused)
    seconds += summed_bytes / (BIAS_GRAD if compute == 2 else efficiency.fused)
    return spec.tokens * seconds / target.bytes_per_s


def _accumulation(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """Gradient accumulation: from the second pass on (two reads, one write). A captured graph zeroes static gradients and
    accumulates from the first pass on."""
    static = bool(spec.effects.factor("cuda_graph.gradients"))
    times = 3 * (spec.passes - (0 if static else 1)) + (1 if static else 0)
    parts = 1 if spec.effects.factor("unsharded_gradients") or spec.size("pp") > 1 else spec.shards
    count = trained_weights(spec) / (spec.size("tp") * spec.size("pp") * parts)
    return times * spec.effects.size("gradients", 4) * count / (target.bytes_per_s * efficiency.fused)


def _casts(
    spec: Spec, target: TargetMachine, efficiency: Efficiencies, weights: Weights, blocks: float
) -> float:
    """Autocast casts weights in every pass, and their gradients back."""
    if not spec.effects.size("casts", 0):
        return 0.0
    moved = 6 if spec.effects.factor("frozen") else 12
    count = (
        blocks * weights.block_linear + spec.shape.vocab_size * spec.shape.hidden / spec.size("pp")
    ) / spec.size("tp")
    return moved * count / (target.bytes_per_s * efficiency.fused)


def _loss(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """Log-softmax, its gradient and the casts between them, over tokens × vocabulary."""
    # Generated kernels cannot vectorize unaligned rows.
    compiled = 18.0 if spec.shape.vocab_size % 8 else 11.0
    each = spec.work.number("loss.bytes", 32.0 if spec.effects.factor("logits.copies") else compiled)
    moved = each * spec.tokens * spec.shape.vocab_size / spec.size("tp")
    return moved / (target.bytes_per_s * efficiency.loss)


def _embedding(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """The gradient of the embedding: zeroed, written, added to the LM head's."""
    if spec.effects.factor("frozen"):
        return 0.0
    each = spec.effects.size("gradients", 4)
    moved = 5.6 * each * spec.shape.vocab_size * spec.shape.hidden / spec.size("tp")
    return moved / target.bytes_per_s / spec.size("pp")


def _exposed(sent: CommunicationTime, computing: float, passes: int, contention: float) -> float:
    """Seconds of exposed communication, and the slowdown of compute by the overlapped rest."""
    late = min(sent.late, 0.9 * BACKWARD * computing / passes)
    behind = min(sent.behind, 0.9 * computing - late)
    return sent.waiting + (sent.late - late) + (sent.behind - behind) + contention * (late + behind)


def tokens_per_s(spec: Spec, time: StepTime) -> float:
    """Tokens per second of all devices together."""
    return spec.step_tokens / time.step


def model_flops_per_token(spec: Spec) -> int:
    return flops_per_token(spec.shape, spec.sequence, frozen=bool(spec.effects.factor("frozen")))
