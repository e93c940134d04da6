"""How long a step takes, by part.

Matrix products take their arithmetic over the rate of a large product; attention its arithmetic over the rate its
kernel reaches (with the whole score matrix: the bytes of the scores); everything else the bytes it moves over the
rate of a copy. The bytes are counted from the code, operation by operation: eager ones read and write memory each
time, compiled and fused ones once for a chain. A host launches eager operations one by one, and where that takes longer
than computing them, it is what a step takes. What devices send each other counts as far as it does not hide.
`rush/plan/efficiency.py` holds the few numbers that are fitted to findings; everything else is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rush.models import flops_per_token
from rush.plan.communication import STRAGGLING, Sent, exchanged_width, sent_by, sent_in_passes
from rush.plan.efficiency import DEFAULT, Efficiency
from rush.plan.memory import block_tensors, memory_of
from rush.plan.spec import Spec, Weights, weights_of
from rush.plan.target import Target
from rush.plan.updating import launches, update_time

PCIE_BYTES_PER_S = 55e9
"""Between host and device: pinned copies as measured on the H200s' PCIe 5; less where PCIe is the link between devices."""
DATA_S_PER_TOKEN = 80e-9
"""What a host needs to make a batch, where no thread makes it ahead: 60 to 95 ns a token in runs and ladders on an H200's
host. (What each step needs besides is in `step_s`.) Tokenised shards on a local disk; a slower source is not counted."""
HOST_BYTES_PER_S = 60e9
"""What an update on the host reads and writes; an assumption."""
HALF = ("float16", "bfloat16")
ODD = {"float16": 0.17, "bfloat16": 0.17, "tf32": 0.32}
"""What a product reaches of its rate where its rows do not begin at whole 16 bytes: GPT-2's head of 50,257 words."""
FULL_PRECISION = 0.4
"""What is left of a kernel's share where no matrix unit helps it, of the rate of products that have none either: flex_attention
in fp32, the only one measured."""
FULL_UNIT = 64
"""A product whose shortest side is k reaches k / (k + 64) of a large one's rate: filling and emptying its pipeline."""


@dataclass(frozen=True)
class Time:
    """Seconds of one step on one device."""

    parts: Mapping[str, float]
    host: float
    """Seconds of launching, which the parts hide unless it is longer (then `launching` is a part)."""

    @property
    def step(self) -> float:
        return sum(self.parts.values())


