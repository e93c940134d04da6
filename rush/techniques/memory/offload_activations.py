"""Offload saved activations to host memory.

A block's saved activations are copied to the host as soon as they are computed and fetched back for the
backward pass: device memory holds about one block's activations. The price is two transfers over PCIe (or
NVLink-C2C, where it is cheap). It beats recomputation only where that link is fast for the model's FLOPs:
long sequences, wide layers, pinned memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.parallel.sharded import local_tensor
from rush.techniques.api.seams import override_forward
from rush.techniques.memory.on_host import OffloadedActivations, OffloadToHost

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device."""


def is_offloaded(tensor: Tensor, stay: frozenset[int]) -> bool:
    """Large enough, and not one of the weights (by their storage)."""
    size = tensor.numel() * tensor.element_size()
    return size >= SMALLEST_BYTES and tensor.untyped_storage().data_ptr() not in stay


def apply(build: api.Build, knobs: api.Knobs) -> None:
    moved = build.facts.note(OffloadedActivations()).moved
    pin = bool(knobs["pin"])

    def offloaded(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
        # Weights stay on the device.
        weights = frozenset(local_tensor(p).untyped_storage().data_ptr() for p in self.parameters())
        with OffloadToHost(lambda tensor: is_offloaded(tensor, weights), moved, pin):
            out: Tensor = type(self).forward(self, x_btd, **rest)
        return out

    for block in build.model.blocks:
        override_forward(block, offloaded)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Activations were copied to the host, and the profile shows the copies."""
    moved = (seen.facts.noted(OffloadedActivations) or OffloadedActivations()).moved["bytes"]
    copies = [name for name in seen.kernels if "Memcpy DtoH" in name]
    return api.Proof(
        moved > 0 and bool(copies),
        f"{moved / 2**20:.1f} MiB of activations were offloaded since the build ({', '.join(copies) or 'no copies seen'}); "
        f"{seen.held_bytes / 2**20:.1f} MiB of saved activations stayed on the device",
    )


def _pin_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """All offloaded tensors lie in pinned memory, or none does."""
    moved = (seen.facts.noted(OffloadedActivations) or OffloadedActivations()).moved
    pinned, pageable = moved["pinned"], moved["pageable"]
    return api.Proof(
        pinned + pageable > 0 and (pageable == 0 if knobs["pin"] else pinned == 0),
        f"{pinned} tensors in pinned memory, {pageable} in pageable memory",
    )


technique = api.Technique(
    name="offload_activations",
    stage=api.Stage.MEMORY,
    apply=apply,
    requires=(api.needs_cuda,),
    conflicts=("checkpoint_full", "checkpoint_selective", "compile", "cuda_graph"),
    knobs={
        "pin": api.KnobRange(
            (True, False),
            "pinned host memory: faster, asynchronous copies; memory that cannot be swapped",
            _pin_seen,
        )
    },
    claim=api.Claim(
        "activation bytes on the device",
        -0.9,
        regime="16 blocks: activations of one block on the device at a time",
        source="arithmetic; torch.autograd.graph.save_on_cpu in the PyTorch documentation",
        of_memory=True,
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
    memory=(
        api.MemoryEffect("activations", 1.0, "one block at a time on the device", keeps=()),
        api.MemoryEffect("casts", 0.0, "offloaded as well"),
    ),
    work=(api.WorkEffect("offloaded", 1.0),),
)
