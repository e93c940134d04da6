"""Memory of a step at its peak, by part.

The peak of a step is the maximum over a few points: end of the forward pass with the loss, backward of the
loss, the last block's backward pass (with recomputation, if blocks are checkpointed), end of the backward pass with all
gradients, and the update. Weights and moments are always there; gradients from the backward pass to the update. Saved
activations of a block are the sum of its terms (`rush/plan/effects.py`). "Tensors" is what torch counts as allocated;
the device needs more, for the CUDA context and fragmentation. What a run needs besides its steps is in
`rush/plan/run_peak.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rush.plan.adapter_time import concatenated_a_bytes
from rush.plan.model_state import PipelineStage, RankState
from rush.plan.spec import Spec, adapted_weights, adapter_settings, weights_of

CONTEXT = 600 * 2**20
"""CUDA context, kernels and libraries before the first tensor (CUDA 12 and 13: 0.5 to 0.6 GiB)."""
HOST_CONTEXT = 190 * 2**20
"""On a CPU: what torch loads with its first optimizer and step (2.13 on Linux: 150 and 36 MiB)."""
COMMUNICATION = 800 * 2**20
"""NCCL's channels (0.5 to 1 GiB)."""
UNFILLED = 0.04
"""Fragmentation as a fraction of the peak. An assumption."""
GAP = 0.87
"""And at least this fraction of a block's widest tensor. Measured twice, on an H200: 8B with 355,328 and 374,784 tokens per row,
when memory ran out."""

ROUNDED_CHUNKS = 16
"""Up to this many chunks of a fused loss the LM head's gradient accumulates in bf16, beyond in fp32 (as in the kernel)."""
ROUND_HEIGHT = 64
"""That kernel pads the weight to a multiple of this many rows (as in the kernel)."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device at the peak, on the fullest pipeline stage."""

    parts: Mapping[str, float]
    activations: Mapping[str, float]
    """Saved activations by term, over all blocks."""
    moment: str
    host_bytes: float = 0.0

    @property
    def tensors(self) -> float:
        """Peak of torch's allocated memory."""
        return sum(
            value for name, value in self.parts.items() if name not in ("streams", "unfilled", "context")
        )

    @property
    def reserved(self) -> float:
        """Peak of torch's reserved memory."""
        return self.total - self.parts.get("context", 0.0)

    @property
    def total(self) -> float:
        """Device memory needed."""
        return sum(self.parts.values())


