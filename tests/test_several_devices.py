"""docs/several-devices.md says what the records say, and the committed charts are what the planner says now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rush.plan.charts import ChartOptions, chart
from rush.records.plan_chart import CHARTS, PLAN_CHART
from tests.several_devices_script import load

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
QUICK = ("speedup", "memory", "zero", "links", "nodes", "batch")


@pytest.fixture(scope="module")
def script() -> Any:
    return load()


def test_the_page_and_its_pictures_are_those_of_the_records(script: Any) -> None:
    page = (ROOT / "docs" / "several-devices.md").read_text(encoding="utf-8")
    assert script.written(page, script.pieces(RESULTS)) == page, "run python scripts/several_devices_page.py"
    for name, picture in script.pictures(RESULTS).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == picture, (
            "run python scripts/several_devices_page.py"
        )


def test_a_figure_changed_in_a_record_changes_the_page(script: Any, tmp_path: Path) -> None:
    for name in CHARTS:
        record: Any = PLAN_CHART.read(RESULTS / "plan-charts" / name)
        for point in record["predicted"]:
            point["tokens_per_s"] *= 1.5 if point["devices"] > 1 or name == "batch" else 1.0
        (tmp_path / "plan-charts" / name).mkdir(parents=True)
        PLAN_CHART.write(tmp_path / "plan-charts" / name, record)
    before, after = script.pieces(RESULTS), script.pieces(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert {"chart speedup", "chart cards", "chart layouts", "chart batch"} <= changed
    assert "chart memory" not in changed  # its sentences and bars are bytes


def test_a_study_that_nobody_has_run_is_said_from_its_absence(script: Any, tmp_path: Path) -> None:
    (tmp_path / "plan-charts").symlink_to(RESULTS / "plan-charts")
    found = script.pieces(tmp_path)
    assert "no record of a study" in found["studies gpu"]
    assert "No record of the ladder llama-3.2-1b-24gb is in results/" in found["chart batch"]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in CHARTS if n not in QUICK)]
)
def test_committed_charts_are_what_the_planner_says_now(name: str) -> None:
    there, now = PLAN_CHART.read(RESULTS / "plan-charts" / name), chart(name, ChartOptions())
    hint = "run rush plan --chart all --out results/plan-charts and scripts/several_devices_page.py"
    assert len(there["predicted"]) == len(now["predicted"]), hint
    for old, new in zip(there["predicted"], now["predicted"], strict=True):
        assert (old["series"], old["x"], old["fits"]) == (new["series"], new["x"], new["fits"]), hint
        assert old["tokens_per_s"] == pytest.approx(new["tokens_per_s"], rel=1e-6), hint
        assert old["needed_bytes"] == pytest.approx(new["needed_bytes"], rel=1e-6), hint
