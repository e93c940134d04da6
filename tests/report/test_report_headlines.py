"""What the page says in words follows from the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rush.errors import DataError, RecipeError
from rush.records import ladder as record
from rush.report import claims, compare, headlines, write_comparison
from rush.report.ladder import (
    ClaimView,
    GainView,
    LadderView,
    MeasureView,
    RungView,
    careful_ratio,
    read_ladder,
)
from rush.report.symbols import SIGNS
from tests.report import made_up
from tests.report.test_report_page import Reader


def _plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> LadderView:
    return read_ladder(made_up.write(tmp_path_factory.mktemp("ladder"), made_up.made_up_ladder()))


def test_every_verdict_of_the_record_has_its_own_words_and_a_sign_that_is_drawn() -> None:
    assert set(headlines.VERDICTS) == set(record.VERDICTS)
    assert {verdict.sign for verdict in headlines.VERDICTS.values()} <= set(SIGNS)


def test_the_headline_names_the_fastest_equal_rung_and_what_was_faster_but_different(
    ladder: LadderView,
) -> None:
    said = _plain(headlines.headline(ladder))
    assert said.startswith("From Plain fp32 at 5.12k tok/s to Batch of 8 rows at 71.4k tok/s: ×13.9")
    assert "Pure bf16 weights reached 83.5k tok/s but learns differently." in said


def test_a_rung_without_a_parity_verdict_never_becomes_the_headline(ladder: LadderView) -> None:
    unproven = replace(ladder.rungs[6], parity=None, title="Unproven", speed=MeasureView(9e9))
    more = replace(ladder, rungs=(*ladder.rungs, unproven))
    found = headlines.credited(more)
    assert found is not None
    assert found.title == "Batch of 8 rows"
    said = headlines.headline(more)
    assert "Unproven reached" in said
    assert "is not proven equal" in said


def test_a_rung_that_took_no_effect_is_not_the_fastest_either(ladder: LadderView) -> None:
    idle = replace(
        ladder.rungs[6], status="no_effect", verdict="no effect", title="Idle", speed=MeasureView(9e9)
    )
    assert "Idle" not in headlines.headline(replace(ladder, rungs=(*ladder.rungs, idle)))


@pytest.mark.parametrize(
    ("metric", "claimed", "ratio", "ci", "outcome"),
    [
        ("tokens_per_s", 0.75, 1.80, (1.77, 1.83), "as claimed or better"),
        ("tokens_per_s", 0.75, 1.73, (1.70, 1.76), "as claimed or better"),
        ("tokens_per_s", 0.75, 1.40, (1.38, 1.42), "less than claimed"),
        ("tokens_per_s", 0.03, 1.00, (0.99, 1.01), "not seen here"),
        ("tokens_per_s", 0.03, 1.01, (0.99, 1.02), "not seen here"),
        ("tokens_per_s", 0.30, 1.08, (0.90, 1.28), "cannot tell"),
        ("tokens_per_s", 0.10, 0.90, (0.88, 0.92), "the opposite here"),
        ("tokens_per_s", -0.25, 0.80, (0.79, 0.81), "as claimed or better"),
        ("tokens_per_s", -0.25, 0.60, (0.59, 0.61), "costs more than claimed"),
        ("model state bytes", -0.5, 1.20, (1.19, 1.21), "not measured as such"),
        ("peak_memory_bytes", -0.4, 1.0, (0.9, 1.1), "as claimed or better"),
        ("peak_memory_bytes", -0.6, 1.0, (0.9, 1.1), "less than claimed"),
    ],
)
def test_a_claim_is_compared_with_the_interval_of_its_own_quantity(
    ladder: LadderView, metric: str, claimed: float, ratio: float, ci: tuple[float, float], outcome: str
) -> None:
    base = replace(ladder.rungs[0], name="before", peak_memory_bytes=100.0)
    rung = replace(
        ladder.rungs[1], claim=ClaimView(metric, claimed, None, None), gain=GainView(ratio, *ci, "before", True),
        peak_memory_bytes=50.0,
    )  # fmt: skip
    found = claims.compare_claim(replace(ladder, rungs=(base, rung)), rung)
    assert found is not None
    assert found.outcome == outcome


def test_drift_throttling_and_foreign_processes_are_reported(ladder: LadderView) -> None:
    assert headlines.warnings(ladder) == []
    assert ladder.drift is not None
    around = {"throttle": ["power"], "foreign_processes": 2, "steady": False}
    hot = replace(ladder.rungs[2], environment=around, ceiling_fraction=1.63)
    troubled = replace(
        ladder, finished=None, rungs=(hot,), drift=replace(ladder.drift, flagged=True, ratio=0.9)
    )
    told = _plain(" ".join(headlines.warnings(troubled)))
    for word in (
        "not finished",
        "−10 %",
        "throttling during Mixed precision bf16",
        "Other processes",
        "not become steady",
        "163 % of the measured ceiling",
    ):
        assert word in told


def test_a_machine_too_busy_to_measure_on_is_reported(ladder: LadderView) -> None:
    assert ladder.drift is not None
    busy = replace(ladder, drift=replace(ladder.drift, restless=True))
    (told,) = headlines.warnings(busy)
    assert "too busy" in told
    assert "Run it again when nothing else runs" in told


def test_batches_that_differ_are_not_called_a_busy_machine(ladder: LadderView) -> None:
    assert ladder.drift is not None
    uneven = replace(ladder.drift, restless=True, uneven=True)
    (told,) = headlines.warnings(replace(ladder, drift=uneven))
    assert "busy" not in told
    assert "unequal numbers of tokens" in told
    assert "busy" not in uneven.verdict
    assert replace(ladder.drift, paired=14).verdict == "within its interval, on 14 batches one by one"


def test_the_headline_takes_the_gain_compared_batch_by_batch(ladder: LadderView) -> None:
    best = headlines.credited(ladder)
    assert best is not None
    assert best.total_gain is not None
    told = replace(best, total_gain=replace(best.total_gain, ratio=7.77, low=7.7, high=7.8, paired=12))
    others = tuple(told if rung is best else rung for rung in ladder.rungs)
    paired = replace(ladder, rungs=others)
    assert "7.77" in headlines.headline(paired)
    assert "7.77" in headlines.figures(paired)[0].value
    assert "7.77" not in headlines.headline(ladder)


def test_machines_are_named_by_what_computes() -> None:
    machine = made_up.made_up_machine()
    assert _plain(headlines.machine_name(machine)) == "Made-up GPU 9000 (140 GiB)"
    twice = {**machine, "devices": machine["devices"] * 2}
    assert _plain(headlines.machine_name(twice)) == "2 × Made-up GPU 9000 (140 GiB each)"
    cpu = {**machine, "device": "cpu", "devices": [{"name": "Old Box", "memory_bytes": 2**33}]}
    assert _plain(headlines.machine_name(cpu)) == "CPU Old Box (16 cores, 8.00 GiB)"
    assert headlines.machine_name({}) == "an unknown machine"


def _rung(ladder: LadderView, median: float, low: float, high: float) -> RungView:
    return replace(ladder.rungs[0], speed=MeasureView(median, low, high))


def test_a_comparison_calls_a_difference_only_when_the_intervals_are_apart(ladder: LadderView) -> None:
    a, near, far = (
        replace(ladder, rungs=(_rung(ladder, *numbers),))
        for numbers in ((100.0, 98.0, 102.0), (101.0, 99.0, 103.0), (150.0, 147.0, 153.0))
    )
    (group,) = compare.groups([a, near, far])
    first, second, third = group.entries
    assert first.against_first == ""
    assert "cannot tell" in second.against_first
    assert third.against_first == "×1.50 of A (1.44 to 1.56)"
    assert careful_ratio(MeasureView(150.0, 147.0, 153.0), MeasureView(100.0, 98.0, 102.0))[1:] == (
        147 / 102,
        153 / 98,
    )


def test_ladders_with_different_rungs_are_matched_by_name(ladder: LadderView) -> None:
    first = replace(ladder, rungs=ladder.rungs[:2])
    second = replace(ladder, rungs=ladder.rungs[1:3])
    found = compare.groups([first, second])
    assert [group.name for group in found] == ["plain", "tf32", "amp_bf16"]
    assert [[entry.rung is not None for entry in group.entries] for group in found] == [
        [True, False],
        [True, True],
        [False, True],
    ]


def test_a_comparison_is_one_page_with_every_ladder_and_what_differs_between_the_machines(
    tmp_path: Path,
) -> None:
    other = {**made_up.made_up_ladder(2, 1.3), "machine": {**made_up.made_up_machine(), "torch": "2.13.0"}}
    paths = [
        made_up.write(tmp_path / "old", made_up.made_up_ladder()),
        made_up.write(tmp_path / "new", other),
    ]
    write_comparison(paths, tmp_path / "compare.html")
    text = " ".join("".join(Reader((tmp_path / "compare.html").read_text()).text).split())
    assert "A old" in text.replace("Aold", "A old")
    assert "2.11.02.13.0differs" in text
    assert "3.12.33.12.3same" in text
    with pytest.raises(RecipeError):
        write_comparison(paths[:1], tmp_path / "no.html")
    with pytest.raises(DataError):
        write_comparison([paths[0], tmp_path / "nowhere.json"], tmp_path / "no.html")


def test_letters_go_on_after_z() -> None:
    assert [compare.letter_of(at) for at in (0, 1, 25, 26, 27, 52)] == ["A", "B", "Z", "AA", "AB", "BA"]
