"""The README's performance table: made from records alone, and current."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rush.recipe_io import load_recipe, write_toml
from tests.report import made_up_benches as made

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("table", ROOT / "scripts" / "performance_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_workload_and_target_is_a_row(script: Any, tmp_path: Path) -> None:
    for name, record in (("models", made.models()), ("kernels", made.kernels())):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(record))
    text = script.performance(tmp_path)
    assert "| 1.250× (1.240 to 1.260) | ≥ 1.2× |" in text
    assert "`gpt2-124m-fast`: 681k tokens/s" in text
    assert "4 of 8 targets reached" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == (2 + 3) + (2 + 8)
    assert len({line.count("|") for line in lines[:5]}) == 1


def test_what_was_measured_twice_stands_there_once_as_it_was_measured_last(
    script: Any, tmp_path: Path
) -> None:
    for name, make in (("models", made.models), ("kernels", made.kernels)):
        later = make()
        later["started"] = "2099-01-01T00:00:00+00:00"
        for folder, record in (("a-later", later), ("earlier", make())):
            (tmp_path / f"{folder}-{name}").mkdir()
            (tmp_path / f"{folder}-{name}" / f"{name}.json").write_text(json.dumps(record))
    text = script.performance(tmp_path)
    assert text.count("`gpt2-124m-fast`") == 1
    assert text.count("4 of 8 targets reached") == 1
    assert "a-later-models/models.json" in text
    assert "earlier-" not in text


def test_a_later_record_of_one_workload_leaves_the_others_of_that_name(script: Any, tmp_path: Path) -> None:
    earlier, later = made.models(), made.models()
    later["started"] = "2099-01-01T00:00:00+00:00"
    for record, workloads in ((earlier, ("qlora-8b-1", "qlora-8b-4")), (later, ("qlora-8b-1",))):
        (one,) = record["workloads"]
        ours = [{**one["ours"][0], "rung": {**one["ours"][0]["rung"], "name": "qlora"}}]
        record["workloads"] = [{**one, "name": name, "about": name, "ours": ours} for name in workloads]
    for folder, record in (("earlier", earlier), ("later", later)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "models.json").write_text(json.dumps(record))
    rows = {line.split(" | ")[0]: line for line in script.performance(tmp_path).splitlines()}
    assert "later/models.json" in rows["| qlora-8b-1"]
    assert "earlier/models.json" in rows["| qlora-8b-4"]


def test_what_was_measured_goes_by_the_name_that_these_techniques_have_now(
    script: Any, tmp_path: Path
) -> None:
    record = made.models()
    (one,) = record["workloads"]
    now = load_recipe("gpt2-124m-fp8")
    rung = one["ours"][0]["rung"]
    told = [
        {**one["ours"][0], "rung": {**rung, "name": "a trial", "recipe": write_toml(now)}},
        {**one["ours"][0], "rung": {**rung, "name": "another", "recipe": 'techniques = ["compile"]'}},
    ]
    record["workloads"] = [{**one, "name": "gpt2-124m", "ours": told}]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "models.json").write_text(json.dumps(record))
    text = script.performance(tmp_path)
    assert "`gpt2-124m-fp8`" in text
    assert "`another`" in text
    assert "a trial" not in text


def test_fine_tuning_shows_its_memory_and_its_longest_sequence(script: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "models.json").write_text(json.dumps(made.finetuning()))
    text = script.performance(tmp_path)
    assert "| ≥ 1.15×, memory ≤ 0.9× |" in text
    assert "| [reached; memory reached](" in text
    assert "| 80 GB | 150,528 tokens | 2.10k tokens/s |" in text
    assert "342,733 (somebody)" in text
    unfinished = made.finetuning() | {"finished": None}
    (tmp_path / "models" / "models.json").write_text(json.dumps(unfinished))
    assert "150,528 tokens" not in script.performance(tmp_path), "what came last is not yet the longest"


def test_the_picture_shows_every_pair_with_what_was_wanted(script: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "models.json").write_text(json.dumps(made.models()))
    drawn = ElementTree.fromstring(script.drawn(tmp_path))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "gpt2-124m-fast" in texts
    assert "1.25×" in texts
    bars = [r for r in drawn.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "bar speed"]
    (found,) = script.pairs(tmp_path).values()
    assert len(bars) == len(found)
    assert {pair.verdict for pair in found} <= {"reached", "missed", "memory missed"}


def test_the_picture_is_current(script: Any) -> None:
    assert script.PICTURE.read_text(encoding="utf-8") == script.drawn(ROOT / "results"), (
        "run python scripts/performance_table.py"
    )


def test_it_stands_between_its_marks_and_nothing_else_changes(script: Any) -> None:
    readme = f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n"
    assert script.put(readme, "new\n") == f"before\n{script.BEGIN}\nnew\n{script.END}\nafter\n"
    assert script.put(script.put(readme, "new\n"), "new\n") == script.put(readme, "new\n")
    with pytest.raises(ValueError, match="needs one line"):
        script.put("no marks", "new")


def test_the_readme_is_current(script: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if script.BEGIN not in readme:
        pytest.skip("README.md has no place for the table yet")
    assert readme == script.put(readme, script.performance(ROOT / "results")), (
        "run python scripts/performance_table.py"
    )
