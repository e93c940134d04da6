"""How much memory a step takes at its fullest moment, by part.

A step is a few moments, and the peak is the fullest of them: the end of the forward pass with the loss being made, the
loss being differentiated, the last block's backward pass (with what is computed again, if blocks are checkpointed),
the end of the backward pass, when all gradients are there, and the update. Weights and moments are there all the
time; gradients only from the backward pass to the update, since they are let go of after it. What a block leaves for
its backward pass is summed from the terms that are left (`rush/plan/effects.py`). "Tensors" is what torch counts as
allocated; what a device must offer is more by the context of the driver and what the allocator cannot fill. What a run
does besides its steps is counted in `rush/plan/run_peak.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rush.plan.adapter_time import joined
from rush.plan.model_state import PipelineStage, RankState
from rush.plan.spec import Spec, adapted, adapting, weights_of

CONTEXT = 600 * 2**20
"""What the driver, loaded kernels and libraries take before the first tensor (CUDA 12 and 13: 0.5 to 0.6 GiB)."""
HOST_CONTEXT = 190 * 2**20
"""On a CPU: what torch loads with its first optimizer and its first step (2.13 on Linux: 150 and 36 MiB)."""
COMMUNICATION = 800 * 2**20
"""What NCCL takes for its channels when several GPUs work together (0.5 to 1 GiB)."""
UNFILLED = 0.04
"""Share of the peak that the allocator holds beyond it: blocks that fit nothing. Derating, not measured."""
GAP = 0.87
"""And at least so much of a block's widest tensor, which a gap is left for wherever something smaller came to lie in its
place. Seen twice, on an H200: of 8B with 355,328 and 374,784 tokens a row, when memory ran out."""

ROUNDED_CHUNKS = 16
"""Up to so many chunks of a fused loss the head's gradient is a sum in bf16, beyond in fp32: the kernel's MOST_ROUNDED."""
ROUND_HEIGHT = 64
"""That kernel multiplies with a weight of this many rows, or a multiple: its ALIGNED."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device at the fullest moment; of the fullest pipeline stage."""

    parts: Mapping[str, float]
    activations: Mapping[str, float]
    """The part of that name by term, over all blocks."""
    moment: str
    host_bytes: float = 0.0

    @property
    def tensors(self) -> float:
        """What torch counts as allocated at most."""
        return sum(
            value for name, value in self.parts.items() if name not in ("streams", "unfilled", "context")
        )

    @property
    def reserved(self) -> float:
        """What torch's allocator takes of the device for them."""
        return self.total - self.parts.get("context", 0.0)

    @property
    def total(self) -> float:
        """What the device must offer."""
        return sum(self.parts.values())


def block_tensors(spec: Spec, *, whole: bool = False) -> dict[str, float]:
    """Bytes a token leaves in one block for its backward pass, by term. `whole`: as if nothing were checkpointed."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    query, key = shape.num_heads * shape.head_dim / tp, shape.num_kv_heads * shape.head_dim / tp
    wide, hidden, shard = shape.intermediate / tp, shape.hidden, shape.hidden / spec.stream_shards
    llama = shape.family == "llama"
    kept = None if whole else effects.keeps
    repeated = (effects.factor("heads.repeated") or spec.device == "cpu") and kept is None
    copies = _copies(spec) if kept is None else (1, 1)
    values = query if repeated else key
    if effects.factor("values.joined") and not (repeated and query > key):
        values = query + 2 * key
    # RMSNorm keeps the fp32 copy it made of its input instead of the input.
    norm = 4.0 if llama and stream < 4 and effects.factor("norm.wide") and kept is None else stream
    stats = 4 if llama else 8
    found = {
        "block.input": (norm * shard + stats),
        "block.middle": (norm * shard + stats),
        "norm.scaled": 2 * stream * shard if llama else 0.0,
        "norm.output": compute * hidden * sum(copies),
        "queries": compute * query,
        "keys": compute * (query if repeated else key),
        "values": compute * values,
        "scores": _scores(spec),
        # The kernel's result has the layout of its queries, heads of a token side by side, and the next layer reads it as it is.
        "attention.output": (compute * query if kept is not None and "attention.flat" not in kept else 0)
        + 4 * shape.num_heads / tp,
        "attention.flat": compute * query,
        "attention.projected": compute * shard,
        "mlp.gate": compute * wide,
        "mlp.activated": compute * wide if llama else 0.0,
        "mlp.up": compute * wide if llama else 0.0,
        "mlp.product": compute * wide,
    }
    if effects.factor("frozen"):
        found["adapters"] = compute * _ranks(spec)
    if effects.factor("inputs.cast"):
        found |= {"norm.output": 0.0, "mlp.product": 0.0, "inputs.cast": _casts(spec)}
    share = effects.factor("activations")
    if kept is not None:
        # Half of the products: the input of the block always stays.
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


def saved_again(spec: Spec) -> float:
    """Bytes a token of what two operations of a block keep, as often as it is kept beyond once. On a device that is one tensor;
    a hook that takes away what is kept is handed each of them."""
    shape, effects, tp, work = spec.shape, spec.effects, spec.size("tp"), spec.work
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    query = shape.num_heads * shape.head_dim / tp
    again = 0.0
    if shape.family == "llama":
        if not work.number("norms.fused"):
            again += 2 * (4 * shape.hidden + 4)  # squared, and scaled
        if stream == compute:
            again += 3 * compute * shape.hidden  # read by three layers, and by two
        again += 0 if work.number("rope.fused") else 16 * shape.head_dim / spec.micro  # cosines and sines
    if work.number("attention"):
        again += compute * query  # the kernel's own, and the input of the next layer
    elif compute == 4:
        again += 4 * shape.num_heads / tp * spec.sequence  # the weights, as softmax and as a product's factor
    return again


def offloaded_bytes(spec: Spec, blocks: float) -> float:
    """Bytes of so many blocks that go to the host: their inputs, or all that a hook on what is kept is handed, casts of
    weights among them."""
    if spec.work.number("inputs.offloaded"):
        return blocks * spec.tokens * spec.effects.size("stream", 4) * spec.shape.hidden / spec.stream_shards
    each = spec.tokens * (sum(block_tensors(spec, whole=True).values()) + saved_again(spec))
    return blocks * (each + spec.effects.size("casts", 0) * weights_of(spec).block_linear / spec.size("tp"))


def _ranks(spec: Spec) -> float:
    """Columns of all thin products of a block's adapters."""
    found = adapting(spec)
    return found[0] * len(adapted(spec.shape, found[1])) if found else 0


