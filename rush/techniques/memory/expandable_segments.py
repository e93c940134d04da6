"""GPU memory in segments that grow and shrink, so that freed memory is not lost in gaps.

The allocator takes memory from the driver in segments of fixed size and cuts tensors from them. When sizes change (rows
of unequal lengths, tensors of many gigabytes at long sequences), what is free lies in pieces between what is in use:
all of it together would do, no single piece does, and the step runs out of memory with gigabytes unused. With this
setting a segment is a range of addresses that pages are mapped into and taken out of again, so that pieces that are
free can be handed back one by one. The bytes that tensors take stay the same, and so does the speed; what is saved is
what was reserved and not used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Stage,
    Technique,
    needs_cuda,
)

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user's own settings of the allocator stand; the first that is set counts."""


def settings(growing: bool | None) -> str:
    """The user's settings of the allocator with this one in them; None: as the user has it."""
    own = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    if growing is None:
        return (
            own
            if "expandable_segments" in own
            else ",".join(filter(None, [own, "expandable_segments:False"]))
        )
    rest = re.sub(r"expandable_segments:\w+", "", own)
    kept = re.sub(r",(?=,|$)|^,", "", rest)
    return ",".join(filter(None, [kept, f"expandable_segments:{growing}"]))


class ExpandableSegments:
    """The surroundings of a step in which what is allocated lies in segments that grow."""

    def __init__(self) -> None:
        self.entered = False

    @contextmanager
    def segments(self) -> Iterator[None]:
        if not self.entered:
            torch.cuda.empty_cache()  # else steps would begin with what building left free, in segments that do not grow
            self.entered = True
        tell(settings(True))
        try:
            yield
        finally:
            tell(settings(None))

    def seen(self) -> Sequence[Mapping[str, Any]]:
        """What the allocator holds of the device."""
        found: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return found


def tell(words: str) -> None:
    """Give the allocator these settings; they replace all others, so the user's own are among them."""
    known = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (known or torch.cuda.memory._set_allocator_settings)(words)


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    growing = ExpandableSegments()
    build.facts["growing"] = growing
    build.step_contexts.append(growing.segments)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """The allocator's own list of segments: steps were given memory in some that grow."""
    segments = seen.facts["growing"].seen() if "growing" in seen.facts else ()
    growing = [segment for segment in segments if segment.get("is_expandable")]
    size, used = (sum(segment[key] for segment in growing) for key in ("total_size", "allocated_size"))
    whole = sum(segment["total_size"] for segment in segments)
    return Proof(
        size > 0,
        f"{size / 2**20:,.0f} of {whole / 2**20:,.0f} MiB reserved lie in segments that grow, {used / 2**20:,.0f} MiB of "
        "it in use between steps",
    )


technique = Technique(
    name="expandable_segments",
    stage=Stage.ENV,
    apply=apply,
    requires=(needs_cuda,),
    conflicts=("cuda_graph",),
    reasons={
        "cuda_graph": "a recording holds all memory of a step for itself, where nothing is freed or cut anew"
    },
    claim=Claim(
        "bytes reserved and not used",
        -0.9,
        regime="sizes that change from step to step, or tensors of gigabytes; nothing where all steps are alike and small",
        source="PyTorch documentation, CUDA semantics, `expandable_segments`, which gives no figure; ours is what is left "
        "when only pages of 20 MiB that are in use in part are lost",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(MemoryEffect("gaps", 0.1, "what is free is handed back by pages"),),
    # A trial tells what tensors take, which stays the same.
    settings=(),
)