def block_tensors(spec: Spec, *, whole: bool = False) -> dict[str, float]:
    """Saved activations of one block in bytes per token, by term. `whole`: without checkpointing."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    query, key = shape.num_heads * shape.head_dim / tp, shape.num_kv_heads * shape.head_dim / tp
    wide, hidden, shard = shape.intermediate / tp, shape.hidden, shape.hidden / spec.stream_shards
    rms, gated = shape.norm == "rms", shape.gated_mlp
    kept = None if whole else effects.keeps
    repeated = (effects.factor("heads.repeated") or spec.device == "cpu") and kept is None
    copies = _copies(spec) if kept is None else (1, 1)
    joined = bool(effects.factor("values.joined"))
    views = joined and not (repeated and query > key)
    values = query + 2 * key if views else query if repeated else key
    # RMSNorm saves the fp32 copy of its input instead of the input.
    widened = rms and effects.factor("norm.wide") and kept is None
    norm = 4.0 if stream < 4 and widened else stream
    stats = 4 if rms else 8
    read = norm * shard + stats if shape.norms_before else 0.0
    found = {
        # (Without a norm there the next layers save it, and a checkpoint does.)
        "block.input": read or (stream * shard if kept is not None else 0.0),
        "block.middle": read,
        "norm.scaled": _scaled(spec, stream, compute),
        **_extra_norms(spec, 4.0 if compute < 4 and widened else compute),
        "qk.input": _qk_input(spec, 4.0 if compute < 4 and widened else compute, joined, views),
        "norm.output": compute * hidden * sum(copies),
        "queries": compute * query,
        "keys": compute * (query if repeated else key),
        "values": compute * values,
        "scores": _scores(spec),
        # The kernel's output has the layout of its queries, and is the next layer's input.
        "attention.output": (compute * query if kept is not None and "attention.flat" not in kept else 0)
        + 4 * shape.num_heads / tp,
        "attention.flat": compute * query,
        # With a norm after it, the output of attention's projection is that norm's input.
        "attention.projected": 0.0 if shape.norms_after and kept is None else compute * shard,
        "mlp.gate": compute * wide,
        "mlp.activated": compute * wide if gated else 0.0,
        "mlp.up": compute * wide if gated else 0.0,
        "mlp.product": compute * wide,
    }
    if effects.factor("frozen"):
        found["adapters"] = compute * _ranks(spec)
    # Adapters save their 16-bit input, and a frozen weight, which has no gradient, needs no cast of it.
    if effects.factor("inputs.cast") and not effects.factor("frozen"):
        found |= {"norm.output": 0.0, "mlp.product": 0.0, "inputs.cast": _casts(spec)}
    share = effects.factor("activations")
    if kept is not None:
        # With half of the matmul outputs, the block's input is still saved.
        return {
            term: size * effects.factor(term) * (1 if term == "block.input" else share)
            for term, size in found.items()
            if term in kept and effects.factor(term)
        }
    return {
        term: size * (1 if term == "adapters" else effects.factor(term))
        for term, size in found.items()
        if size
    }


def _scaled(spec: Spec, stream: float, compute: float) -> float:
    """Bytes per token of what RMSNorms save before their weights, all norms of a block together."""
    shape, shard = spec.shape, spec.shape.hidden / spec.stream_shards
    if shape.norm != "rms":
        return 0.0
    # Some families multiply by the weight in fp32.
    of_stream, of_layers = (4.0, 4.0) if _in_fp32(spec) else (stream, compute)
    return (
        2 * of_stream * shard * shape.norms_before
        + 2 * of_layers * shard * shape.norms_after
        + of_layers * _qk_width(spec)
    )


def _in_fp32(spec: Spec) -> bool:
    return spec.shape.structure.norm_rounds_last or spec.shape.structure.norm_offset


def _qk_width(spec: Spec) -> float:
    """Elements of queries and keys that are normalized, per token."""
    shape = spec.shape
    heads = shape.num_heads + shape.num_kv_heads
    shards = (
        1 if shape.qk_norm == "width" else spec.size("tp")
    )  # all heads are gathered where they are normalized together
    return 0.0 if shape.qk_norm == "none" else heads * shape.head_dim / shards


def _extra_norms(spec: Spec, each: float) -> dict[str, float]:
    """Bytes per token of the inputs of norms after attention and MLP (`each` bytes per element), with a number per row."""
    shard = spec.shape.hidden / spec.stream_shards
    return {"post.input": 2 * (each * shard + 4) if spec.shape.norms_after else 0.0}


def _qk_input(spec: Spec, each: float, joined: bool, views: bool) -> float:
    """Bytes per token of the inputs of the norms of queries and keys, with a number per row. `joined`: they are views of one
    output with the values; `views`: which the values save."""
    shape, compute = spec.shape, spec.effects.size("compute", 4)
    heads, kv_heads = shape.num_heads / spec.size("tp"), shape.num_kv_heads / spec.size("tp")
    rows = {"none": 0.0, "head": heads + kv_heads, "width": 2.0}[shape.qk_norm]
    saved = each * _qk_width(spec)
    if saved and joined and each == compute:
        saved = 0.0 if views else compute * (heads + 2 * kv_heads) * shape.head_dim
    return saved + 4 * rows


def saved_again(spec: Spec) -> float:
    """Bytes per token of tensors that several operations of a block save, counted beyond once: one tensor on a device, but
    saved-tensor hooks see each."""
    shape, effects, tp, work = spec.shape, spec.effects, spec.size("tp"), spec.work
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    query = shape.num_heads * shape.head_dim / tp
    again = 0.0
    if shape.norm == "rms" and not work.number("norms.fused"):
        each = (2 * shape.norms_before + 2 * shape.norms_after) * shape.hidden + _qk_width(spec)
        again += 4 * each + 8  # square and scale
    if shape.gated_mlp and not shape.joined_qkv and stream == compute:
        again += 3 * compute * shape.hidden  # inputs of three layers, and of two
    if shape.has_rope and not work.number("rope.fused"):
        again += 16 * (shape.rotary_dim or shape.head_dim) / spec.micro  # cos and sin
    if work.number("attention"):
        again += compute * query  # the kernel's output, also the next layer's input
    elif compute == 4:
        again += 4 * shape.num_heads / tp * spec.sequence  # softmax output, also a matmul operand
    return again


def offloaded_bytes(spec: Spec, blocks: float) -> float:
    """Bytes of these blocks that are offloaded: their inputs, or all saved tensors, including casts of weights."""
    if spec.work.number("inputs.offloaded"):
        return blocks * spec.tokens * spec.effects.size("stream", 4) * spec.shape.hidden / spec.stream_shards
    each = spec.tokens * (sum(block_tensors(spec, whole=True).values()) + saved_again(spec))
    return blocks * (each + spec.effects.size("casts", 0) * weights_of(spec).block_linear / spec.size("tp"))


def _ranks(spec: Spec) -> float:
    """Columns of all low-rank matmuls of a block's adapters."""
    found = adapter_settings(spec)
    return found[0] * len(adapted_weights(spec.shape, found[1])) if found else 0


