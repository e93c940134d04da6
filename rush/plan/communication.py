"""Communication time of a layout, before overlap.

Ranks are numbered as in `rush/parallel`, pp outermost, then ddp, fsdp, cp, tp: an axis is within a node as long as it
and all axes inside it fit there. A ring of n ranks moves (n − 1)/n of a buffer over every link for an all-gather or
reduce-scatter, twice that for an all-reduce. Between nodes a ring's data crosses once for all its ranks there, so all
their network cards carry it. Communication of weights and gradients overlaps with compute; that of tensor parallelism
does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rush.plan.spec import Spec, weights_of
from rush.plan.target import TargetMachine

INNER_TO_OUTER = ("tp", "cp", "fsdp", "ddp", "pp")
NETWORK = 0.65
"""Efficiency of the network for collectives of a layer's size among many nodes. An assumption."""
STRAGGLING = 0.008
"""Fraction of a step lost with each doubling of servers: all wait for the slowest. Published: 2.5 % from 1 to 16 servers, 1.7 % from 4
to 8."""
LATENCY_S = 12e-6
"""Latency of one step of a ring."""


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds of communication per step."""

    behind: float = 0.0
    """Overlaps with compute."""
    late: float = 0.0
    """Once per step, overlaps with the last backward pass."""
    waiting: float = 0.0
    """Exposed."""

    def __add__(self, other: CommunicationTime) -> CommunicationTime:
        return CommunicationTime(
            self.behind + other.behind, self.late + other.late, self.waiting + other.waiting
        )


def bandwidth(spec: Spec, target: TargetMachine, axis: str, reached: float) -> float:
    """Bytes per second and rank of a ring over this axis."""
    inside = math.prod(spec.size(name) for name in INNER_TO_OUTER[: INNER_TO_OUTER.index(axis)])
    size = spec.size(axis)
    if inside * size <= target.devices_per_node:
        return reached * target.link_bytes_per_s
    # The rings that leave a node share its network cards.
    cards = target.network_cards / min(inside, target.devices_per_node)
    return min(reached * target.link_bytes_per_s, NETWORK * target.network_bytes_per_s * cards)


def ring(bytes_: float, size: int, rate: float, trips: int = 1) -> float:
    """Seconds of an all-gather or reduce-scatter of a buffer (an all-reduce: two trips) among `size` ranks."""
    if size == 1:
        return 0.0
    # With many ranks, trees and several rings limit the number of steps.
    return trips * ((size - 1) / size * bytes_ / rate + min(size - 1, 32) * LATENCY_S)


def communication_time(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """All communication of one rank."""
    return _weights(spec, target, reached) + communication_per_pass(spec, target, reached)


def communication_per_pass(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Communication within passes, which lengthens the bubble of a pipeline."""
    return _tensor(spec, target, reached) + _context(spec, target, reached) + _stages(spec, target, reached)


def _weights(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Gradients of replicas, weights and gradients of shards. Ranks of cp hold the same weights and count too."""
    weights, effects = weights_of(spec), spec.effects
    share = spec.size("tp") * spec.size("pp")
    each = effects.size("gradients", 4)
    blocks = spec.shape.num_layers * (weights.block_linear + weights.block_other)
    held = (blocks + weights.embedding + weights.head) / share
    learned = spec.shape.num_layers * weights.adapters / share if effects.factor("frozen") else held
    shards, replicas, cp = spec.size("fsdp"), spec.size("ddp"), spec.size("cp")
    total = CommunicationTime()
    if shards > 1 or (cp > 1 and spec.uses("fsdp")):
        group, rate = shards * cp, bandwidth(spec, target, "fsdp", reached)
        each_weight = effects.size("gathered", effects.size("parameters", 4))
        linear = spec.shape.num_layers * weights.block_linear / share
        gathered = each_weight * (held - linear) + effects.size("blocks", each_weight) * linear
        per_pass = not effects.factor("gathered")
        gathers = 2 * spec.passes if per_pass else 1
        # Pipeline schedules keep gradients until the last pass.
        scatters = 1 if effects.factor("unsharded_gradients") or spec.size("pp") > 1 else spec.passes
        units = spec.shape.num_layers / spec.size("pp") + 1
        seconds = gathers * ring(gathered, group, rate) + scatters * ring(each * learned, group, rate)
        seconds += (gathers + scatters) * (units - 1) * min(group - 1, 32) * LATENCY_S
        first = ring(gathered / units, group, rate) + ring(each * learned / units, group, rate)
        total += CommunicationTime(behind=max(0.0, seconds - first), waiting=first)
    elif cp > 1:
        rate = bandwidth(spec, target, "cp", reached)
        total += CommunicationTime(late=ring(each * learned, cp, rate, 2))
    if replicas > 1:
        rate = bandwidth(spec, target, "ddp", reached)
        seconds = ring(each * learned / shards, replicas, rate, 2)
        # The last bucket does not overlap.
        total += CommunicationTime(late=0.95 * seconds, waiting=0.05 * seconds)
    return total


def _tensor(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Per block two all-gathers and two reduce-scatters forward, as many backward, and recomputation."""
    size = spec.size("tp")
    if size == 1:
        return CommunicationTime()
    rate = bandwidth(spec, target, "tp", reached)
    stream = spec.tokens * spec.shape.hidden * spec.effects.size("compute", 4)
    blocks = spec.shape.num_layers / spec.size("pp")
    times = 10 + spec.work.number("attention.recomputed")
    seconds = spec.passes * blocks * times * ring(stream, size, rate)
    if spec.shape.qk_norm == "width":  # queries and keys gathered for their norm, and their gradients reduced
        heads = (spec.shape.num_heads + spec.shape.num_kv_heads) * spec.shape.head_dim
        gathered = spec.tokens * heads * spec.effects.size("compute", 4)
        trips = 2 + spec.work.number("attention.recomputed")
        seconds += spec.passes * blocks * trips * ring(gathered, size, rate)
    hides = 0.5 if spec.knob("tp", "async", False) else 0.0
    return CommunicationTime(behind=hides * seconds, waiting=(1 - hides) * seconds)


def _context(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Keys and values of the whole row in every block, and their gradients."""
    size = spec.size("cp")
    if size == 1:
        return CommunicationTime()
    rate = bandwidth(spec, target, "cp", reached)
    width = kv_width(spec)
    row = spec.micro * spec.sequence * width
    compute = spec.effects.size("compute", 4)
    blocks = spec.shape.num_layers / spec.size("pp")
    trips = 2 + spec.work.number("attention.recomputed")
    seconds = spec.passes * blocks * (trips * ring(compute * row, size, rate) + ring(4 * row, size, rate))
    return CommunicationTime(behind=0.5 * seconds, waiting=0.5 * seconds)


def kv_width(spec: Spec) -> float:
    """Elements of keys and values per token that cp communicates; some trainers repeat them for every query head first."""
    heads = spec.shape.num_heads if spec.knob("cp", "repeated", False) else spec.shape.num_kv_heads
    return 2 * heads * spec.shape.head_dim / spec.size("tp")


def _stages(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    size = spec.size("pp")
    if size == 1:
        return CommunicationTime()
    rate = bandwidth(spec, target, "pp", reached)
    stream = spec.tokens * spec.shape.hidden * spec.effects.size("stream", 4) / spec.size("tp")
    seconds = 2 * spec.passes * stream / rate
    return CommunicationTime(behind=0.5 * seconds, waiting=0.5 * seconds)
