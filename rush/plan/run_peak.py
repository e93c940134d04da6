"""Peak memory of a run: its steps, validation, samples and checkpoints.

Between steps there are weights and moments, but no gradients. A validation is a forward pass without gradients: one
block's tensors at a time, and at the end the logits. So a step is nearly always the peak, except where passes run in
the memory pool of a CUDA graph (`cuda_graph`), which stays allocated. A sample needs a KV cache. A checkpoint needs no
device memory: the state is copied to the host, or written directly where the host has no room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rush.models.counts import list_parameters
from rush.plan.memory import (
    ROUND_HEIGHT,
    UNFILLED,
    StepMemory,
    communication_of,
    context_of,
    dequantized_bytes,
    logits_tokens,
    memory_of,
    stages_of,
)
from rush.plan.model_state import PipelineStage, RankState
from rush.plan.spec import Spec, weights_of
from rush.sampling import PREFILL_TOKENS

STEP = "step"


@dataclass(frozen=True)
class RunPeak:
    """Bytes of one device by phase of a run, on the fullest pipeline stage."""

    step: StepMemory
    besides: Mapping[str, float]
    """Device memory needed for validation, sampling and saving."""

    @property
    def phases(self) -> dict[str, float]:
        return {STEP: self.step.total, **self.besides}

    @property
    def fullest(self) -> str:
        """The phase with the peak; the step in a tie."""
        return max(self.phases.items(), key=lambda item: item[1])[0]

    @property
    def total(self) -> float:
        """Device memory needed for the whole run."""
        return max(self.phases.values())


def run_peak_of(spec: Spec) -> RunPeak:
    """Memory of a run by phase, each on its fullest rank."""
    step, stages, weights = memory_of(spec), stages_of(spec), weights_of(spec)
    besides: dict[str, float] = {}
    for stage in stages:
        held = RankState(spec, stage, weights)
        state = sum(held.between_steps().values())
        found = {"validation": validation_bytes(spec, held), "sample": sample_bytes(spec, held), "save": 0.0}
        for phase, more in found.items():
            besides[phase] = max(besides.get(phase, 0.0), _needed(spec, held, step, state, more))
    return RunPeak(step, besides)


def _needed(spec: Spec, held: RankState, step: StepMemory, state: float, more: float) -> float:
    """Device memory needed for `more` bytes in addition to the state."""
    unfilled = 1 + spec.effects.factor("fragmentation") * UNFILLED
    if spec.effects.factor("cuda_graph.pool"):
        return step.total + unfilled * more
    return unfilled * (state + more + held.buffers()) + context_of(spec.device) + communication_of(spec)


def validation_bytes(spec: Spec, held: RankState) -> float:
    """Bytes of a forward pass without gradients, in addition to the state."""
    effects = spec.effects
    stream, compute = effects.size("stream", 4), effects.size("compute", 4)
    plain = bool(effects.factor("scores"))
    block = spec.tokens * forward_bytes(
        spec, stream, compute, spec.sequence if plain else 0
    ) + dequantized_bytes(spec)
    ends = 2 * stream * spec.shape.hidden * spec.tokens + _logits(spec, held.stage)
    return (
        held.gathered
        + _angles(spec, spec.sequence)
        + max(block + held.casts(always=True, with_head=False), ends + held.casts(always=True))
    )


def forward_bytes(spec: Spec, stream: float, compute: float, keys: float) -> float:
    """Peak bytes per token in a block without gradients: in attention (all scores of `keys` keys, or a fused kernel) or in the
    MLP, as the plain model's code keeps references."""
    shape, tp = spec.shape, spec.size("tp")
    query, key = shape.num_heads * shape.head_dim / tp, shape.num_kv_heads * shape.head_dim / tp
    wide, hidden = shape.intermediate / tp, shape.hidden
    attention = 2 * stream * hidden + compute * (query + 2 * key)
    if keys:
        # Repeated keys and values, then scores before and after softmax, with the output of softmax or matmul; in 16 bits a
        # CPU's softmax casts its input to fp32.
        cast = 10 if spec.device == "cpu" else 8
        scores = shape.num_heads / tp * keys
        attention += 2 * compute * query
        attention += max(8 * scores + compute * query, cast * scores if compute < 4 else 0.0)
    else:
        attention += compute * query + 4 * shape.num_heads / tp
    # The residual stream before and after attention, the norm, and input and output of the activation.
    mlp = 3 * stream * hidden + compute * wide * (4 if shape.gated_mlp else 2)
    return max(attention, mlp)


def _angles(spec: Spec, positions: float) -> float:
    """Bytes of RoPE's cos and sin, once for all rows."""
    shape = spec.shape
    kinds = 0 if not shape.has_rope else 1 if shape.local_rope_theta is None else 2
    return 8 * (shape.rotary_dim or shape.head_dim) * positions * kinds


def _logits(spec: Spec, stage: PipelineStage) -> float:
    """Bytes of a loss without gradients."""
    if not stage.last:
        return 0.0
    effects, shape = spec.effects, spec.shape
    compute, vocab, tokens = (
        effects.size("compute", 4),
        shape.vocab_size / spec.size("tp"),
        logits_tokens(spec),
    )
    if effects.factor("logits.copies"):
        return (14.0 if spec.size("tp") > 1 else 8.0) * vocab * tokens
    logits = compute * vocab * tokens
    if effects.factor("head.gradient"):
        copied = vocab % ROUND_HEIGHT or effects.factor("casts") or "casts" in effects.sizes
        eight_bits = effects.factor("head.cast") * (vocab * shape.hidden + tokens * shape.hidden)
        return logits + eight_bits + (vocab * shape.hidden * compute if copied else 0.0)
    return logits * (1 + (effects.factor("logits.padded") if compute < 4 and shape.vocab_size % 8 else 0.0))


def sample_bytes(spec: Spec, held: RankState) -> float:
    """Bytes of a sample in addition to the state: KV cache, prefill of a block, logits, in the dtype of the weights. A sharded
    model is sampled on the host, and gathered one tensor at a time."""
    prompt, drawn = spec.sampled
    shape, each = spec.shape, held.bytes_per_weight
    if not drawn or not held.stage.first:
        return 0.0
    if spec.shards * spec.size("tp") > 1:
        return each * held.weights.largest
    prompt = min(prompt, shape.context)
    capacity, read = min(shape.context, prompt + drawn), min(prompt, PREFILL_TOKENS)
    cache = 2 * each * shape.num_layers * shape.num_kv_heads * shape.head_dim * capacity
    block = read * forward_bytes(spec, each, each, prompt) + dequantized_bytes(spec)
    logits = read * (shape.vocab_size * (4 + (each if each < 4 else 0)) + 2 * each * shape.hidden)
    return cache + max(block, logits) + _angles(spec, read)


def staged_bytes(spec: Spec) -> float:
    """Host bytes of one rank's copy of the state for checkpoints: weights, moments and master weights; with adapters theirs
    alone. Replicas share the writing. Pinned memory is allocated in powers of two."""
    effects, weights = spec.effects, weights_of(spec)
    moments = effects.size("optimizer", 8) * effects.factor("optimizer") / 2
    sizes = [effects.size("parameters", 4), moments, moments, 4 * effects.factor("master")]
    counts = [parameter.count for parameter in list_parameters(spec.shape)]
    if effects.factor("frozen"):
        counts = [weights.adapters] * spec.shape.num_layers
    held = [size * count / spec.world for count in counts for size in sizes if size]
    return sum(
        2 ** (int(each) - 1).bit_length() if spec.device == "cuda" and each >= 1 else each for each in held
    )
