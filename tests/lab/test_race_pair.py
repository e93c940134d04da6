"""Net beside gross: a race of two recipes in the records of ladders and searches."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rush.errors import RecipeError
from rush.lab.race.pair import (
    judged_by_curve,
    net_of,
    pair_plan,
    race_models,
    race_rungs,
    without_statistical,
)
from rush.recipe_io import load_recipe, parse
from rush.records.ladder import check_ladder
from rush.report.ladder import read_ladder as view_of
from rush.report.models import model_page
from rush.report.page import report_page
from rush.report.race_words import net_words
from rush.report.tune import headline as tune_headline
from rush.tune.goal import Goal
from rush.tune.net import check_race
from rush.tune.record import Request
from tests.report import made_up, made_up_race

RESULTS = Path(__file__).resolve().parents[2] / "results"


def quiet(text: str) -> None: ...


def ladder() -> Any:
    """Two rungs, the second judged by its loss curve."""
    tree = made_up.made_up_ladder()
    first, second = (copy.deepcopy(rung) for rung in tree["rungs"][:2])
    first["digest"], second["digest"] = "A", "B"
    second["parity"] = {**second["parity"], "class": "STATISTICAL", "verdict": "equal"}
    second["gain"] = {"over": first["name"], "ratio": 1.5, "ci95": [1.4, 1.6]}
    tree["rungs"] = [first, second]
    check_ladder(tree, "made up")
    return tree


def test_a_race_that_was_made_before_stands_beside_the_gain(tmp_path: Path) -> None:
    tree = ladder()
    second = tree["rungs"][1]
    assert judged_by_curve(second)
    close: Any = {**second, "parity": {**second["parity"], "class": "CLOSE"}}
    assert not judged_by_curve(close)
    place = tmp_path / "races" / second["name"]
    place.mkdir(parents=True)
    (place / "race.json").write_text(json.dumps(made_up_race.race()))
    found = race_rungs(copy.deepcopy(tree), tmp_path, None, note=quiet)
    net = found["rungs"][1]["net"]
    assert net is not None
    assert net["net"] is not None
    assert net["net"]["ratio"] == pytest.approx(1.5 / 1.2, rel=0.03)
    check_ladder(found, "made up")
    (tmp_path / "ladder.json").write_text(json.dumps(found))
    assert "Net ×1.2" in report_page(view_of(tmp_path))
    tree["rungs"][1]["digest"] = "another recipe"
    assert "net" not in race_rungs(tree, tmp_path, None, note=quiet)["rungs"][1]
    (place / "race.json").write_text("{")
    assert "net" not in race_rungs(ladder(), tmp_path, None, note=quiet)["rungs"][1]


def test_a_damaged_net_costs_one_sentence_and_not_the_page(tmp_path: Path) -> None:
    tree = ladder()
    tree["rungs"][1]["net"] = {"net": {"ratio": "fast"}}
    (tmp_path / "ladder.json").write_text(json.dumps(tree))
    assert "Net ×" not in report_page(view_of(tmp_path))


def test_net_in_words() -> None:
    record: Any = made_up_race.race()
    net = net_of(record, Path("races/fp8"))
    said = net_words(net)
    assert said.startswith("Net ×1.2")
    assert "sooner; a race with tiny a=1 over 40.0k tokens, 3 seeds), gross ×1.50" in said.replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert "% more tokens" in said
    assert net_words(None) == net_words({}) == ""
    assert net_of(made_up_race.unfinished_race(), Path("x")) is None  # type: ignore[arg-type]


def test_a_search_says_the_net_of_its_winner() -> None:
    record = json.loads((RESULTS / "tune-tiny-n1" / "tune.json").read_text())
    before = tune_headline(record)
    made_up_net: Any = made_up_race.race()
    record["winner"]["net"] = net_of(made_up_net, Path("race"))
    assert tune_headline(record) == f"{before} {net_words(record['winner']['net'])}"


def test_a_race_that_cannot_be_made_is_refused_before_the_search() -> None:
    def request(objective: str, *words: str) -> Request:
        recipe = load_recipe("tiny", words, auto=True)
        return Request("tiny", recipe, Goal(objective), frozenset(), 60.0)

    check_race(request("tokens/s"), 204_800)
    with pytest.raises(RecipeError, match="leave it out with --objective longest-sequence"):
        check_race(request("longest-sequence"), 204_800)
    with pytest.raises(RecipeError, match="needs a number for batch"):
        check_race(request("tokens/s", 'batch.micro="auto"'), 204_800)
    with pytest.raises(RecipeError, match="at least 4 validations"):
        check_race(request("tokens/s"), 100)
    plan = pair_plan(("one", load_recipe("tiny")), ("two", load_recipe("tiny")), 204_800)
    assert (len(plan.seeds), [one.name for one in plan.contenders]) == (3, ["one", "two"])


def test_a_bench_shows_the_net_of_recipes_that_round_beside_their_speed(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "models-fp8-head-h200" / "models.json").read_text())
    (workload,) = record["workloads"]
    rung = next(ours["rung"] for ours in workload["ours"] if judged_by_curve(ours["rung"]))
    recipe = parse(tomllib.loads(rung["recipe"]))
    first, said = without_statistical(recipe)
    assert "fp8" in said
    assert "fp8" not in [name for name, _ in first.technique_uses()]
    place = tmp_path / "races" / f"{workload['name']}-{rung['name']}"
    place.mkdir(parents=True)
    raced = made_up_race.race()
    for one, digest in zip(raced["contenders"], (first.digest, recipe.digest), strict=True):
        one["digest"] = digest
    (place / "race.json").write_text(json.dumps(raced))
    found = race_models(record, tmp_path, None, note=quiet)
    assert found["workloads"][0]["ours"][0]["rung"]["net"] is not None
    assert "Net ×1.2" in model_page(found)
