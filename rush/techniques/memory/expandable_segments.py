"""Expandable segments of the CUDA caching allocator, against fragmentation.

The allocator takes memory from the driver in segments of fixed size and splits them into blocks. When sizes
change (rows of unequal length, tensors of many gigabytes at long sequences), free memory is fragmented: the
step runs out of memory with gigabytes unused. An expandable segment is a range of virtual addresses into
which pages are mapped and unmapped, so free pages can be released one by one. Allocated bytes and speed
stay the same; what is saved is memory that is reserved but not allocated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import rush.techniques.api.contract as api

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of allocator settings; the first that is set counts."""


def settings(expandable: bool | None) -> str:
    """The user's allocator settings with this one added; None: as the user has it."""
    own = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    if expandable is None:
        return (
            own
            if "expandable_segments" in own
            else ",".join(filter(None, [own, "expandable_segments:False"]))
        )
    rest = re.sub(r"expandable_segments:\w+", "", own)
    kept = re.sub(r",(?=,|$)|^,", "", rest)
    return ",".join(filter(None, [kept, f"expandable_segments:{expandable}"]))


class ExpandableSegments:
    """Context of a step whose allocations use expandable segments."""

    def __init__(self) -> None:
        self.entered = False

    @contextmanager
    def segments(self) -> Iterator[None]:
        if not self.entered:
            torch.cuda.empty_cache()  # free cached segments that are not expandable
            self.entered = True
        set_allocator(settings(True))
        try:
            yield
        finally:
            set_allocator(settings(None))

    def seen(self) -> Sequence[Mapping[str, Any]]:
        """Segments that the allocator has reserved."""
        found: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return found


def set_allocator(text: str) -> None:
    """Replace all allocator settings."""
    known = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (known or torch.cuda.memory._set_allocator_settings)(text)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.step_contexts.append(build.facts.note(ExpandableSegments()).segments)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The allocator's snapshot: steps allocated in expandable segments."""
    noted = seen.facts.noted(ExpandableSegments)
    segments = noted.seen() if noted is not None else ()
    growing = [segment for segment in segments if segment.get("is_expandable")]
    size, used = (sum(segment[key] for segment in growing) for key in ("total_size", "allocated_size"))
    whole = sum(segment["total_size"] for segment in segments)
    return api.Proof(
        size > 0,
        f"{size / 2**20:,.0f} of {whole / 2**20:,.0f} MiB reserved are expandable segments, {used / 2**20:,.0f} MiB of "
        "them allocated between steps",
    )


technique = api.Technique(
    name="expandable_segments",
    stage=api.Stage.ENV,
    apply=apply,
    requires=(api.needs_cuda,),
    conflicts=("cuda_graph",),
    reasons={"cuda_graph": "a captured graph has a static memory pool, in which nothing is freed or split"},
    claim=api.Claim(
        "bytes reserved and not allocated",
        -0.9,
        regime="sizes that change from step to step, or tensors of gigabytes; nothing where all steps are alike and small",
        source="PyTorch documentation, CUDA semantics, `expandable_segments`, which gives no figure; ours is what is left "
        "when only partly used pages of 20 MiB are lost",
        of_memory=True,
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
    memory=(api.MemoryEffect("fragmentation", 0.1, "free pages are released"),),
    # A trial measures allocated bytes, which stay the same.
    settings=(),
)
