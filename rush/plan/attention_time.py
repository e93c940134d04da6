"""Time of a block's attention: plain attention by the traffic of its scores, a fused kernel by its FLOPs.

Plain attention writes every score to memory, and each operation reads and writes all of them again: those of
`PlainAttention` in `rush/models/layers.py`, and their backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from rush.models.counts import mean_keys
from rush.plan.communication import kv_width
from rush.plan.efficiencies import Efficiencies
from rush.plan.spec import Spec, matmul_dtype
from rush.plan.target import TargetMachine

FULL_PRECISION = 0.4
"""Efficiency of a kernel without tensor cores, relative to an fp32 matmul: flex_attention in fp32, the only one measured."""
TILE = 128
"""Kernels compute whole tiles, also on the diagonal, half of which is masked."""
FORWARD = 0.27
"""Fraction of a kernel's time in the forward pass: two matmuls of seven, measured 0.18 to 0.29."""
EXTRA_BYTES = 14
"""Bytes per output element that kernels move in addition: backward, output and its gradient are read for their row sums, and
the queries' gradient, accumulated in fp32, is zeroed, read and written in 16 bits."""


@dataclass(frozen=True)
class ScoreTraffic:
    """Bytes per score of operations other than matmuls."""

    forward: float
    backward: float


EAGER = ScoreTraffic(32, 36)
"""In fp32: scaled (read, written: 8), copied and masked (16), softmax (8); backward softmax (12), masked (16), scaled (8). In 16 bits
scaling and masking move half of it, and casts to fp32 and back as much again."""


def compiled_scores(size: float) -> ScoreTraffic:
    """Scale, mask and softmax in one kernel; backward another reads softmax and gradient twice, for row sums and result."""
    return ScoreTraffic(2 * size, 5 * size)


def attention_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """Seconds of one block's attention, on average over layers. A causal query attends to half the keys, with a window to fewer; plain
    attention computes all scores."""
    work = spec.work
    if not work.number("attention"):
        again = max(work.number("attention.recomputed"), work.number("scores.recomputed"))
        return _plain(spec, target, efficiency, 1 + again)
    shape, dtype = spec.shape, matmul_dtype(spec)
    width = shape.num_heads * shape.head_dim / spec.size("tp")
    keys = (
        2
        * sum(mean_keys(shape, layer, spec.sequence) for layer in range(shape.num_layers))
        / shape.num_layers
    )
    arithmetic = 6 * spec.tokens * width * keys * (1 + FORWARD * work.number("attention.recomputed"))
    if target.kind != "cuda":
        # Efficiencies are relative to a GPU's tensor cores; on a CPU a kernel runs at the matmul rate.
        return arithmetic / (target.rate(dtype) * efficiency.matmul.get(dtype, 1.0))
    arithmetic *= 1 + TILE / keys
    reached = efficiency.attention.get(work.by["attention"], work.number("attention"))
    reached *= efficiency.wide_heads if shape.head_dim >= 128 else 1.0
    reached *= FULL_PRECISION if dtype == "float32" else 1.0
    extra = EXTRA_BYTES * spec.tokens * width / (target.bytes_per_s * efficiency.fused)
    return arithmetic / (target.rate(dtype) * reached) + extra


def _plain(spec: Spec, target: TargetMachine, efficiency: Efficiencies, forwards: float) -> float:
    shape, dtype, size = spec.shape, matmul_dtype(spec), spec.effects.size("compute", 4)
    scores = spec.tokens * shape.num_heads / spec.size("tp") * spec.sequence
    # Two matmuls forward and four backward each read or write the scores, bound by bandwidth or FLOPs.
    flops_s = 2 * shape.head_dim / (target.rate(dtype) * efficiency.matmul.get(dtype, 1.0))
    matmul = max(flops_s, size / (target.bytes_per_s * efficiency.fused))
    fused = bool(spec.work.number("stream.fused"))
    moved = compiled_scores(size) if fused else EAGER
    rate = target.bytes_per_s * (efficiency.fused if fused else efficiency.eager)
    forward, backward = moved.forward / rate + 2 * matmul, moved.backward / rate + 4 * matmul
    return scores * (forwards * forward + backward)


def ring_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """One block's additional work of ring attention: for each shard outputs are merged in fp32, keys and values packed to be
    sent, and backward all three gradients accumulated.

    Bytes as torch's ring attention moves them (torch.distributed.tensor.experimental, `_SDPAMerger` and
    `_templated_ring_attention_backward`), each operation by itself.
    """
    if spec.knob("cp", "exchange", "all_gather") != "ring":
        return 0.0
    results, sent = spec.shape.num_heads * spec.shape.head_dim / spec.size("tp"), kv_width(spec)
    forward, backward = 32 * results + 4 * sent, 12 * results + 24 * sent
    moved = (1 + spec.work.number("attention.recomputed")) * forward + backward
    return (spec.size("cp") - 1) * spec.tokens * moved / (target.bytes_per_s * efficiency.eager)
