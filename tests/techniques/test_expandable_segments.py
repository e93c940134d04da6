"""Segments that grow: what the allocator is told, what counts as having seen them, and the hint on fragmentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rush.errors import MachineError
from rush.hardware import fragmentation_hint, probe
from rush.recipe_io import load_recipe
from rush.techniques import check
from rush.techniques.api.contract import Observation
from rush.techniques.api.facts import Facts
from rush.techniques.memory.expandable_segments import VARIABLES, ExpandableSegments, evidence, settings

RAN_OUT = (
    "CUDA out of memory. Tried to allocate 9.49 GiB. GPU 0 has a total capacity of 139.80 GiB of which 71.86 GiB is free. "
    "Of the allocated memory 58.79 GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("own", "inside", "outside"),
    [
        ("", "expandable_segments:True", "expandable_segments:False"),
        ("expandable_segments:True", "expandable_segments:True", "expandable_segments:True"),
        ("max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True",
         "max_split_size_mb:128,expandable_segments:False"),
        ("expandable_segments:False,roundup_power2_divisions:[256:1,512:2]",
         "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
         "expandable_segments:False,roundup_power2_divisions:[256:1,512:2]"),
        ("a:1,expandable_segments:False,b:2", "a:1,b:2,expandable_segments:True", "a:1,expandable_segments:False,b:2"),
    ],
)  # fmt: skip
def test_the_users_own_settings_stay(
    own: str, inside: str, outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLES[1], own)
    assert settings(True) == inside
    assert settings(None) == outside


def test_a_step_that_fails_leaves_the_setting_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    monkeypatch.setattr("rush.techniques.memory.expandable_segments.set_allocator", told.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("emptied"))
    growing = ExpandableSegments()

    def step() -> None:
        with growing.segments():
            raise ValueError("a step that fails")

    for _ in range(2):
        with pytest.raises(ValueError, match="a step that fails"):
            step()
    pair = ["expandable_segments:True", "expandable_segments:False"]
    assert told == ["emptied", *pair, *pair]


def seen(segments: list[dict[str, Any]] | None) -> Observation:
    nothing: dict[str, Any] = dict.fromkeys(Observation.__dataclass_fields__)
    growing = ExpandableSegments()
    growing.seen = lambda: segments or []  # type: ignore[method-assign]
    facts = Facts()
    if segments is not None:
        facts.note(growing)
    return Observation(**{**nothing, "facts": facts})


def test_evidence_needs_memory_in_segments_that_grow() -> None:
    fixed = {"total_size": 2**30, "allocated_size": 2**29, "is_expandable": False}
    grown = {"total_size": 3 * 2**30, "allocated_size": 2**30, "is_expandable": True}
    proof = evidence(seen([fixed, grown]), {})
    assert proof.took_effect
    assert "3,072 of 4,096 MiB" in proof.what
    assert not evidence(seen([fixed]), {}).took_effect
    assert not evidence(seen(None), {}).took_effect


def test_it_needs_a_gpu_and_no_cuda_graph() -> None:
    with pytest.raises(MachineError, match="expandable_segments cannot run here: it needs a CUDA GPU"):
        check(load_recipe("tiny", ["techniques=['expandable_segments']"]), probe("cpu"))


@pytest.mark.parametrize(
    ("unused", "words"),
    [
        ("8.23 GiB", "8.2 of 67.0 GiB lost to fragmentation"),
        ("9216.00 MiB", "9.0 of 67.8 GiB lost to fragmentation"),
        ("1.02 GiB", ""),
    ],
)
def test_much_fragmented_memory_is_reported(unused: str, words: str) -> None:
    told = fragmentation_hint(RuntimeError(RAN_OUT.format(unused)))
    assert (words in told) if words else not told
    assert fragmentation_hint(MemoryError()) == ""
