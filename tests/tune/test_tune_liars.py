"""Techniques that cheat, through `rush tune`: what behaves in the parity trace and not while it is timed is named, and never wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.cli import main
from rush.lab.parity import differences as kinds
from rush.records.tune import read_tune

LIAR = Path(__file__).parents[1] / "lab" / "planted" / "liar.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("late", kinds.FEWER_ROWS),
        ("late_inside", kinds.OTHER_GRADIENT),
        # Seen by nothing but the losses of the timed steps beside plain fp32's.
        ("watched", kinds.OTHER_CURVE),
    ],
)
def test_what_lies_only_while_it_is_timed_is_named_and_does_not_win(
    kind: str, name: str, small_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "tune",
        str(small_recipe),
        f'techniques=[{{name="liar", kind="{kind}"}}]',
        "--technique",
        str(LIAR),
    ]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--budget", "40s", "--allow", "exact", "--out", str(tmp_path / "out")])
    record = read_tune(tmp_path / "out")
    row = next(row for row in record["candidates"] if row["parity"] and "liar" in row["techniques"])
    parity = row["parity"]
    assert parity is not None
    assert (parity["verdict"], parity["kind"]) == ("different", name), parity["why"]
    assert parity["why"].startswith(f"late: {name}: "), parity["why"]
    assert parity["timed"]["compared"] >= 8, parity["timed"]["why"]
    winner = record["winner"]
    assert winner is not None
    said = capsys.readouterr().out
    assert winner["as_it_stood"] or "liar" not in winner["what"]
    assert "liar" not in said.partition("Won: ")[2].partition(".")[0]
    assert "the speed of the original recipe" not in said or not winner["as_it_stood"]
