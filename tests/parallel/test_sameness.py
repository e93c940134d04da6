"""Several ranks learn what one rank learns: gradients, losses, norms, with unequal numbers of labels on the ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.parallel.rank_work import Result, learn, meet_trouble, on_ranks

ZERO = {stage: f"{{name='fsdp', stage='{stage}'}}" for stage in ("parameters", "gradients", "optimizer")}
RING = "{name='cp', exchange='ring'}"
LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "ddp 2": ({"ddp": 2}, ()),
    "ddp 2, every micro batch sent": (
        {"ddp": 2},
        ("{name='ddp', send_once=false, bucket_view=false, bucket_mb=1}",),
    ),
    "fsdp 2, ZeRO-3": ({"fsdp": 2}, (ZERO["parameters"],)),
    "fsdp 2, ZeRO-2": ({"fsdp": 2}, (ZERO["gradients"],)),
    "fsdp 2, ZeRO-1": ({"fsdp": 2}, (ZERO["optimizer"],)),
    "fsdp 2, one unit, fused": ({"fsdp": 2}, ("{name='fsdp', unit='model'}", "fused_adamw")),
    "fsdp 2, prefetch, checkpointing": ({"fsdp": 2}, ("{name='fsdp', prefetch=2}", "checkpoint_full")),
    "ddp 2 × fsdp 2": ({"ddp": 2, "fsdp": 2}, ()),
    "cp 2, gathered": ({"cp": 2}, ()),
    "cp 2, gathered, one run each": ({"cp": 2}, ("{name='cp', balance=false}",)),
    "cp 2, ring": ({"cp": 2}, (RING,)),
    "cp 2, ring, one run each": ({"cp": 2}, ("{name='cp', exchange='ring', balance=false}",)),
    "cp 4, gathered": ({"cp": 4}, ()),
    "cp 4, ring": ({"cp": 4}, (RING,)),
    "ddp 2 × cp 2": ({"ddp": 2, "cp": 2}, ()),
    "fsdp 2 × cp 2": ({"fsdp": 2, "cp": 2}, ()),
    "fsdp 2 × cp 2, ring": ({"fsdp": 2, "cp": 2}, (RING, ZERO["gradients"])),
    "ddp 2 × fsdp 2 × cp 2": ({"ddp": 2, "fsdp": 2, "cp": 2}, ()),
    "tp 2": ({"tp": 2}, ()),
    "tp 2, whole stream": ({"tp": 2}, ("{name='tp', sequence=false}",)),
    "ddp 2 × tp 2": ({"ddp": 2, "tp": 2}, ()),
    "fsdp 2 × tp 2": ({"fsdp": 2, "tp": 2}, ()),
    "cp 2 × tp 2": ({"cp": 2, "tp": 2}, ()),
    "ddp 2 × fsdp 2 × tp 2": ({"ddp": 2, "fsdp": 2, "tp": 2}, ()),
}
QUICK = {
    "gpt2": {"ddp 2", "fsdp 2, ZeRO-3"},
    "llama": {"cp 2, ring"},
}
CASES = [
    pytest.param(family, name, marks=[] if name in QUICK[family] else [pytest.mark.slow])
    for family in QUICK
    for name in LAYOUTS
]
NO_EXCHANGE, OWN_LABELS = "the gradients are never reduced", "every rank divides by its own labels"
RESTART, TWICE = "positions restart on each rank", "labels are counted on every rank"


STEPS, MORE_STEPS = 10, 20
"""Of the quick layouts, and of the slow ones."""


def steps_of(family: str, name: str) -> int:
    return STEPS if name in QUICK[family] else MORE_STEPS


@cache
def one_rank(family: str, steps: int = STEPS) -> Result:
    found: Result = on_ranks(1, learn, family, {}, (), steps)[0]
    return found


@cache
def ranks(family: str, name: str) -> list[Result]:
    layout, techniques = LAYOUTS[name]
    world = int(np.prod(list(layout.values())))
    return on_ranks(world, learn, family, layout, techniques, steps_of(family, name))


def furthest(ours: Result, reference: Result, *, reordered: bool = False) -> dict[str, float]:
    """The largest relative difference of each kind; a gradient's is that of its norm.

    What is `reordered` adds up in another order. One step may be that sensitive: on one rank, too, flash_attention moves the
    norm of Llama's step 16 by 4e-5 (of four layers: 1e-5) and no other by more than 5e-7. Then all norms but one are held,
    and that of step one; losses and gradients are held as always.
    """
    gaps = {
        name: [abs(a - b) / abs(b) for a, b in zip(ours[name], reference[name], strict=True)]
        for name in ("losses", "norms")
    }
    apart = {"losses": max(gaps["losses"]), "norms": max(gaps["norms"])}
    if reordered:
        apart["norms"] = max(gaps["norms"][0], sorted(gaps["norms"])[-2])
    apart["held_out"] = abs(ours["held_out"] - reference["held_out"]) / reference["held_out"]
    assert ours["gradients"].keys() == reference["gradients"].keys()
    apart["gradients"] = max(
        # An adapter's first factor has no gradient yet at step one, on any rank.
        float(np.linalg.norm(ours["gradients"][name] - value) / max(np.linalg.norm(value), 1e-30))
        for name, value in reference["gradients"].items()
    )
    return apart


@pytest.mark.parametrize(("family", "name"), CASES)
def test_ranks_learn_what_one_rank_learns(family: str, name: str) -> None:
    steps = steps_of(family, name)
    found, reference = ranks(family, name), one_rank(family, steps)
    assert len(reference["losses"]) == steps + 1
    assert reference["losses"][-1] < 0.8 * reference["losses"][0], (
        "nothing was learned, so nothing is compared"
    )
    for rank, ours in enumerate(found):
        apart = furthest(ours, reference, reordered=bool({"cp", "tp"} & LAYOUTS[name][0].keys()))
        assert max(apart.values()) < 1e-5, (rank, apart)
        assert ours["labels"] == reference["labels"]
        assert ours["losses"] == found[0]["losses"], "the reported loss is that of all ranks, on each of them"
    unequal = {tuple(ours["own_labels"]) for ours in found}
    layout, _ = LAYOUTS[name]
    parts = int(np.prod([layout.get(axis, 1) for axis in ("ddp", "fsdp", "cp")]))
    assert len(unequal) == parts, "the ranks were to hold unequal numbers of labels"


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_techniques_of_a_layout_take_effect(family: str, name: str) -> None:
    layout, _ = LAYOUTS[name]
    proofs = ranks(family, name)[0]["proofs"]
    assert proofs.keys() >= layout.keys()
    assert all(took_effect for took_effect, _ in proofs.values()), proofs


@pytest.mark.parametrize("bug", [NO_EXCHANGE, pytest.param(OWN_LABELS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("axis", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_planted_bug_is_seen(axis: str, bug: str) -> None:
    techniques = [ZERO["optimizer"]] if axis == "fsdp" else []
    planted: list[Any] = on_ranks(2, learn, "gpt2", {axis: 2}, techniques, STEPS, bug)
    apart = furthest(planted[0], one_rank("gpt2"))
    assert apart["gradients"] > 1e-3, apart
    assert apart["losses"] > 1e-5, apart
    assert planted[0]["proofs"][axis][0] == (bug != NO_EXCHANGE), planted[0]["proofs"]


@pytest.mark.parametrize(
    ("family", "bug"),
    [
        ("gpt2", RESTART),
        *(
            pytest.param(family, bug, marks=pytest.mark.slow)
            for family, bug in [("llama", RESTART), ("gpt2", TWICE), ("gpt2", NO_EXCHANGE)]
        ),
    ],
)
def test_a_planted_bug_of_a_cut_sequence_is_seen(family: str, bug: str) -> None:
    planted: list[Any] = on_ranks(2, learn, family, {"cp": 2}, [], STEPS, bug)
    apart = furthest(planted[0], one_rank(family))
    assert apart["gradients"] > 1e-3, apart
    assert apart["losses"] > 1e-5, apart
    assert planted[0]["proofs"]["cp"][0] == (bug != NO_EXCHANGE), planted[0]["proofs"]


def test_a_rank_holds_its_part_of_parameters_and_moments() -> None:
    whole = one_rank("gpt2")
    for ours in ranks("gpt2", "fsdp 2, ZeRO-3"):
        assert 0.45 < ours["parameter_bytes"] / whole["parameter_bytes"] < 0.55
        assert 0.45 < ours["state_bytes"] / whole["state_bytes"] < 0.55
    for ours in ranks("gpt2", "ddp 2"):
        assert ours["parameter_bytes"] == whole["parameter_bytes"]


@pytest.mark.slow
def test_cut_twice_a_rank_holds_a_quarter() -> None:
    whole = one_rank("llama")
    for ours in ranks("llama", "fsdp 2 × tp 2"):
        assert 0.24 < ours["parameter_bytes"] / whole["parameter_bytes"] < 0.26
        assert 0.24 < ours["state_bytes"] / whole["state_bytes"] < 0.26


@pytest.mark.parametrize(
    ("axis", "techniques"),
    [("fsdp", ("fused_adamw",)), pytest.param("ddp", (), marks=pytest.mark.slow)],
)
def test_an_error_on_one_rank_is_raised_on_all(axis: str, techniques: tuple[str, ...]) -> None:
    first, second = on_ranks(2, meet_trouble, {axis: 2}, techniques)
    assert first["said"] == second["said"]
    fine, empty, diverged = first["said"]
    assert fine.startswith("loss 5.")
    assert diverged == "Diverged: step 3: the loss is nan"
    assert empty.startswith("DataError: step 2 has no label to learn from")
    assert len(set(first["weights"])) == 1, "what is not finite changes nothing, on no rank"
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize(
    ("family", "layout", "technique"),
    [
        ("gpt2", {"ddp": 2}, "accumulate"),
        pytest.param("gpt2", {"fsdp": 2}, "accumulate", marks=pytest.mark.slow),
        pytest.param("gpt2", {"ddp": 2}, "lora", marks=pytest.mark.slow),
        pytest.param("llama", {"ddp": 2}, "fused_projections", marks=pytest.mark.slow),
        pytest.param("llama", {"ddp": 2}, "compile", marks=pytest.mark.slow),
        pytest.param("llama", {"fsdp": 2}, "{name='compile', scope='block'}", marks=pytest.mark.slow),
        pytest.param("gpt2", {"fsdp": 2}, "checkpoint_selective", marks=pytest.mark.slow),
        pytest.param("llama", {"ddp": 2, "fsdp": 2}, "fused_adamw", marks=pytest.mark.slow),
    ],
)
def test_a_technique_does_the_same_on_ranks_as_on_one(
    family: str, layout: dict[str, int], technique: str
) -> None:
    more = ("batch.micro=2",) if technique == "accumulate" else ()
    count = int(np.prod(list(layout.values())))
    reference = on_ranks(1, learn, family, {}, (technique,), 3, "", more)[0]
    found = on_ranks(count, learn, family, layout, (technique,), 3, "", more)
    for ours in found:
        apart = furthest(ours, reference)
        assert max(apart.values()) < 1e-5, apart
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]