def time_of(spec: Spec, target: Target, efficiency: Efficiency = DEFAULT) -> Time:
    """The time of one step, everything of it counted once."""
    if target.launch_s:
        efficiency = replace(efficiency, launch_s=efficiency.launching * target.launch_s)
    depth = spec.size("pp")
    passes = spec.passes
    one = _pass_parts(spec, target, efficiency)
    parts = {name: seconds * passes for name, seconds in one.items()}
    computing = sum(parts.values())
    sent = sent_by(spec, target, efficiency.link)
    servers = max(1, -(-spec.world // target.devices_per_node))
    parts["communication"] = _exposed(sent, computing, efficiency.contention) + (
        STRAGGLING * math.log2(servers) * computing
    )
    # Several stages a rank fill the pipeline in smaller portions; a backward pass cut in two fills most of the rest.
    idle = (depth - 1) / passes / spec.stages
    idle *= 1 / 3 if str(spec.knob("pp", "schedule", "1f1b")) in ("zero_bubble", "zbv") else 1
    parts["bubble"] = idle * (computing + sent_in_passes(spec, target, efficiency.link).waiting)
    update, update_host = update_time(spec, target, efficiency)
    if spec.effects.factor("on_host"):
        # Weights come over PCIe for each gather, gradients go back; the update runs at the rate of host memory.
        each = memory_of(spec).host_bytes
        parts["offload"] = (2 * passes + 1) * each / 3 / _to_host(target)
        update = each * 2 / HOST_BYTES_PER_S
    parts["optimizer"] = update
    data = 0.0 if spec.work.number("data.ahead") else DATA_S_PER_TOKEN * spec.tokens * passes
    device = sum(parts.values())
    host = data
    if target.kind == "cuda":
        launching = passes * launches(spec) * efficiency.launch_s
        host += launching + update_host
        if spec.work.number("update.launches", 10) > 1:
            # Only an update in one kernel can be told to hold back. For others the host waits for the loss before it launches
            # them; what the device has left of them then is done while the host launches the next pass.
            left = max(0.0, update - update_host)
            together = max(launching, left + device - update) + update_host
            parts["launching"] = max(0.0, together - device)
        else:
            parts["launching"] = max(0.0, launching + update_host - device)
        # Batches are made while the device works.
        data = max(0.0, data - max(0.0, device - launching - update_host))
    elif target.launch_s:
        # A processor that starts an operation computes none.
        parts["launching"] = passes * launches(spec) * efficiency.launch_s + update_host
    parts["data"] = data
    parts["other"] = efficiency.step_s if target.kind == "cuda" else 0.0
    return Time({name: seconds for name, seconds in parts.items() if seconds}, host)


def _to_host(target: Target) -> float:
    """Bytes per second over PCIe, at the 0.85 of it that an offloaded pass was seen to reach."""
    return 0.85 * min(PCIE_BYTES_PER_S, target.link_bytes_per_s)


def matmul_dtype(spec: Spec) -> str:
    """The dtype of the products outside 8-bit layers."""
    if spec.effects.size("compute", 4) == 2:
        half = spec.work.name("products.dtype", "bfloat16")
        return half if half in HALF else "bfloat16"
    return spec.work.name("products.dtype", "float32")


def _pass_parts(spec: Spec, target: Target, efficiency: Efficiency) -> dict[str, float]:
    """Seconds of one pass (forward, backward, what is computed again) on one rank, by part."""
    weights = weights_of(spec)
    depth = spec.size("pp")
    blocks = spec.shape.num_layers / depth * _uneven(spec, weights)
    tokens = spec.tokens
    parts = {
        "matmul": _matmul(spec, target, efficiency, weights, blocks),
        "attention": blocks * (_attention(spec, target, efficiency) + _ring(spec, target, efficiency)),
        "elementwise": blocks * _elementwise(spec, target, efficiency)
        + _casts(spec, target, efficiency, weights, blocks),
        "loss": _loss(spec, target, efficiency) / spec.size("pp"),
        "embedding": _embedding(spec, target, efficiency),
    }
    if spec.reference:
        # One more forward pass: 2 of the products where training makes 6, or 4 of frozen weights.
        parts = {
            name: seconds * (4 / 3 if name != "matmul" or not spec.effects.factor("frozen") else 3 / 2)
            for name, seconds in parts.items()
            if name != "embedding"
        } | {"embedding": parts["embedding"]}
    if spec.work.number("offloaded"):
        kept = block_tensors(spec, whole=True)
        # Over PCIe, there and back, at 0.85 of its rate, and not hidden: as measured.
        parts["offload"] = 2 * blocks * tokens * sum(kept.values()) / _to_host(target)
    return parts


def _uneven(spec: Spec, weights: Weights) -> float:
    """How much longer a pipeline's longest stage is than an even share: blocks are not cut, and the head counts as some."""
    head = spec.shape.vocab_size * spec.shape.hidden / weights.block_linear
    share = (spec.shape.num_layers + head) / spec.size("pp")
    return math.ceil(share) / share if spec.size("pp") > 1 else 1.0


def _full(side: float) -> float:
    return side / (side + FULL_UNIT)


def _matmul(spec: Spec, target: Target, efficiency: Efficiency, weights: Weights, blocks: float) -> float:
    shape, tp, tokens = spec.shape, spec.size("tp"), spec.tokens
    dtype = matmul_dtype(spec)
    products = 4.0 if spec.effects.factor("frozen") else 6.0
    again = 2 * spec.work.number("blocks.again")
    if again == 2:
        # All but the last layer's product, whose result nobody needs again.
        again *= 1 - shape.hidden * shape.intermediate / weights.block_linear
    inside = spec.work.name("blocks.dtype", dtype)
    narrow = min(shape.hidden, shape.intermediate / tp, shape.num_heads * shape.head_dim / tp, tokens)
    rate = target.rate(inside) * efficiency.matmul.get(inside, 1.0) * _full(narrow)
    block = tokens * weights.block_linear / tp * (products + again) / rate
    adapters = 6 * tokens * weights.adapters / tp / (target.rate(dtype) * 0.25)
    head_products = products + spec.work.number("head.again")
    # Tensor cores want rows of whole pieces: an odd vocabulary runs on the slow path, or is padded by a compiler.
    aligned = spec.work.number("head.odd", ODD.get(dtype, 1.0)) if shape.vocab_size % 8 else 1.0
    head_rate = (
        aligned * target.rate(dtype) * efficiency.matmul.get(dtype, 1.0) * _full(min(shape.hidden, tokens))
    )
    head = tokens * shape.vocab_size * shape.hidden / tp * head_products / head_rate / spec.size("pp")
    unpack = 0.0
    if spec.effects.size("blocks", 4) < 2:
        # Codes are read and 2-byte weights written, forward and backward.
        unpack = 2 * 4.5 * weights.block_linear / tp / (target.bytes_per_s * efficiency.eager)
    return blocks * (block + adapters + unpack) + head


def _attention(spec: Spec, target: Target, efficiency: Efficiency) -> float:
    """One block's attention. A causal query meets half the keys; plain attention multiplies with all of them."""
    shape, dtype, work = spec.shape, matmul_dtype(spec), spec.work
    reached = work.number("attention")
    width = shape.num_heads * shape.head_dim / spec.size("tp")
    causal = 6 * spec.tokens * width * spec.sequence
    if not reached:
        again = 1 + 0.33 * max(work.number("attention.again"), work.number("scores.again"))
        scores = spec.tokens * shape.num_heads / spec.size("tp") * spec.sequence
        moved = scores * (62 if dtype in ("float32", "tf32") else 65) / efficiency.eager
        if work.number("stream.fused"):
            moved = scores * 33 / efficiency.fused
        rate = target.rate(dtype) * efficiency.matmul.get(dtype, 1.0)
        return again * (2 * causal / rate + moved / target.bytes_per_s)
    again = 1 + 0.2 * work.number("attention.again")  # once more forward, where most arithmetic is backward
    if target.kind != "cuda":
        # Kernels' shares are of a GPU's matrix units. A CPU has none: there a kernel multiplies as products do.
        return again * causal / (target.rate(dtype) * efficiency.matmul.get(dtype, 1.0))
    reached = efficiency.attention.get(work.by["attention"], reached)
    gain = efficiency.wide_heads if shape.head_dim >= 128 else 1.0
    if dtype == "float32":
        gain *= FULL_PRECISION
    return again * causal / (target.rate(dtype) * reached * gain)


def _ring(spec: Spec, target: Target, efficiency: Efficiency) -> float:
    """One block's work besides attention where keys and values go round: with each part that comes, results are merged in
    fp32, keys and values laid together to be sent on, and backward all three gradients added up.

    Bytes as torch's ring attention moves them (torch.distributed.tensor.experimental, `_SDPAMerger` and
    `_templated_ring_attention_backward`), each operation by itself.
    """
    if spec.knob("cp", "exchange", "all_gather") != "ring":
        return 0.0
    results, sent = spec.shape.num_heads * spec.shape.head_dim / spec.size("tp"), exchanged_width(spec)
    forward, backward = 32 * results + 4 * sent, 12 * results + 24 * sent
    moved = (1 + spec.work.number("attention.again")) * forward + backward
    return (spec.size("cp") - 1) * spec.tokens * moved / (target.bytes_per_s * efficiency.eager)


def _elementwise(spec: Spec, target: Target, efficiency: Efficiency) -> float:
    """One block's norms, turns, activations, sums and casts: bytes over the rate of eager or of fused operations."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim / tp if shape.family == "llama" else 0.0
    wide, hidden = shape.intermediate / tp, shape.hidden / tp
    work, llama = spec.work, shape.family == "llama"
    compiled = work.number("stream.fused")
    eager_bytes = fused_bytes = 0.0
    # Two norms: in fp32, some twenty reads and writes each; GPT-2's are one kernel.
    if work.number("norms.fused") or not llama:
        fused_bytes += 2 * (3 * stream + 2 * compute) * hidden
    else:
        eager_bytes += 2 * 96 * hidden
    if work.number("rotations.fused"):
        fused_bytes += 4 * compute * turned
    else:
        eager_bytes += 124 * turned
    if work.number("mlp.fused"):
        fused_bytes += (8 if llama else 5) * compute * wide
    else:
        eager_bytes += (14 if llama else 6) * compute * wide
    cast = 60 if stream != compute and effects.factor("norm.copies") else 0
    if compiled:
        fused_bytes += (6 * stream + 7 * compute) * hidden
        # Sums over all tokens for the gradients of biases, and of gains and offsets of norms.
        fused_bytes += 0 if llama else compute * (5 * hidden + wide) + 2 * (stream + compute) * hidden
    else:
        eager_bytes += (2 * (2 * stream + compute) + 9 * compute + 6 * stream + cast) * hidden
    if (
        effects.factor("heads.repeated")
        and work.number("attention")
        and shape.num_kv_heads != shape.num_heads
    ):
        fused_bytes += 4 * compute * turned
    if casts := work.number("blocks.casts"):
        inputs = 3 * shape.hidden + wide
        outputs = turned + shape.num_kv_heads * shape.head_dim / tp + 2 * shape.hidden + 2 * wide
        fused_bytes += casts * (inputs + outputs) * (1 if compiled else 2)
    again = 1.0 + work.number("elementwise.again")
    seconds = eager_bytes / efficiency.eager + fused_bytes / efficiency.fused
    return again * spec.tokens * seconds / target.bytes_per_s


def _casts(spec: Spec, target: Target, efficiency: Efficiency, weights: Weights, blocks: float) -> float:
    """Under autocast weights are cast for every pass, and their gradients back."""
    if not spec.effects.size("casts", 0):
        return 0.0
    moved = 6 if spec.effects.factor("frozen") else 12
    count = (
        blocks * weights.block_linear + spec.shape.vocab_size * spec.shape.hidden / spec.size("pp")
    ) / spec.size("tp")
    return moved * count / (target.bytes_per_s * efficiency.fused)


def _loss(spec: Spec, target: Target, efficiency: Efficiency) -> float:
    """Log-softmax, its gradient and the casts between them, over tokens × vocabulary."""
    # Generated kernels read rows that begin anywhere number by number.
    compiled = 18.0 if spec.shape.vocab_size % 8 else 11.0
    each = spec.work.number("loss.bytes", 32.0 if spec.effects.factor("logits.copies") else compiled)
    moved = each * spec.tokens * spec.shape.vocab_size / spec.size("tp")
    return moved / (target.bytes_per_s * efficiency.loss)


def _embedding(spec: Spec, target: Target, efficiency: Efficiency) -> float:
    """The gradient of the embedding: emptied, filled, added to the head's."""
    if spec.effects.factor("frozen"):
        return 0.0
    each = spec.effects.size("gradients", 4)
    return (
        5.6
        * each
        * spec.shape.vocab_size
        * spec.shape.hidden
        / spec.size("tp")
        / target.bytes_per_s
        / spec.size("pp")
    )


def _exposed(sent: Sent, computing: float, contention: float) -> float:
    """Seconds of sending that a step waits for: what nothing hides, and of the rest what computing does not cover."""
    hidden = min(sent.behind, 0.9 * computing)
    return sent.waiting + (sent.behind - hidden) + contention * hidden


def tokens_per_s(spec: Spec, time: Time) -> float:
    """Of all devices together."""
    return spec.step_tokens / time.step


def model_flops_per_token(spec: Spec) -> int:
    return flops_per_token(spec.shape, spec.sequence, frozen=bool(spec.effects.factor("frozen")))
