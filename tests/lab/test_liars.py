"""Techniques that cheat, through the real ladder: each is named for what it is, whatever parity it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rush.lab.ladder.climb import Climb, climb
from rush.lab.ladder.ladder_file import load_ladder
from rush.lab.parity import differences as kinds
from rush.lab.trial import runner
from rush.records.ladder import LadderRecord, RungRecord

LIAR = Path(__file__).parent / "planted" / "liar.py"
LadderFile = Callable[..., Path]
NAMED = {
    "late": ("late", kinds.FEWER_ROWS),
    "late_inside": ("late", kinds.OTHER_GRADIENT),
    "watched": ("late", kinds.OTHER_CURVE),
    "slow": ("late", kinds.OTHER_RATE),
    "gradient": ("", kinds.OTHER_GRADIENT),
    "skipped": ("", kinds.UNMOVED),
    "labels": ("", kinds.FEWER_LABELS),
    "repeated": ("", kinds.REPEATED),
    "cached": ("", kinds.CACHED),
    "seed": ("", kinds.OTHER_START),
    "rate": ("", kinds.OTHER_RATE),
    "order": ("", kinds.OTHER_ORDER),
}
"""When each is found out, and its name."""
BESIDE = ("nothing", "memory")
"""They train as they should: evidence and memory are made up."""


@pytest.fixture(name="climbed")
def _climbed(
    ladder_file: LadderFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Sequence[str]], LadderRecord]:
    """Climbs a ladder whose rungs are liars, each alone on the base."""

    def execute(self: Any, spec: Mapping[str, Any], *given: Any, **options: Any) -> Any:
        # A profile takes longer than all the rest; only made-up evidence is found out by it.
        watched = spec.get("profile") and not any(f'kind = "{kind}"' in spec["recipe"] for kind in NAMED)
        return runner.TrialFolder.execute(self, {**spec, "profile": watched}, *given, **options)

    monkeypatch.setattr(runner.Bench, "execute", execute, raising=False)
    monkeypatch.setattr(Climb, "_live", lambda self, state: None)

    def climb_liars(parity: str, wanted: Sequence[str]) -> LadderRecord:
        file = tmp_path / "liar.py"
        declared = LIAR.read_text().replace("PARITY = Parity.STATISTICAL", f"PARITY = Parity.{parity}")
        assert f"PARITY = Parity.{parity}" in declared
        file.write_text(declared)
        path = ladder_file([f'{{name = "liar", kind = "{kind}", keep = false}}' for kind in wanted])
        return climb(load_ladder(str(path)), tmp_path / f"out-{parity}", extra_techniques=[file])

    return climb_liars


def _check(record: LadderRecord, wanted: Sequence[str]) -> None:
    rungs: dict[str, RungRecord] = {rung["name"]: rung for rung in record["rungs"]}
    base = rungs["base"]
    assert base["parity"] is not None
    assert (base["parity"]["verdict"], base["parity"]["measured"]) == ("equal", "same bits")
    assert base["peak_memory_bytes"] is not None
    for kind in wanted:
        rung = rungs[f"liar(kind={kind})"]
        parity = rung["parity"]
        assert rung["tokens_per_s"] is not None, rung["reason"]
        assert parity is not None
        if kind in BESIDE:
            assert (parity["verdict"], parity["measured"]) == ("equal", "same bits"), parity["why"]
            continue
        when, name = NAMED[kind]
        assert parity["verdict"] == "different", kind
        assert "different" in rung["verdict"], kind
        assert parity["kind"] == name, (kind, parity["why"])
        assert parity["measured"] is None
        told = f"{when}: {name}: " if when else f"{name}: "
        assert parity["why"].startswith(told), (kind, parity["why"])
    if "nothing" in wanted:
        assert rungs["liar(kind=nothing)"]["verdict"] == "no effect"
        assert "evidence without effect" in str(rungs["liar(kind=nothing)"]["reason"])
    if "memory" in wanted:
        moved = rungs["liar(kind=memory)"]
        assert "memory moved elsewhere" in str(moved["reason"])
        assert moved["peak_memory_bytes"] is not None
        assert moved["peak_memory_bytes"] > base["peak_memory_bytes"] + 60e6
        assert "smaller" not in moved["verdict"]


def test_every_liar_is_named_for_what_it_is(
    climbed: Callable[[str, Sequence[str]], LadderRecord],
) -> None:
    """By the loosest promise, which asks for the least."""
    wanted = [*NAMED, *BESIDE]
    _check(climbed("STATISTICAL", wanted), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("parity", ["EXACT", "CLOSE"])
def test_the_name_does_not_depend_on_what_is_promised(
    climbed: Callable[[str, Sequence[str]], LadderRecord], parity: str
) -> None:
    wanted = [*NAMED, *BESIDE]
    _check(climbed(parity, wanted), wanted)