def _copies(spec: Spec) -> tuple[int, int]:
    """How often the inputs of the layers after the two norms are saved: once, or a cast per layer."""
    effects = spec.effects
    cast = effects.size("stream", 4) != effects.size("compute", 4)
    if spec.shape.joined_qkv or not cast or not effects.factor("norm.copies"):
        return 1, 1
    return 3, 2


def _casts(spec: Spec) -> float:
    """Bytes per token of inputs that layers with 8-bit matmuls save: all, or, compiled, what cannot be recomputed."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    compiled, whole = spec.work.number("stream.fused"), effects.factor("mlp.whole")
    # A compiler saves the 8-bit cast also where an eager layer casts again from the 16-bit input.
    each = 1 if compiled else effects.size("inputs.cast", 1)
    kept = not compiled or effects.factor("inputs.opaque")
    # Eager, every layer after a norm has its own cast; in 16 bits it is the norm's output itself.
    apart = not shape.joined_qkv and not compiled and each == 1 and effects.factor("norm.copies")
    first, second = (3, 1 if whole else 2) if apart else (1, 1)
    found = 0.0
    if kept or effects.factor("norm.opaque"):
        found += (first + second) * shape.hidden
    if kept and each == 1:  # the 16-bit one is saved already
        found += shape.num_heads * shape.head_dim / tp
    if not whole and (kept or effects.factor("mlp.opaque")):
        found += shape.intermediate / tp
    return each * found


def _scores(spec: Spec) -> float:
    effects, shape = spec.effects, spec.shape
    compute = effects.size("compute", 4)
    each = 4 + (compute if compute < 4 else 0)
    each += compute if shape.attention_softcap is not None else 0  # the tanh
    return shape.num_heads / spec.size("tp") * spec.sequence * each + spec.sequence / spec.micro


def memory_of(spec: Spec) -> StepMemory:
    """Memory of a step on the fullest rank."""
    return max((_stage_memory(spec, stage) for stage in stages_of(spec)), key=lambda found: found.total)


def stages_of(spec: Spec) -> list[PipelineStage]:
    """The pipeline ranks that may be the fullest: the first has most micro batches, the second nearly as many and both kinds
    of buffers, the last the LM head."""
    depth = spec.size("pp")
    blocks = -(-spec.shape.num_layers // depth)
    ranks = sorted({0, min(1, depth - 1), depth - 1})
    return [PipelineStage(blocks, rank == 0, rank == depth - 1, _in_flight(spec, rank)) for rank in ranks]


def _in_flight(spec: Spec, rank: int) -> float:
    """Micro batches in flight on a pipeline rank: forward passes before the first backward pass.

    With several stages per rank torch runs (stages − 1) · ranks + 2 · (ranks after this one) ahead.
    """
    depth, stages = spec.size("pp"), spec.stages
    if depth == 1 or spec.knob("pp", "schedule", "1f1b") == "gpipe":
        return 1 if depth == 1 else spec.passes
    after = depth - 1 - rank
    ahead = ((stages - 1) * depth + 2 * after + 1) / stages if stages > 1 else after + 1
    return min(ahead, spec.passes)


def _stage_memory(spec: Spec, stage: PipelineStage) -> StepMemory:
    effects, weights, tokens = spec.effects, weights_of(spec), spec.tokens
    held = RankState(spec, stage, weights)
    each = block_tensors(spec)
    kept = {term: size * tokens * stage.blocks * stage.in_flight for term, size in each.items()}
    recomputed = block_tensors(spec, whole=True) if effects.keeps is not None else {}
    if joined_bytes := concatenated_a_bytes(spec):
        kept["adapters"] = kept.get("adapters", 0.0) + joined_bytes * (1 if recomputed else stage.blocks)
    recomputed_bytes = tokens * (sum(recomputed.values()) - sum(each.values())) if recomputed else 0.0
    ends = final_bytes(spec) * tokens if stage.last else 0.0
    forward, backward, head = _loss(spec, stage)
    working = working_bytes(spec) * tokens + dequantized_bytes(spec)
    moments: dict[str, dict[str, float]] = {
        "forward pass": {**held.state(0), "activations": sum(kept.values()) + ends, "logits": forward,
                         "casts": held.casts(always=True)},
        "loss": {**held.state(0), "activations": sum(kept.values()) + ends, "logits": backward + head,
                 "casts": held.casts()},
        "last block": {**held.state(1), "activations": sum(kept.values()) + recomputed_bytes, "working": working,
                       "logits": held.head_gradient(), "casts": held.casts()},
        "first block": {**held.state(stage.blocks - 1), "activations": sum((recomputed or each).values()) * tokens,
                        "working": working, "logits": held.head_gradient()},
        "end of backward pass": {**held.state(stage.blocks),
                                 "working": held.second_head() + 2 * effects.size("stream", 4) * spec.shape.hidden * tokens},
        "update": {**held.state(stage.blocks), "working": held.update()},
    }  # fmt: skip
    moment, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    parts["buffers"] = held.buffers()
    parts["pipeline"] = _pipes(spec, stage)
    peak = sum(parts.values())
    if effects.factor("cuda_graph.gradients"):
        # A captured graph has its own pool; gradients are static.
        peak += held.gradients(stage.blocks) - parts["gradients"]
        parts["gradients"] = held.gradients(stage.blocks)
    streams = held.other_streams(counted=moment not in ("forward pass", "loss"))
    parts["streams"] = streams
    gaps = max(UNFILLED * (peak + streams), GAP * _widest(spec) if spec.device == "cuda" else 0.0)
    parts["unfilled"] = effects.factor("fragmentation") * gaps
    parts["context"] = context_of(spec.device) + communication_of(spec)
    at_peak = {} if moment == "update" else kept
    moved = spec.work.number("offloaded") or spec.work.number("inputs.offloaded")
    host = held.on_host() + (offloaded_bytes(spec, stage.blocks) if moved else 0.0)
    return StepMemory(
        {k: v for k, v in parts.items() if v}, {k: v for k, v in at_peak.items() if v}, moment, host
    )


def _pipes(spec: Spec, stage: PipelineStage) -> float:
    """Send and receive buffers of torch's pipeline stages: one per micro batch for what arrives (activations, gradients), and
    those in flight for what was sent."""
    if stage.first and stage.last:
        return 0.0
    each = spec.tokens * spec.shape.hidden / spec.stream_shards * spec.effects.size("stream", 4) * spec.stages
    arriving = 0.0 if stage.first else spec.passes - stage.in_flight  # the rest counts as block inputs
    returning = 0.0 if stage.last else spec.passes + stage.in_flight
    return each * (max(0.0, arriving) + returning)


def context_of(device: str) -> int:
    """Bytes of device memory before the first tensor."""
    return CONTEXT if device == "cuda" else HOST_CONTEXT


def communication_of(spec: Spec) -> int:
    """Bytes of the communication library."""
    return COMMUNICATION if spec.device == "cuda" and spec.world > 1 else 0


def final_bytes(spec: Spec) -> float:
    """Bytes per token saved by the final norm and the LM head."""
    shape, effects = spec.shape, spec.effects
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    rms = shape.norm == "rms"
    wide = 4.0 if rms and stream < 4 and effects.factor("norm.wide") else stream
    scaled = (4.0 if _in_fp32(spec) else stream) * effects.factor("norm.scaled") if rms else 0.0
    # The LM head reads all positions, also with sequence parallelism.
    head = 0.0 if effects.factor("frozen") else compute
    return shape.hidden * ((wide + scaled) / spec.stream_shards + head)


def _loss(spec: Spec, stage: PipelineStage) -> tuple[float, float, float]:
    """Bytes of logits forward and backward, and of the LM head's gradient and cast at that time."""
    if not stage.last:
        return 0.0, 0.0, 0.0
    effects, shape = spec.effects, spec.shape
    compute, vocab = effects.size("compute", 4), shape.vocab_size / spec.size("tp")
    tokens, chunked = logits_tokens(spec), effects.factor("logits.tokens") > 0
    head = vocab * shape.hidden
    gradient = 0.0 if effects.factor("frozen") else head * compute
    if effects.factor("logits.copies"):
        # With tp the loss is a chain of operations on vocab shards (torch's `loss_parallel`).
        forward, backward = (14.0, 16.0) if spec.size("tp") > 1 else (8.0, 12.0)
        if shape.logit_softcap is not None:
            forward, backward = forward + 4, backward + 4  # the tanh
        return forward * vocab * tokens, backward * vocab * tokens, gradient if chunked else 0.0
    cast = head * compute if effects.factor("casts") or "casts" in effects.sizes else 0.0
    if effects.factor("head.gradient"):
        # A few chunks accumulate in bf16, more in fp32.
        few = spec.tokens <= ROUNDED_CHUNKS * tokens and spec.work.name("matmul.dtype", "") != "float16"
        each = 0.0 if effects.factor("frozen") else compute if few else 4.0
        early = head * each + spec.tokens * shape.hidden * compute
        # An unaligned weight is padded into a copy, as one that is cast is anyway.
        copied = cast or (head * compute if vocab % ROUND_HEIGHT else 0.0)
        # fp8, also transposed: the gradient of the logits, the weight and the hidden states.
        logits = vocab * tokens * compute
        both_ways = 2 * effects.factor("head.cast") * (vocab * tokens + head + tokens * shape.hidden)
        return logits + both_ways + early + copied, early, 0.0
    padded = effects.factor("logits.padded") if compute < 4 and shape.vocab_size % 8 else 0.0
    logits = compute * vocab * tokens * (1 + padded)
    return logits, logits, gradient + cast