def _copies(spec: Spec) -> tuple[int, int]:
    """How often the input of the layers behind the two norms is kept: once, or once for each layer's cast."""
    effects = spec.effects
    cast = effects.size("stream", 4) != effects.size("compute", 4)
    if spec.shape.family != "llama" or not cast or not effects.factor("norm.copies"):
        return 1, 1
    return 3, 2


def _casts(spec: Spec) -> float:
    """Bytes of a token that layers of 8 bits keep of what they read: all of it, or, compiled, what cannot be made again."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    each, whole = effects.size("inputs.cast", 1), effects.factor("mlp.whole")
    compiled = spec.work.number("stream.fused")
    kept = not compiled or effects.factor("inputs.opaque")
    # Eager, every layer behind a norm makes its own; of two bytes it is the norm's output itself.
    apart = shape.family == "llama" and not compiled and each == 1 and effects.factor("norm.copies")
    first, second = (3, 1 if whole else 2) if apart else (1, 1)
    found = 0.0
    if kept or effects.factor("norm.opaque"):
        found += (first + second) * shape.hidden
    if kept and each == 1:  # the wider one is there already
        found += shape.num_heads * shape.head_dim / tp
    if not whole and (kept or effects.factor("mlp.opaque")):
        found += shape.intermediate / tp
    return each * found


def _scores(spec: Spec) -> float:
    effects, shape = spec.effects, spec.shape
    compute = effects.size("compute", 4)
    each = 4 + (compute if compute < 4 else 0)
    return shape.num_heads / spec.size("tp") * spec.sequence * each + spec.sequence / spec.micro


def memory_of(spec: Spec) -> StepMemory:
    """The memory of a step, on the fullest rank."""
    return max((_stage_memory(spec, stage) for stage in stages_of(spec)), key=lambda found: found.total)


def stages_of(spec: Spec) -> list[PipelineStage]:
    """The ranks of the pipeline that may be the fullest: the first holds most micro batches, the second nearly as many and both
    kinds of buffers, the last the head."""
    depth = spec.size("pp")
    blocks = -(-spec.shape.num_layers // depth)
    ranks = sorted({0, min(1, depth - 1), depth - 1})
    return [PipelineStage(blocks, rank == 0, rank == depth - 1, _in_flight(spec, rank)) for rank in ranks]


def _in_flight(spec: Spec, rank: int) -> float:
    """Micro batches whose activations a rank of a pipeline holds at most: those that went ahead before the first came back.

    With several stages a rank, whole ones: torch's order sends (stages − 1) · ranks + 2 · (ranks after this one) ahead.
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
    again = block_tensors(spec, whole=True) if effects.keeps is not None else {}
    if joined_bytes := joined(spec):
        kept["adapters"] = kept.get("adapters", 0.0) + joined_bytes * (1 if again else stage.blocks)
    again_bytes = tokens * (sum(again.values()) - sum(each.values())) if again else 0.0
    ends = _final(spec) * tokens if stage.last else 0.0
    forward, backward, head = _loss(spec, stage)
    working = _working(spec) * tokens + unpacked(spec)
    moments: dict[str, dict[str, float]] = {
        "forward pass": {**held.state(0), "activations": sum(kept.values()) + ends, "logits": forward,
                         "casts": held.casts(always=True)},
        "loss": {**held.state(0), "activations": sum(kept.values()) + ends, "logits": backward + head,
                 "casts": held.casts()},
        "last block": {**held.state(1), "activations": sum(kept.values()) + again_bytes, "working": working,
                       "logits": held.head_gradient(), "casts": held.casts()},
        "first block": {**held.state(stage.blocks - 1), "activations": sum((again or each).values()) * tokens,
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
        # Replayed passes use memory of their own; gradients stay.
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
    """What a pipeline sends and receives, which torch's stages keep: of every micro batch of a step a place for what arrives
    (activations, gradients), and of those under way what was sent."""
    if stage.first and stage.last:
        return 0.0
    each = spec.tokens * spec.shape.hidden / spec.stream_shards * spec.effects.size("stream", 4) * spec.stages
    arriving = (
        0.0 if stage.first else spec.passes - stage.in_flight
    )  # the rest is counted as the input of a block
    returning = 0.0 if stage.last else spec.passes + stage.in_flight
    return each * (max(0.0, arriving) + returning)


def context_of(device: str) -> int:
    """Bytes that a process takes of a device before its first tensor."""
    return CONTEXT if device == "cuda" else HOST_CONTEXT


def communication_of(spec: Spec) -> int:
    """Bytes that the library of exchanges takes for itself."""
    return COMMUNICATION if spec.device == "cuda" and spec.world > 1 else 0


def _final(spec: Spec) -> float:
    """Bytes a token leaves in the final norm and before the head."""
    shape, effects = spec.shape, spec.effects
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    llama = shape.family == "llama"
    wide = 4.0 if llama and stream < 4 and effects.factor("norm.wide") else stream
    scaled = stream * effects.factor("norm.scaled") if llama else 0.0
    # The head reads all positions, however the stream is cut.
    head = 0.0 if effects.factor("frozen") else compute
    return shape.hidden * ((wide + scaled) / spec.stream_shards + head)


def _loss(spec: Spec, stage: PipelineStage) -> tuple[float, float, float]:
    """Bytes of logits forward and backward, and of the head's gradient and cast that are there with them."""
    if not stage.last:
        return 0.0, 0.0, 0.0
    effects, shape = spec.effects, spec.shape
    compute, vocab = effects.size("compute", 4), shape.vocab_size / spec.size("tp")
    tokens, chunked = logits_tokens(spec), effects.factor("logits.tokens") > 0
    head = vocab * shape.hidden
    gradient = 0.0 if effects.factor("frozen") else head * compute
    if effects.factor("logits.copies"):
        # Cut among ranks, the loss is a chain of operations on the logits' parts (torch's `loss_parallel`).
        forward, backward = (14.0, 16.0) if spec.size("tp") > 1 else (8.0, 12.0)
        return forward * vocab * tokens, backward * vocab * tokens, gradient if chunked else 0.0
    cast = head * compute if effects.factor("casts") or "casts" in effects.sizes else 0.0
    if effects.factor("head.gradient"):
        # A sum over a few chunks is kept in bf16, others in fp32.
        few = spec.tokens <= ROUNDED_CHUNKS * tokens and spec.work.name("matmul.dtype", "") != "float16"
        each = 0.0 if effects.factor("frozen") else compute if few else 4.0
        early = head * each + spec.tokens * shape.hidden * compute
        # A weight whose height is no round number is copied, as one that is cast is anyway.
        copied = cast or (head * compute if vocab % ROUND_HEIGHT else 0.0)
        # In 8 bits, both ways: the gradient of the logits beside those of 16, the weight and what it is multiplied with.
        logits = vocab * tokens * compute
        both_ways = 2 * effects.factor("head.cast") * (vocab * tokens + head + tokens * shape.hidden)
        return logits + both_ways + early + copied, early, 0.0
    padded = effects.factor("logits.padded") if compute < 4 and shape.vocab_size % 8 else 0.0
    logits = compute * vocab * tokens * (1 + padded)
    return logits, logits, gradient + cast


def logits_tokens(spec: Spec) -> float:
    """Of how many tokens the logits are there at once."""
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


def unpacked(spec: Spec) -> float:
    """The largest weight of a block, where weights are codes: as long as its product lasts."""
    if spec.effects.size("blocks", 4) >= 2:
        return 0.0
    return spec.effects.size("compute", 4) * spec.shape.hidden * spec.shape.intermediate / spec.size("tp")


def _working(spec: Spec) -> float:
    """Bytes a token takes while one block is differentiated: gradients of the MLP's wide tensors or of the scores."""
    shape, effects, tp = spec.shape, spec.effects, spec.size("tp")
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    # A compiled backward pass puts gradients where the tensors were that it was handed and has used up; where it makes them
    # itself, computing the block again, all are there until its kernel has written the gradients. (Not beside adapters: their
    # operator has used up the product before that.)
    handed = effects.keeps is None or "mlp.gate" in effects.keeps or bool(effects.factor("frozen"))
    tensors = 1 if effects.factor("seams") and handed else 3 if shape.family == "llama" else 2
    wide = tensors * compute * shape.intermediate / tp
    scores = 2 * _scores(spec) * effects.factor("scores")
    return 2 * stream * shape.hidden + max(wide, scores)
