"""Every sentence of a ladder's page, each with data that makes it true and data that would make it false."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rush.cli.compare import cell
from rush.cli.ladder_table import caption_of
from rush.records.gains import judged_again
from rush.report import claims, headlines
from rush.report.ladder import (
    ClaimView,
    DisturbedView,
    GainView,
    LadderView,
    MeasureView,
    ParityView,
    RungView,
    read_ladder,
)
from rush.report.page import report_page

RESULTS = Path(__file__).parents[2] / "results"


def rung(
    index: int,
    verdict: str,
    speed: float,
    total: tuple[float, float] | None = None,
    parity: str | None = "equal",
    **more: Any,
) -> RungView:
    """A measured rung; `total` is the interval of its cumulative gain."""
    view = RungView(index, f"r{index}", f"Rung {index}", "ok", verdict, speed=MeasureView(speed))
    gain = GainView((total[0] * total[1]) ** 0.5, *total, over="r1") if total else None
    return replace(view, total_gain=gain, parity=ParityView(parity) if parity else None, **more)


def ladder(*rungs: RungView, view: str = "cumulative", **more: Any) -> LadderView:
    return LadderView("made up", view, None, rungs=rungs, **more)


BASE = rung(1, "baseline", 1000)
UP, WIDE, NONE, DOWN = (1.4, 1.6), (0.99, 1.8), (0.98, 1.02), (0.7, 0.9)


def test_ten_rungs_that_change_nothing_are_announced_as_nothing_however_high_one_median_is() -> None:
    noise = [rung(at, "no gain", 1000 + 80 * at, NONE) for at in range(2, 12)]
    said = headlines.headline(ladder(BASE, *noise)).replace("\N{NO-BREAK SPACE}", " ")
    assert said == "Rung 1 makes 1.00k tok/s; nothing was found faster here that learns the same."
    assert not any("faster" in figure.label for figure in headlines.figures(ladder(BASE, *noise)))


@pytest.mark.parametrize(
    ("rungs", "says", "never"),
    [
        # The credited rung is the fastest whose two gains are real, not the highest median.
        ([rung(2, "equal and faster", 1500, UP), rung(3, "no gain", 1700, UP)], "to Rung 2 at", "Rung 3"),
        ([rung(2, "equal and faster", 1500, UP), rung(3, "cannot tell", 1700, UP)], "to Rung 2 at", "Rung 3"),
        ([rung(2, "equal and faster", 1500, UP), rung(3, "slower", 1700, UP)], "to Rung 2 at", "Rung 3"),
        ([rung(2, "equal and faster", 1500, UP), rung(3, "equal and faster", 1700, UP)], "to Rung 3 at", "Rung 2"),
        ([rung(2, "equal and faster", 1500, WIDE)], "nothing was found faster", "×"),
        ([rung(2, "equal and faster", 1500, UP, parity="different")], "but learns differently", "to Rung 2"),
        ([rung(2, "equal and faster", 1500, UP, parity=None)], "but is not proven equal", "to Rung 2"),
        # What is different is mentioned only if it is really faster.
        ([rung(2, "different", 1500, WIDE, parity="different")], "nothing was found faster", "Rung 2"),
        ([rung(2, "faster but different", 1500, UP, parity="different")], "Rung 2 reached 1.50k tok/s but", "×"),
        ([rung(2, "equal and faster", 1600, UP), rung(3, "faster but different", 1500, UP, "different")],
         "to Rung 2", "Rung 3"),
        # Nothing faster, and nothing to be told, are two things.
        ([rung(2, "cannot tell", 1500, WIDE)], "of all rungs this cannot be told", "×"),
        ([rung(2, "cannot tell", 1500, WIDE), rung(3, "slower", 800, DOWN)], "of 1 of 2 rungs this cannot", "×"),
        ([rung(2, "slower", 800, DOWN)], "nothing was found faster here that learns the same.", "cannot be told"),
        ([rung(2, "out of memory", 1, None)], "nothing else was measured", "faster"),
        # Small gains that are real together only.
        ([rung(2, "cannot tell", 1100, WIDE), rung(3, "cannot tell", 1200, (1.1, 1.3))],
         "No single rung is faster beyond noise; together those up to Rung 3 make ×1.20", "From"),
        ([rung(2, "cannot tell", 1100, WIDE), rung(3, "cannot tell", 1200, WIDE)], "nothing was found", "together"),
        ([rung(2, "cannot tell", 1200, (1.1, 1.3), kept=False)], "nothing was found", "together"),
    ],
)  # fmt: skip
def test_the_headline_says_what_was_judged_and_nothing_else(
    rungs: list[RungView], says: str, never: str
) -> None:
    said = headlines.headline(ladder(BASE, *rungs)).replace("\N{NO-BREAK SPACE}", " ")
    assert says in said
    assert never not in said


def test_what_cannot_be_trained_with_is_mentioned_only_if_it_is_really_faster() -> None:
    life: Any = type("Life", (), {"verdict": "broken"})()
    fast = rung(2, "unusable", 1500, UP, life=life)
    assert "Rung 2 reached" in headlines.headline(ladder(BASE, fast))
    assert "Rung 2" not in headlines.headline(ladder(BASE, replace(fast, total_gain=GainView(1.5, *WIDE))))
    assert "to Rung 2" not in headlines.headline(ladder(BASE, replace(fast, verdict="equal and faster")))


def test_the_large_figures_are_those_of_the_credited_rung_or_of_the_first() -> None:
    best, noise = rung(2, "equal and faster", 1500, UP, mfu=0.4), rung(3, "no gain", 1700, UP, mfu=0.9)
    values = {figure.label: figure for figure in headlines.figures(ladder(BASE, best, noise))}
    assert values["tokens per second"].note == "Rung 2"
    assert "40" in values["of the datasheet peak (MFU)"].value
    assert values["faster, learning the same"].note == "×1.40 to ×1.60"
    assert headlines.figures(ladder(BASE, noise))[0].note == "Rung 1"


@pytest.mark.parametrize(
    ("recorded", "interval", "now"),
    [
        ("no gain", [0.998, 1.353], "cannot tell"),
        ("no gain", [0.99, 1.01], "no gain"),
        ("cannot tell", [0.99, 1.01], "no gain"),
        ("equal and faster", [0.99, 1.2], "cannot tell"),
        ("equal and faster", [1.01, 1.2], "equal and faster"),
        ("faster but different", [0.9, 1.2], "different"),
        ("equal and smaller", [0.5, 1.2], "equal and smaller"),
        ("baseline", None, "baseline"),
        ("no gain", None, "no gain"),
        ("no gain", ["x", 1], "no gain"),
    ],
)
def test_verdicts_of_old_records_are_read_again_from_their_intervals(
    recorded: str, interval: list[Any] | None, now: str
) -> None:
    assert judged_again(recorded, {"ci95": interval} if interval else None) == now


@pytest.mark.parametrize(
    ("recorded", "interval", "parity", "now"),
    [
        ("equal and faster", [1.1, 1.2], "different", "faster but different"),
        ("equal and faster", [1.1, 1.2], "not judged", "faster but different"),
        ("equal and faster", [0.9, 1.2], "different", "different"),
        ("equal and smaller", [0.9, 1.2], "different", "smaller but different"),
        ("no gain", [0.99, 1.01], "different", "different"),
        ("no gain", [0.99, 1.01], "not judged", "no gain"),
        ("equal and faster", [1.1, 1.2], "equal", "equal and faster"),
        ("unusable", [1.1, 1.2], "different", "unusable"),
        ("baseline", None, "different", "baseline"),
    ],
)
def test_a_verdict_falls_with_its_parity(
    recorded: str, interval: list[float] | None, parity: str, now: str
) -> None:
    assert judged_again(recorded, {"ci95": interval} if interval else None, {"verdict": parity}) == now


def test_a_rung_that_was_equal_once_is_not_credited_on_the_page_or_in_the_terminal() -> None:
    """As found: a climb whose curves were a tenth of the decrease behind, called equal by the rule of its time."""
    view = read_ladder(RESULTS / "llama-3.2-1b-h200-first-climb")
    recorded = json.loads((RESULTS / "llama-3.2-1b-h200-first-climb" / "ladder.json").read_text())["rungs"]
    fell = [at for at, row in enumerate(recorded) if (row["parity"] or {}).get("class") == "STATISTICAL"]
    assert fell
    for at in fell:
        assert recorded[at]["parity"]["verdict"] != "equal" or not headlines.learns_the_same(view.rungs[at])
        assert "equal and" not in cell(recorded[at])
    best = headlines.credited(view)
    assert best is None or best.index - 1 not in fell


def test_the_committed_ladders_announce_no_noise() -> None:
    """As found: "From base at 45.5k to pin_memory at 45.5k", and "no gain" beside ×1.22 (0.998 to 1.35)."""
    host = read_ladder(RESULTS / "llama-3.2-1b-host-h200")
    assert headlines.headline(host).endswith("nothing was found faster here that learns the same.")
    sft = read_ladder(RESULTS / "sft-3b-h200")
    pad = sft.rung("pad")
    assert pad is not None
    assert pad.verdict == "cannot tell"
    recorded = json.loads((RESULTS / "sft-3b-h200" / "ladder.json").read_text())
    assert recorded["rungs"][1]["verdict"] == "no gain", "the record stays as it was written"
    for path in sorted(RESULTS.glob("*/ladder.json")):
        view = read_ladder(path)
        best = headlines.credited(view)
        if best is not None:
            assert best.total_gain is not None
            assert best.total_gain.judged == "faster"
            assert best.gain is not None
            assert best.gain.judged == "faster"


def _claim(relative: str | None, regime: str = "", gain: float = 2.5) -> ClaimView:
    return ClaimView("tokens_per_s", gain, regime, None, relative)


@pytest.mark.parametrize(
    ("claim", "found", "against"),
    [
        (_claim(None), 1.2, ""),
        (_claim("the rung before"), 1.2, ""),
        (_claim("plain fp32"), 3.0, "over plain fp32 (Rung 1)"),
        (_claim(None, "one A100, from plain fp32 (×3.5)"), 3.0, "over plain fp32 (Rung 1)"),
        (_claim("the base"), 3.0, "over the base (Rung 1)"),
        (_claim("tf32"), 1.2, "over tf32 (Rung 2)"),
        (_claim("flash_attention"), None, ""),
    ],
)
def test_a_claim_is_compared_with_the_gain_over_what_it_is_relative_to(
    claim: ClaimView, found: float | None, against: str
) -> None:
    middle = rung(2, "equal and faster", 2500, (2.4, 2.6), techniques=("tf32",))
    top = rung(3, "equal and faster", 3000, (2.9, 3.1), techniques=("amp_bf16",), claim=claim)
    top = replace(top, gain=GainView(1.2, 1.15, 1.25, "r2"), total_gain=GainView(3.0, 2.9, 3.1, "r1"))
    checked = claims.compare_claim(ladder(BASE, middle, top), top)
    assert checked is not None
    assert checked.found == (pytest.approx(found) if found else None)
    assert checked.against == against
    if found is None:
        assert checked.outcome == "not measured over flash_attention"


def test_a_claim_is_not_compared_over_another_batch() -> None:
    top = rung(2, "equal and faster", 3000, UP, claim=_claim("plain fp32"), micro=8, techniques=("amp_bf16",))
    checked = claims.compare_claim(ladder(replace(BASE, micro=1), top), top)
    assert checked is not None
    assert checked.found is None


def test_what_is_lost_without_a_technique_is_its_gain_turned_over() -> None:
    left = rung(2, "slower", 800, DOWN, claim=_claim(None, gain=0.2))
    left = replace(left, gain=GainView(0.8, 0.75, 0.85, "r1"))
    checked = claims.compare_claim(ladder(BASE, left, view="left_out"), left)
    assert checked is not None
    assert checked.found == pytest.approx(1.25)
    assert checked.outcome == "as claimed or better"


def test_bf16_on_the_committed_climb_is_compared_with_plain_fp32() -> None:
    """As found: "claimed ×3.50, found +13 %" where ×3.02 was found over plain fp32."""
    view = read_ladder(RESULTS / "llama-3.2-1b-h200")
    bf16 = view.rung("amp_bf16")
    assert bf16 is not None
    checked = claims.compare_claim(view, bf16)
    assert checked is not None
    assert checked.found == pytest.approx(3.024, abs=1e-3)
    assert checked.outcome == "less than claimed"


@pytest.mark.parametrize(
    ("judged", "said"),
    [((1.1, 1.3), "speed +20"), ((0.99, 1.02), "(no gain)"), ((0.9, 1.6), "(cannot tell)")],
)
def test_what_a_rung_changed_is_told_with_what_its_interval_says(
    judged: tuple[float, float], said: str
) -> None:
    top = replace(rung(2, "no gain", 1200), gain=GainView(1.2, *judged, "r1"))
    told = claims.effects(ladder(BASE, top), top)
    assert said in told
    assert ("(" in told) == ("(" in said)


def test_a_disturbed_process_is_told_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    assert headlines.disturbed_words(BASE) == ""
    again = replace(BASE, disturbed=DisturbedView(0.6, 1))
    assert headlines.disturbed_words(again) == "One process was disturbed: 0.6 of the others; measured again."
    assert headlines.disturbed_words(again) in report_page(ladder(again))
    assert "disturbed" not in report_page(ladder(BASE))
    once = replace(BASE, disturbed=DisturbedView(0.6, 0))
    assert headlines.disturbed_words(once).endswith("it is in no interval.")
    row = {
        "title": "Base",
        "verdict": "baseline",
        "gain": None,
        "disturbed": {"process": 1, "ratio": 0.6, "again": 1},
    }
    record: Any = {"drift": None, "sequence_limits": None, "rungs": [row]}
    assert caption_of(record) == "Base: one process was disturbed (0.60 of the others), measured again"
    assert caption_of({**record, "rungs": [{**row, "disturbed": None}]}) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"trials_s": 7201.0, "finished": "2026-01-02T00:10:00"}, "its trials took 2 h 0 min"),
        ({"finished": "2026-01-01T00:10:00"}, "took 10 min 0 s"),
        ({"finished": "2026-01-01T00:00:30"}, "its steps alone took 60.0 s, in several sessions"),
        ({"finished": None}, ""),
    ],
)
def test_how_long_it_took_is_never_less_than_its_steps(more: dict[str, Any], said: str) -> None:
    """As found: "took 3 min 39 s" on a page of two days; its steps alone took longer."""
    timed = replace(BASE, step=MeasureView(1000.0, samples=(1000.0,) * 50), compile_s=10.0)
    view = replace(ladder(timed, **more), started="2026-01-01T00:00:00")
    assert headlines.took(view).replace("\N{NO-BREAK SPACE}", " ") == said
    assert "3 min 39 s" not in report_page(read_ladder(RESULTS / "llama-3.2-1b-h200"))


@pytest.mark.parametrize(
    ("interval", "said"),
    [([1.1, 1.3], "900 tokens/s ×1.20, equal and faster"), ([0.9, 1.6], "900 tokens/s, cannot tell")],
)
def test_the_terminals_comparison_shows_a_gain_only_where_it_is_real(
    interval: list[float], said: str
) -> None:
    gain = {"ratio": 1.2, "ci95": interval}
    row: Any = {"tokens_per_s": {"median": 900.0}, "total_gain": gain, "gain": gain, "verdict": "no gain"}
    assert cell(row) == said


@pytest.mark.parametrize(
    ("parity", "said"),
    [
        (ParityView("equal"), ""),
        (ParityView("equal", measured="same bits", gap=0.0), "Finest test passed: same bits."),
        (ParityView("equal", measured="rounding", gap=0.01), "Finest test passed: rounding."),
        (
            ParityView("equal", measured="statistical", gap=-0.012),
            "Finest test passed: statistical, gap 1.2 %.",
        ),
    ],
)
def test_the_finest_test_a_rung_passed_is_named_where_the_record_has_it(
    parity: ParityView, said: str
) -> None:
    assert headlines.finest_words(parity).replace("\N{NO-BREAK SPACE}", " ").replace("1.20", "1.2") == said


def test_what_cannot_run_here_is_named_once_and_apart() -> None:
    barred = replace(rung(2, "unsupported", 1.0), status="unsupported", speed=None, reason="It needs a GPU.")
    page = report_page(ladder(BASE, barred, rung(3, "equal and faster", 1500, UP)))
    assert "1 rung cannot run here: Rung 2</summary>" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert page.count("It needs a GPU.") == 1
    assert page.count('class="rung"') == 2
    assert "cannot run here" not in report_page(ladder(BASE, rung(2, "equal and faster", 1500, UP)))
    record = json.loads((RESULTS / "ladder-tiny-x86" / "ladder.json").read_text())
    assert not any("cannot run here" in line for line in (caption_of(record) or "").splitlines())
    record["rungs"][3] |= {"verdict": "unsupported", "title": "our attention"}
    assert (caption_of(record) or "").splitlines()[0] == "cannot run here: our attention"


CLIMBED = ClaimView("tokens_per_s", 0.4, "somewhere", "someone")


@pytest.mark.parametrize(
    ("gain", "outcome"),
    [(0.4, "as claimed or better"), (1.5, "less than claimed"), (-0.1, "as claimed or better")],
)
def test_the_claim_for_the_whole_climb_is_compared_with_the_gain_of_the_credited_rung_over_the_first(
    gain: float, outcome: str
) -> None:
    made = ladder(BASE, rung(2, "no gain", 1900, NONE), rung(3, "equal and faster", 1500, UP), claim=replace(CLIMBED, gain=gain))  # fmt: skip
    checked = claims.climb_claim(made)
    assert checked is not None
    assert (checked.found, checked.low, checked.high) == ((1.4 * 1.6) ** 0.5, *UP)
    assert checked.outcome == outcome
    assert checked.against == "over Rung 1, to Rung 3"
    page = report_page(made)
    assert "the whole climb" in page
    assert "over Rung 1, to Rung 3" in page


def test_no_climb_is_claimed_where_nothing_is_credited_and_none_is_shown_without_a_claim() -> None:
    checked = claims.climb_claim(ladder(BASE, rung(2, "no gain", 1900, NONE), claim=CLIMBED))
    assert checked is not None
    assert (checked.outcome, checked.found) == ("no rung is credited", None)
    assert claims.climb_claim(ladder(BASE, rung(2, "equal and faster", 1500, UP))) is None
    assert "the whole climb" not in report_page(ladder(BASE, rung(2, "equal and faster", 1500, UP)))


def test_a_claim_for_a_batch_is_compared_with_the_rung_before_although_the_batch_is_another() -> None:
    """A claim for a technique is not: see above."""
    claim = ClaimView("tokens_per_s", 0.52, "batch 2 to 8", "someone", "the rung before")
    small = replace(BASE, micro=2)
    large = rung(2, "equal and faster", 1500, UP, claim=claim, micro=8, gain=GainView(1.5, *UP, over="r1"))
    checked = claims.compare_claim(ladder(small, large), large)
    assert checked is not None
    assert (checked.found, checked.outcome) == (1.5, "as claimed or better")
    over_plain = replace(large, claim=replace(claim, relative_to="plain fp32"))
    told = claims.compare_claim(ladder(small, over_plain), over_plain)
    assert told is not None
    assert told.outcome == "not measured over plain fp32"
