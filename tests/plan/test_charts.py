"""Charts of plans: every point is the plan of its recipe, published runs are as published, nothing asked for is ignored."""

from __future__ import annotations

import json
from importlib import resources

import pytest

import rush
from rush.errors import RecipeError
from rush.plan.charts import KINDS, ChartOptions, chart
from rush.plan.charts.options import USUAL
from rush.records.plan_chart import CHARTS, PLAN_CHART, PlanChartRecord

QUICK = ("speedup", "memory", "zero", "links", "nodes", "batch")


@pytest.fixture(scope="module", params=QUICK)
def record(request: pytest.FixtureRequest) -> PlanChartRecord:
    return chart(request.param, ChartOptions())


def test_the_record_knows_every_chart() -> None:
    assert tuple(KINDS) == CHARTS


def test_every_point_states_its_error_and_whether_it_fits(record: PlanChartRecord) -> None:
    PLAN_CHART.check(json.loads(json.dumps(record)), "a chart")
    for point in record["predicted"]:
        assert point["fits"] == (point["needed_bytes"] <= point["room_bytes"])
        assert 0 < point["expected_error"]["time"] <= 1
        assert point["how"] in ("datasheet", "calibrated")
        step = sum(point["time_s"].values())
        assert point["tokens_per_s"] == pytest.approx(point["step_tokens"] / step, rel=1e-9)


def test_published_points_are_those_of_the_file_with_their_sources() -> None:
    text = resources.files("rush.plan").joinpath("published_runs.json").read_text(encoding="utf-8")
    rows = {row["name"]: row for row in json.loads(text)["rows"]}
    found = [
        run
        for name in ("speedup", "memory", "zero", "nodes")
        for run in chart(name, ChartOptions())["published"]
    ]
    assert len({run["name"] for run in found}) > 20
    for run in found:
        assert run["tokens_per_s"] == pytest.approx(rows[run["name"]]["tokens_per_s"] * run["devices"])
        assert run["source"]
        assert run["planned"]["devices"] == run["devices"]


def test_a_chart_says_of_a_layout_what_rush_plan_says_of_it() -> None:
    record = chart("speedup", ChartOptions())
    own = {(point["series"], point["devices"]): point for point in record["predicted"]}
    found = rush.plan_recipe(
        "llama-3.1-8b", USUAL, "batch.micro=1", "batch.sequence=4096", "layout.fsdp=8", "techniques+=fsdp",
        machine="a100-80-sxm", devices=8,
    )  # fmt: skip
    point = own["llama-3.1-8b, ZeRO-3", 8]
    assert point["tokens_per_s"] == pytest.approx(found.tokens_per_s)
    assert point["needed_bytes"] == pytest.approx(found.life.total)
    assert not own["llama-3.1-8b, ddp", 8]["fits"]


def test_published_runs_of_one_setting_lie_on_the_line_planned_for_it() -> None:
    """The line over nodes is the plan of the published run where somebody measured."""
    record = chart("nodes", ChartOptions())
    line = {(p["series"], p["x"]): p["tokens_per_s"] for p in record["predicted"]}
    run = next(run for run in record["published"] if run["name"] == "MPT 7B, 256 H100")
    assert line[run["series"], run["x"]] == pytest.approx(run["planned"]["tokens_per_s"])


def test_a_slower_link_never_helps_and_tp_loses_most() -> None:
    points = [p for p in chart("links", ChartOptions())["predicted"] if p["group"] == "llama-3.2-1b"]
    speed = {(p["name"], p["series"]): p["tokens_per_s"] for p in points}
    kept = {name: speed[name, "other"] / speed[name, "own"] for name, _ in speed}
    assert all(share <= 1 for share in kept.values())
    assert min(kept, key=kept.__getitem__) == "tp 8"


def test_checkpointing_pays_under_24_GB_and_not_under_80() -> None:
    record = chart("batch", ChartOptions())

    def best(group: str, series: str) -> float:
        own = [p for p in record["predicted"] if p["group"] == group and p["series"] == series and p["fits"]]
        return max(point["tokens_per_s"] for point in own)

    assert best("24 GB", "checkpoint_full") > 1.2 * best("24 GB", "no checkpointing")
    assert best("80 GB", "checkpoint_full") < best("80 GB", "no checkpointing")


def test_a_limit_of_the_recipe_is_the_only_one_drawn() -> None:
    record = chart("batch", ChartOptions(overrides=["run.memory_limit_gb=40"]))
    assert {point["group"] for point in record["predicted"]} == {"40 GB"}
    assert {point["room_bytes"] for point in record["predicted"]} == {40e9}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("speedup", ChartOptions(devices=6), "power of two"),
        ("speedup", ChartOptions(against="a800-80-sxm"), "does not take --against"),
        ("batch", ChartOptions(devices=8), "does not take --devices"),
        ("speedup", ChartOptions(machine="a101"), "there is no machine 'a101'"),
        ("speedup", ChartOptions(overrides=["layout.fsdp=2"]), "a chart sets the layouts itself"),
        ("spedup", ChartOptions(), "did you mean 'speedup'"),
        ("links", ChartOptions(link="pcie9"), "there is no link 'pcie9'"),
    ],
)
def test_what_a_chart_cannot_do_is_refused_in_one_sentence(
    name: str, options: ChartOptions, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        chart(name, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cards", "layouts"])
def test_large_charts_are_made_too(name: str) -> None:
    record = chart(name, ChartOptions())
    PLAN_CHART.check(json.loads(json.dumps(record)), name)
    assert record["predicted"]
    assert record["published"]
    if name == "layouts":
        assert any(run["planned"]["problems"] for run in record["published"])
