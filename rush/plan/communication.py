"""What the ranks of a layout send each other in a step, and how long that takes if nothing hides it.

Ranks are numbered as `rush/parallel` does, pp outermost, then ddp, fsdp, cp, tp: an axis lies inside a server as long
as it and all axes within it fit there. A ring of n ranks moves (n − 1)/n of a buffer over every link for a gather or a
scatter, twice that for a reduction. Between servers a ring's data crosses once for all its ranks there, so the cards
of all of them carry it. What is exchanged for weights and gradients travels behind the arithmetic; what tensor
parallelism exchanges is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rush.plan.spec import Spec, weights_of
from rush.plan.target import TargetMachine

INNER_TO_OUTER = ("tp", "cp", "fsdp", "ddp", "pp")
NETWORK = 0.65
"""Of the rate of the cards between servers: what collectives of a layer's size reach among many. An assumption."""
STRAGGLING = 0.008
"""Of a step, for each doubling of servers: all wait for the slowest. PublishedRun: 2.5 % from 1 to 16 servers, 1.7 % from 4
to 8."""
LATENCY_S = 12e-6
"""Of one step around a ring inside a server or between two."""


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds of a step's sending."""

    behind: float = 0.0
    """That travels while something is computed."""
    late: float = 0.0
    """That travels once a step, while the last backward pass is computed."""
    waiting: float = 0.0
    """That computing waits for."""

    def __add__(self, other: CommunicationTime) -> CommunicationTime:
        return CommunicationTime(
            self.behind + other.behind, self.late + other.late, self.waiting + other.waiting
        )


def bandwidth(spec: Spec, target: TargetMachine, axis: str, reached: float) -> float:
    """Bytes per second that a ring over this axis moves past every rank."""
    inside = 1
    for name in INNER_TO_OUTER[: INNER_TO_OUTER.index(axis)]:
        inside *= spec.size(name)
    size = spec.size(axis)
    if inside * size <= target.devices_per_node:
        return reached * target.link_bytes_per_s
    # The rings that leave a server share its cards.
    cards = target.network_cards / min(inside, target.devices_per_node)
    return min(reached * target.link_bytes_per_s, NETWORK * target.network_bytes_per_s * cards)


def ring(bytes_: float, size: int, rate: float, trips: int = 1) -> float:
    """Seconds of a gather or scatter of a whole buffer (a reduction: two trips) around `size` ranks."""
    if size == 1:
        return 0.0
    # Beyond a server's worth of ranks, trees and several rings keep the steps few.
    return trips * ((size - 1) / size * bytes_ / rate + min(size - 1, 32) * LATENCY_S)


def communication_time(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """All that one rank takes part in."""
    return _weights(spec, target, reached) + communication_per_pass(spec, target, reached)


def communication_per_pass(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """What belongs to each pass, so that the ranks of a pipeline wait for each other's."""
    return _tensor(spec, target, reached) + _context(spec, target, reached) + _stages(spec, target, reached)


def _weights(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Gradients between copies, weights and gradients of shards. Context ranks hold the same weights: they are folded in."""
    weights, effects = weights_of(spec), spec.effects
    share = spec.size("tp") * spec.size("pp")
    each = effects.size("gradients", 4)
    if effects.factor("frozen"):
        learned = spec.shape.num_layers * weights.adapters / share
    else:
        learned = (
            spec.shape.num_layers * (weights.block_linear + weights.block_other)
            + weights.embedding
            + weights.head
        ) / share
    shards, copies, cp = spec.size("fsdp"), spec.size("ddp"), spec.size("cp")
    total = CommunicationTime()
    if shards > 1 or (cp > 1 and spec.uses("fsdp")):
        group, rate = shards * cp, bandwidth(spec, target, "fsdp", reached)
        held = (
            spec.shape.num_layers * (weights.block_linear + weights.block_other)
            + weights.embedding
            + weights.head
        ) / share
        each_weight = effects.size("gathered", effects.size("parameters", 4))
        codes = spec.shape.num_layers * weights.block_linear / share
        gathered = each_weight * (held - codes) + effects.size("blocks", each_weight) * codes
        per_pass = not effects.factor("gathered")
        gathers = 2 * spec.passes if per_pass else 1
        # A pipeline's schedules keep gradients until the last pass.
        scatters = 1 if effects.factor("unsharded_gradients") or spec.size("pp") > 1 else spec.passes
        units = spec.shape.num_layers / spec.size("pp") + 1
        seconds = gathers * ring(gathered, group, rate) + scatters * ring(each * learned, group, rate)
        seconds += (gathers + scatters) * (units - 1) * min(group - 1, 32) * LATENCY_S
        first = ring(gathered / units, group, rate) + ring(each * learned / units, group, rate)
        total += CommunicationTime(behind=max(0.0, seconds - first), waiting=first)
    elif cp > 1:
        rate = bandwidth(spec, target, "cp", reached)
        total += CommunicationTime(late=ring(each * learned, cp, rate, 2))
    if copies > 1:
        rate = bandwidth(spec, target, "ddp", reached)
        seconds = ring(each * learned / shards, copies, rate, 2)
        # Nothing hides the last bucket.
        total += CommunicationTime(late=0.95 * seconds, waiting=0.05 * seconds)
    return total


def _tensor(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Per block two gathers and two scatters of the stream forward, as many backward, and what is computed again."""
    size = spec.size("tp")
    if size == 1:
        return CommunicationTime()
    rate = bandwidth(spec, target, "tp", reached)
    stream = spec.tokens * spec.shape.hidden * spec.effects.size("compute", 4)
    blocks = spec.shape.num_layers / spec.size("pp")
    times = 10 + spec.work.number("attention.recomputed")
    seconds = spec.passes * blocks * times * ring(stream, size, rate)
    hides = 0.5 if spec.knob("tp", "async", False) else 0.0
    return CommunicationTime(behind=hides * seconds, waiting=(1 - hides) * seconds)


def _context(spec: Spec, target: TargetMachine, reached: float) -> CommunicationTime:
    """Keys and values of the whole row in every block, and their gradients back."""
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
    """Numbers of keys and values that context ranks exchange for each token; some trainers copy them for every query head before."""
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
