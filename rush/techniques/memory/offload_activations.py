"""Activations wait in host memory.

What a block keeps for its backward pass is copied to the host as soon as it is made and fetched back when
it is needed: device memory then holds about one block's activations. The price is two trips over PCIe
(or NVLink-C2C, where it is cheap). It beats recomputation only where that link is fast for the model's
arithmetic: long sequences, wide layers, pinned memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rush.parallel.sharded import local_tensor
from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Stage,
    Technique,
    WorkEffect,
    needs_cuda,
)
from rush.techniques.api.seams import override_forward
from rush.techniques.memory.on_host import OffloadToHost

SMALLEST_BYTES = 64 * 1024
"""What is smaller than this stays: the trip would cost more than the room."""


def is_offloaded(tensor: Tensor, stay: frozenset[int]) -> bool:
    """Large enough for the trip, and not one of the weights (by the addresses of their memory)."""
    size = tensor.numel() * tensor.element_size()
    return size >= SMALLEST_BYTES and tensor.untyped_storage().data_ptr() not in stay


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    moved: Counter[str] = Counter()
    build.facts["offloaded"] = moved
    pin = bool(knobs["pin"])

    def offloaded(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
        # Weights stay: they are on the device anyway.
        weights = frozenset(local_tensor(p).untyped_storage().data_ptr() for p in self.parameters())
        with OffloadToHost(lambda tensor: is_offloaded(tensor, weights), moved, pin):
            out: Tensor = type(self).forward(self, x_btd, **rest)
        return out

    for block in build.model.blocks:
        override_forward(block, offloaded)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Activations were copied to the host (bytes counted), and the profile shows the copies."""
    moved = seen.facts.get("offloaded", Counter())["bytes"]
    copies = [name for name in seen.kernels if "Memcpy DtoH" in name]
    return Proof(
        moved > 0 and bool(copies),
        f"{moved / 2**20:.1f} MiB of activations went to the host since the build ({', '.join(copies) or 'no copies seen'}); "
        f"{seen.held_bytes / 2**20:.1f} MiB stayed on the device between forward and backward",
    )


technique = Technique(
    name="offload_activations",
    stage=Stage.MEMORY,
    apply=apply,
    requires=(needs_cuda,),
    conflicts=("checkpoint_full", "checkpoint_selective", "compile", "cuda_graph"),
    knobs={
        "pin": KnobRange(
            (True, False), "pinned host memory: faster copies that overlap, memory that cannot swap"
        )
    },
    claim=Claim(
        "activation bytes on the device",
        -0.9,
        regime="16 blocks: those of one block are on the device at a time",
        source="arithmetic; torch.autograd.graph.save_on_cpu in the PyTorch documentation",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(
        MemoryEffect("activations", 1.0, "one block's are on the device at a time", keeps=()),
        MemoryEffect("casts", 0.0, "they go to the host as well"),
    ),
    work=(WorkEffect("offloaded", 1.0),),
)