def logits_tokens(spec: Spec) -> float:
    """Tokens whose logits exist at once."""
    effects, tokens = spec.effects, float(spec.tokens)
    at_once = effects.factor("logits.tokens")
    if not at_once:
        return tokens
    found = min(tokens, at_once if at_once >= 1 else -(-at_once * tokens // 128) * 128)
    if effects.factor("seams") and not effects.factor("head.gradient"):
        found = max(found, effects.factor("seams") * tokens)
    return found


def _widest(spec: Spec) -> float:
    """Bytes of the widest tensor that a block computes."""
    return spec.effects.size("compute", 4) * spec.tokens * spec.shape.intermediate / spec.size("tp")


def dequantized_bytes(spec: Spec) -> float:
    """Bytes of the largest dequantized weight of a block."""
    if spec.effects.size("blocks", 4) >= 2:
        return 0.0
    return spec.effects.size("compute", 4) * spec.shape.hidden * spec.shape.intermediate / spec.size("tp")


def working_bytes(spec: Spec) -> float:
    """Bytes per token during one block's backward pass: gradients of the MLP's wide tensors or of the scores."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    # A compiled backward pass reuses the memory of saved activations for gradients; recomputed ones all exist until its kernel
    # has written the gradients. (Not with adapters.)
    handed = effects.keeps is None or "mlp.gate" in effects.keeps or bool(effects.factor("frozen"))
    tensors = 1 if effects.factor("seams") and handed else 3 if shape.gated_mlp else 2
    wide = tensors * compute * shape.intermediate / tp
    wide += effects.size("matmul.sums", 0) * shape.intermediate / tp
    scores = 2 * _scores(spec) * effects.factor("scores")
    return 2 * stream * shape.hidden + max(wide, scores)
