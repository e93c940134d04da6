"""Weights, gradients and moments of one rank, with sharding: the memory of a step that does not depend on its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from rush.plan.spec import Spec, Weights, block_matrices

WORKSPACE = 64 * 2**20
"""cuBLAS and cuBLASLt workspaces, 32 MiB each on Hopper."""


MATRICES_AT_ONCE = 2**25
"""Elements of matrices that Muon updates at once (as in its update)."""


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline rank: its blocks, and whether it has the first and the last stage."""

    blocks: int
    first: bool
    last: bool
    in_flight: float
    """Micro batches in flight; fractional with several stages per rank."""


@dataclass(frozen=True)
class RankState:
    """Weights, gradients and moments of one rank, with sharding and communication buffers."""

    spec: Spec
    stage: PipelineStage
    weights: Weights

    def _local(self, count: float, *, linear: bool = True) -> float:
        return count / self.spec.size("tp") if linear else count

    @cached_property
    def block(self) -> float:
        return self._local(self.weights.block_linear) + self.weights.block_other

    @cached_property
    def ends(self) -> float:
        """Parameters outside the blocks on this rank."""
        first, last = self.stage.first, self.stage.last
        tied = self.spec.shape.tied_head
        count = self._local(self.weights.embedding) if first or (last and tied) else 0.0
        return count + (self._local(self.weights.head) + self.weights.final if last else 0.0)

    @cached_property
    def bytes_per_weight(self) -> float:
        return self.spec.effects.size("parameters", 4)

    @cached_property
    def parameters(self) -> float:
        effects, each = self.spec.effects, self.bytes_per_weight
        linear = effects.size("blocks", each) * self._local(self.weights.block_linear)
        block = linear + each * (self.weights.block_other + self._local(self.weights.adapters))
        return self.stage.blocks * block + each * self.ends

    def trained(self, blocks: int | None = None) -> float:
        """Trained parameters of this many blocks and outside of them."""
        count = self.stage.blocks if blocks is None else blocks
        if self.spec.effects.factor("frozen"):
            return count * self._local(self.weights.adapters)
        return count * self.block + self.ends

    @cached_property
    def _trained(self) -> float:
        return self.trained()

    def gradients(self, blocks: int) -> float:
        """Bytes of gradients once this many blocks are done."""
        effects, shards = self.spec.effects, self.spec.shards
        each = effects.size("gradients", 4)
        full = self._trained
        always = self.spec.passes > 1 or (self.spec.size("ddp") > 1 and shards == 1)
        count = full if always or blocks >= self.stage.blocks else self.trained(blocks)
        if blocks == 0 and not always:
            return 0.0
        if shards > 1:
            unit, ends = (
                (self._local(self.weights.adapters), 0.0)
                if effects.factor("frozen")
                else (self.block, self.ends)
            )
            at_work = 0.0 if blocks == 0 else 2 * unit + ends
            parts = 0.0 if effects.factor("on_host") else count / shards
            count = count if self.keeps_unsharded else parts + at_work
        elif blocks and not always and not effects.factor("frozen"):
            count -= self.ends if blocks < self.stage.blocks else 0.0  # the LM head's is counted separately
        return each * count * (1 + effects.factor("buckets"))

    @cached_property
    def gathered(self) -> float:
        if self.spec.shards == 1:
            return 0.0
        each = self.spec.effects.size("gathered", self.bytes_per_weight)
        # Pipeline schedules do not reshard between the backward passes of a step.
        blocks = self.stage.blocks if self.spec.effects.factor("gathered") or self.spec.size("pp") > 1 else 2
        linear = self.spec.effects.size("blocks", each) * self._local(self.weights.block_linear)
        block = linear + each * (self.weights.block_other + self._local(self.weights.adapters))
        return blocks * block + each * self.ends

    @cached_property
    def keeps_unsharded(self) -> bool:
        """Whether gradients stay unsharded until the end of a step, by knob or because of a pipeline schedule."""
        return bool(self.spec.effects.factor("unsharded_gradients")) or self.spec.size("pp") > 1

    def other_streams(self, *, counted: bool) -> float:
        """Memory that other streams cannot reuse: gradient shards and gathered weights are allocated on their own streams, and the
        allocator keeps freed blocks per stream. `counted`: gradient shards are in the sum already."""
        effects, shards = self.spec.effects, self.spec.shards
        if shards == 1 or self.spec.device != "cuda":
            return 0.0
        parts = effects.size("gradients", 4) * self._trained / shards
        parts = 0.0 if effects.factor("on_host") or (counted and not self.keeps_unsharded) else parts
        each = effects.size("gathered", self.bytes_per_weight)
        block = effects.size("blocks", each) * self._local(self.weights.block_linear)
        return parts + max(2 * block, each * self.ends)

    def state(self, blocks: int) -> dict[str, float]:
        return {**self._always, "gradients": self.gradients(blocks)}

    @cached_property
    def _always(self) -> dict[str, float]:
        effects, shards = self.spec.effects, self.spec.shards
        # With CPU offload the shards are on the host; only gathered weights are on the device.
        here = 0.0 if effects.factor("on_host") else 1.0
        trained = here * self._trained / shards
        return {
            "parameters": here * self.parameters / shards,
            "gradients": 0.0,
            "optimizer": here * self._optimizer() / shards * effects.factor("optimizer"),
            "master": trained * 4 * effects.factor("master"),
            # With adapters the reference is the model without them.
            "reference": here * self.parameters / shards
            if self.spec.reference and not effects.factor("frozen")
            else 0.0,
            "gathered": self.gathered,
        }

    def _optimizer(self) -> float:
        """Bytes of the optimizer's state, unsharded."""
        each = self.spec.effects.size("optimizer", 8)
        blocks = self.spec.effects.size("optimizer.blocks", each)
        if blocks == each:
            return each * self._trained
        linear = self.stage.blocks * self._local(self.weights.block_linear)
        return each * (self._trained - linear) + blocks * linear

    def between_steps(self) -> dict[str, float]:
        """State between steps: gradients are freed, communication buckets stay."""
        effects = self.spec.effects
        buckets = effects.size("gradients", 4) * self._trained * effects.factor("buckets")
        return {**self._always, "gathered": 0.0, "gradients": buckets if self.spec.shards == 1 else 0.0}

    def on_host(self) -> float:
        """Bytes of this rank's shards in host memory."""
        effects, shards = self.spec.effects, self.spec.shards
        if not effects.factor("on_host"):
            return 0.0
        each = effects.size("optimizer", 8) + effects.size("gradients", 4) + 4 * effects.factor("master")
        return (self.parameters + each * self._trained) / shards

    def casts(self, *, always: bool = False, with_head: bool = True) -> float:
        """Weights cast to the matmul dtype. Autocast caches its casts until the end of the forward pass."""
        effects = self.spec.effects
        each = effects.size("casts", 0)
        eager = bool(effects.factor("logits.copies"))
        head = (
            self.spec.shape.vocab_size * self.spec.shape.hidden
            if self.stage.last and eager and with_head
            else 0
        )
        blocks = self.stage.blocks * self._local(self.weights.block_linear)
        if self.spec.effects.size("blocks", 4) < 2:
            return 0.0  # quantized weights are dequantized for each matmul
        frozen_too = always and eager
        return (
            each * (blocks * (1.0 if frozen_too else effects.factor("casts")) + self._local(head))
            if each
            else 0.0
        )

    def head_gradient(self) -> float:
        if self.spec.effects.factor("frozen") or not self.stage.last:
            return 0.0
        each = self.spec.effects.size("gradients", 4)
        return each * self._local(self.spec.shape.vocab_size * self.spec.shape.hidden)

    def second_head(self) -> float:
        """A tied embedding briefly has two gradients, of lookup and LM head."""
        tied = self.spec.shape.tied_head and self.stage.first and self.stage.last
        return self.head_gradient() if tied else 0.0

    def update(self) -> float:
        effects = self.spec.effects
        largest = self._local(self.weights.largest) / self.spec.shards
        if each := effects.size("update.matrices", 0):
            return each * elements_at_once(self.spec, self.stage.blocks)
        if effects.factor("frozen"):
            largest = self._local(self.weights.adapters)
        copies = 2 + (1 if effects.factor("master") else 0)
        return copies * largest * max(effects.size("optimizer", 8) / 2, 1) * effects.factor("update")

    def buffers(self) -> float:
        return (WORKSPACE if self.spec.device == "cuda" else 0) + 24 * self.spec.tokens


def elements_at_once(spec: Spec, blocks: int) -> float:
    """Elements of a rank's share of the matrices of one shape that are updated at once."""
    alike = Counter(block_matrices(spec.shape))
    most = 0.0
    for (rows, columns), number in alike.items():
        group = max(spec.shards, MATRICES_AT_ONCE // (rows * columns))
        most = max(most, min(group, number * blocks) * rows * columns / spec.shards)
    return most
