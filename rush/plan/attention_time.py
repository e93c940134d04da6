"""How long a block's attention takes: the plain kind by what its scores move, a kernel by its arithmetic.

Plain attention writes every score to memory, and each operation on them reads and writes all of them again. The
operations are those of `PlainAttention` in `rush/models/layers.py`, and what autograd makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rush.plan.communication import kv_width
from rush.plan.efficiencies import Efficiencies
from rush.plan.spec import Spec, matmul_dtype
from rush.plan.target import TargetMachine

FULL_PRECISION = 0.4
"""What is left of a kernel's share where no matrix unit helps it, of the rate of products that have none either: flex_attention
in fp32, the only one measured."""
TILE = 128
"""A kernel multiplies whole tiles, also those on the diagonal, half of which no query may see."""
FORWARD = 0.27
"""What the forward pass takes of a kernel's whole time: two products of seven, as measured 0.18 to 0.29."""
BESIDE = 14
"""Bytes for each number of the result that kernels move besides multiplying: backward the result and its gradient are read for
their sums by row, and the queries' gradient, added up in fp32, is emptied, read and written in 16 bits."""


@dataclass(frozen=True)
class ScoreTraffic:
    """Bytes that operations other than products move for each score, forward and backward."""

    forward: float
    backward: float


EAGER = ScoreTraffic(32, 36)
"""In fp32: scaled (read, written: 8), copied and masked (16), softmax (8); backward softmax (12), masked (16), scaled (8). In 16 bits
scaling and masking move half of it, and casts to fp32 and back as much again."""


def compiled_scores(size: float) -> ScoreTraffic:
    """Scaled, masked and made weights in one kernel; backward another reads weights and gradient twice, for their sums by row
    and for the result."""
    return ScoreTraffic(2 * size, 5 * size)


def attention_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """Seconds of one block's attention. A causal query meets half the keys; plain attention multiplies with all of them."""
    work = spec.work
    if not work.number("attention"):
        again = max(work.number("attention.recomputed"), work.number("scores.recomputed"))
        return _plain(spec, target, efficiency, 1 + again)
    shape, dtype = spec.shape, matmul_dtype(spec)
    width = shape.num_heads * shape.head_dim / spec.size("tp")
    arithmetic = 6 * spec.tokens * width * spec.sequence * (1 + FORWARD * work.number("attention.recomputed"))
    if target.kind != "cuda":
        # Kernels' shares are of a GPU's matrix units. A CPU has none: there a kernel multiplies as products do.
        return arithmetic / (target.rate(dtype) * efficiency.matmul.get(dtype, 1.0))
    arithmetic *= 1 + TILE / spec.sequence
    reached = efficiency.attention.get(work.by["attention"], work.number("attention"))
    reached *= efficiency.wide_heads if shape.head_dim >= 128 else 1.0
    reached *= FULL_PRECISION if dtype == "float32" else 1.0
    beside = BESIDE * spec.tokens * width / (target.bytes_per_s * efficiency.fused)
    return arithmetic / (target.rate(dtype) * reached) + beside


def _plain(spec: Spec, target: TargetMachine, efficiency: Efficiencies, forwards: float) -> float:
    shape, dtype, size = spec.shape, matmul_dtype(spec), spec.effects.size("compute", 4)
    scores = spec.tokens * shape.num_heads / spec.size("tp") * spec.sequence
    # Two products forward and four backward write or read the scores once each, and are bound by that or by arithmetic.
    multiplied = 2 * shape.head_dim / (target.rate(dtype) * efficiency.matmul.get(dtype, 1.0))
    product = max(multiplied, size / (target.bytes_per_s * efficiency.fused))
    fused = bool(spec.work.number("stream.fused"))
    moved = compiled_scores(size) if fused else EAGER
    rate = target.bytes_per_s * (efficiency.fused if fused else efficiency.eager)
    forward, backward = moved.forward / rate + 2 * product, moved.backward / rate + 4 * product
    return scores * (forwards * forward + backward)


def ring_time(spec: Spec, target: TargetMachine, efficiency: Efficiencies) -> float:
    """One block's work besides attention where keys and values go round: with each part that comes, results are merged in
    fp32, keys and values laid together to be sent on, and backward all three gradients added up.

    Bytes as torch's ring attention moves them (torch.distributed.tensor.experimental, `_SDPAMerger` and
    `_templated_ring_attention_backward`), each operation by itself.
    """
    if spec.knob("cp", "exchange", "all_gather") != "ring":
        return 0.0
    results, sent = spec.shape.num_heads * spec.shape.head_dim / spec.size("tp"), kv_width(spec)
    forward, backward = 32 * results + 4 * sent, 12 * results + 24 * sent
    moved = (1 + spec.work.number("attention.recomputed")) * forward + backward
    return (spec.size("cp") - 1) * spec.tokens * moved / (target.bytes_per_s * efficiency.eager)
