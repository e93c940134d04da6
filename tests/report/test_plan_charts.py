"""Pictures and sentences of plans: predicted and measured are told apart, and every sentence follows from the record."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError
from rush.plan.charts import ChartOptions, chart
from rush.records.plan_chart import CHARTS, PLAN_CHART, PlanChartRecord
from rush.report.plan_chart import chart_page, chart_picture, rows, write_chart
from rush.report.plan_panels import panels
from rush.report.plan_words import sentences, stops_paying
from rush.report.redraw import page_of

RESULTS = Path(__file__).parents[2] / "results" / "plan-charts"


@pytest.fixture(scope="module", params=CHARTS)
def record(request: pytest.FixtureRequest) -> PlanChartRecord:
    return PLAN_CHART.read(RESULTS / request.param)


def test_what_was_measured_is_filled_and_what_was_planned_is_not(record: PlanChartRecord) -> None:
    drawn = chart_picture(record)
    body = drawn[drawn.index("</style>") :]
    filled = re.findall(r'class="dot series-\d"', body) + re.findall(r'class="mark"', body)
    planned = re.findall(r"dot series-\d hollow", body) + re.findall(r"bar predicted", body)
    assert planned
    assert not re.findall(r'class="bar series', body), "a bar that looks measured"
    if record["published"]:
        assert len(filled) > len({run["series"] for run in record["published"]})
        assert "measured and published" in body
    else:
        assert not filled
        assert "nothing of it published" in body


def test_the_stated_error_is_on_the_picture_and_in_words(record: PlanChartRecord) -> None:
    assert 'class="whisker"' in chart_picture(record)
    assert any("The planner states ±" in sentence for sentence in sentences(record))


def test_what_does_not_fit_is_said(record: PlanChartRecord) -> None:
    if any(not point["fits"] for point in record["predicted"]):
        assert "does not fit" in chart_picture(record)
        assert any(row[-1].startswith("does not fit") for row in rows(record))


def test_the_page_is_drawn_again_from_the_record_to_the_byte(record: PlanChartRecord) -> None:
    folder = RESULTS / record["chart"]
    assert page_of(folder) == chart_page(record) == (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "picture.svg").read_text(encoding="utf-8") == chart_picture(record)


def test_every_panel_has_words_for_those_who_cannot_see_it(record: PlanChartRecord) -> None:
    page = chart_page(record)
    assert page.count('role="img"') == 2 * len(panels(record))
    assert page.count("aria-label=") >= 2 * len(panels(record))


def _cards(eight: float, error: float = 0.25) -> PlanChartRecord:
    """A chart of cards in which eight make so many times one, whatever they do."""
    record: Any = copy.deepcopy(PLAN_CHART.read(RESULTS / "cards"))
    for point in record["predicted"]:
        if "," in point["group"]:
            point["fits"], point["tight"] = True, False
            times = {1: 1.0, 2: 2.0, 4: 4.0, 8: eight}[point["devices"]]
            point["tokens_per_s"] = 1000.0 * times
            point["expected_error"]["time"] = error
    found: PlanChartRecord = record
    return found


@pytest.mark.parametrize(
    ("eight", "error", "words"),
    [
        (9.2, 0.25, "is what the plan says"),
        (8.0, 0.25, "is within the stated error"),
        (6.0, 0.25, "is beyond the stated error"),
        (8.0, 0.05, "rules it out"),
    ],
)
def test_a_claim_is_answered_by_the_plan_and_its_error(eight: float, error: float, words: str) -> None:
    assert words in " ".join(sentences(_cards(eight, error)))


def test_without_a_card_that_holds_the_model_a_claim_is_not_answered() -> None:
    record = _cards(8.0)
    for point in record["predicted"]:
        point["fits"] = point["devices"] > 1
    assert "is not answered: nothing here fits one device" in " ".join(sentences(record))


def test_a_batch_stops_paying_where_its_double_gains_less_than_three_percent() -> None:
    points: Any = [
        {"x": float(x), "tokens_per_s": speed, "fits": fits}
        for x, speed, fits in ((1, 100.0, True), (2, 150.0, True), (4, 152.0, True), (8, 300.0, False))
    ]
    assert stops_paying(points) == 2
    assert stops_paying(points[:2]) is None


def test_a_damaged_record_is_one_sentence(tmp_path: Path) -> None:
    record: Any = chart("memory", ChartOptions(devices=2))
    write_chart(record, tmp_path)
    damaged = json.loads((tmp_path / PLAN_CHART.file).read_text(encoding="utf-8"))
    damaged["predicted"][0]["needed_bytes"] = -1
    (tmp_path / PLAN_CHART.file).write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(DataError, match="needed_bytes"):
        page_of(tmp_path)
    damaged["predicted"][0] |= {"needed_bytes": 1e12, "fits": False, "tight": True}
    (tmp_path / PLAN_CHART.file).write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(DataError, match="tight is true where fits is false"):
        page_of(tmp_path)
