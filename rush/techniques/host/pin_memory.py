"""Batches in pinned host memory, for asynchronous copies to the device.

Pageable memory must first be copied into a pinned buffer by the driver, and the host waits for that. From
pinned memory the device copies asynchronously. Token ids are small, so for a language model the gain is
small too; it matters where steps are a few milliseconds.
"""

from __future__ import annotations

import rush.techniques.api.contract as api


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.loader_options["pin"] = True


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The batches are pinned, and the profile shows copies from pinned memory."""
    copies = [name for name in seen.kernels if "Memcpy HtoD" in name]
    return api.Proof(
        seen.pinned and any("Pinned" in name for name in copies),
        f"the batches are {'pinned' if seen.pinned else 'pageable'}; copies: {', '.join(copies) or 'none seen'}",
    )


technique = api.Technique(
    name="pin_memory",
    stage=api.Stage.DATA,
    apply=apply,
    requires=(api.needs_cuda,),
    claim=api.Claim(
        "host-to-device rate",
        1.0,
        regime="pinned against pageable memory over PCIe",
        source="CUDA C++ Best Practices Guide, pinned memory",
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
)
