"""The tables of docs/performance.md: made from records alone, and current."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rush.bench.limit import attention_rates, share_of_limit
from rush.hardware import probe
from rush.plan.spec import spec_of
from rush.plan.target import target_here
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
    assert "A row is the median of all records" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == (2 + 3) + (2 + 8)
    assert len({line.count("|") for line in lines[:5]}) == 1


def _write(results: Path, **records: Any) -> None:
    """Each under its name; whether it is of models or kernels shows by its keys."""
    for name, record in records.items():
        (results / name).mkdir()
        kind = "kernels" if "ops" in record else "models"
        (results / name / f"{kind}.json").write_text(json.dumps(record))


def _measured(ratio: float, ends: tuple[float, float], started: str, **target: Any) -> Any:
    """A record of one workload, `gpt2-124m-fast` beside its baseline."""
    record = made.models()
    record["started"] = started
    (work,) = record["workloads"]
    ours = work["ours"][0]
    found = {**ours["target"], "reached": ratio, "ci95": list(ends), "why": None, **target}
    record["workloads"] = [{**work, "ours": [{**ours, "target": found}]}]
    return record


def _row(text: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if "`gpt2-124m-fast`" in line)
    return line.strip("| ").split(" | ")


def test_what_was_measured_often_is_one_row_with_the_median_of_all_records(
    script: Any, tmp_path: Path
) -> None:
    """As found: of 1.71, 1.83, 1.505, 1.487 and 2.071 the last, which is the best, was shown."""
    ratios = {"b": 1.71, "a": 1.83, "d": 1.505, "c": 1.487, "e": 2.071}
    found = {
        n: _measured(r, (r / 1.2, r * 1.2), f"2026-01-0{at}") for at, (n, r) in enumerate(ratios.items(), 1)
    }
    _write(tmp_path, **found)
    row = _row(script.performance(tmp_path))
    assert row[3].startswith("1.710× (")
    low, high = map(float, row[3].split("(")[1].rstrip(")").split(" to "))
    assert 1.3 < low < 1.6 < 1.83 < high < 2.3, "wider than the records' medians lie apart"
    order = [link.split("](")[1].split("/")[2] for link in row[10].split(", ")]
    assert order == ["b", "a", "d", "c", "e"], "all of them, in the order they were measured"


def test_a_record_against_a_baseline_of_another_kind_is_a_row_of_its_own_and_says_so(
    script: Any, tmp_path: Path
) -> None:
    """nanoGPT's setting was once our own model with techniques: slower than nanoGPT, so its ratio is no verdict on it."""
    former = _measured(1.25, (1.24, 1.26), "2026-01-01", at_least=1.2, verdict="reached")
    former["workloads"][0]["rival_kind"] = "recipe"
    _write(
        tmp_path,
        former=former,
        now=_measured(1.15, (1.14, 1.16), "2026-01-02", at_least=1.2, verdict="missed"),
    )
    text = script.performance(tmp_path)
    now, then = (line.split(" | ") for line in text.splitlines() if "`gpt2-124m-fast`" in line)
    assert (now[1].partition(":")[0], now[3][:6]) == ("nanoGPT's setting", "1.150×")
    assert (then[1].partition(":")[0], then[3][:6]) == ("nanoGPT's setting, rebuilt from our model", "1.250×")
    assert (now[9], then[9]) == ("missed", "reached, of a former baseline")
    assert "Its ratios say nothing about nanoGPT's own speed" in text
    (pairs,) = script.pairs(tmp_path).values()
    assert [(pair.verdict, pair.reached) for pair in pairs] == [("missed", False), ("former baseline", False)]


@pytest.mark.parametrize(
    ("ends", "why", "word"),
    [
        ((1.21, 1.30), None, "reached"),
        ((1.19, 1.30), "a close call: the interval reaches below the target", "close call"),
        ((1.19, 1.30), None, "close call"),
    ],
)
def test_a_row_is_a_close_call_where_its_interval_reaches_below_what_was_wanted(
    script: Any, tmp_path: Path, ends: tuple[float, float], why: str | None, word: str
) -> None:
    _write(tmp_path, one=_measured(1.25, ends, "2026-01-01", why=why, at_least=1.2, verdict="reached"))
    assert _row(script.performance(tmp_path))[9] == word
    (pairs,) = script.pairs(tmp_path).values()
    assert [pair.verdict for pair in pairs] == [word]


def test_two_records_that_contradict_each_other_reach_nothing_for_certain(
    script: Any, tmp_path: Path
) -> None:
    one = _measured(1.10, (1.09, 1.11), "2026-01-01", verdict="missed", at_least=1.2)
    other = _measured(1.40, (1.39, 1.41), "2026-01-02", verdict="reached", at_least=1.2)
    _write(tmp_path, one=one, other=other)
    row = _row(script.performance(tmp_path))
    assert row[3].startswith("1.241×")
    assert row[9] == "close call"


def test_a_record_that_is_not_equal_is_in_no_median(script: Any, tmp_path: Path) -> None:
    different = _measured(3.0, (2.9, 3.1), "2026-01-02", verdict="missed")
    rung = different["workloads"][0]["ours"][0]["rung"]
    rung["parity"] = {**rung["parity"], "verdict": "different"}
    _write(tmp_path, equal=_measured(1.25, (1.24, 1.26), "2026-01-01"), different=different)
    row = _row(script.performance(tmp_path))
    assert row[3] == "1.250× (1.240 to 1.260)"
    assert row[8] == "equal in 1 of 2 records"


def test_a_recipe_that_had_other_techniques_before_is_not_averaged_with_them(
    script: Any, tmp_path: Path
) -> None:
    former = _measured(1.1, (1.09, 1.11), "2026-01-01")
    former["workloads"][0]["ours"][0]["rung"]["recipe"] = 'techniques = ["tf32"]'
    _write(tmp_path, former=former, now=_measured(1.25, (1.24, 1.26), "2026-01-02"))
    row = _row(script.performance(tmp_path))
    assert row[3] == "1.250× (1.240 to 1.260)"
    assert row[10].endswith("former recipes [1](../" + f"{tmp_path.name}/former/models.json)")


def test_kernels_are_combined_where_their_sources_are_the_same_and_the_latest_counts_where_not(
    script: Any, tmp_path: Path
) -> None:
    first, second = made.kernels(), made.kernels()
    first["started"], second["started"] = "2026-01-01", "2026-01-02"
    _write(tmp_path, first=first, second=second)
    text = script.performance(tmp_path)
    assert text.count("4 of 8 targets reached") == 1
    assert text.count("[1](") == text.count("[2](") == 8
    for op in first["ops"]:
        op["key"] = "another"
    (tmp_path / "first" / "kernels.json").write_text(json.dumps(first))
    assert "first/kernels.json" not in script.performance(tmp_path)


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
    assert "| reached; memory reached | [1](" in text
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
    assert {pair.verdict for pair in found} <= {"reached", "close call", "missed", "memory missed"}


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


def test_the_page_is_current(script: Any) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.put(page, script.performance(ROOT / "results")), (
        "run python scripts/performance_table.py"
    )


def test_a_recipe_has_the_cost_of_determinism_beside_it(script: Any, tmp_path: Path) -> None:
    _write(tmp_path, models=made.models())
    assert "| – | equal |" in script.performance(tmp_path)
    rates = {"plain": {"samples": [100.0] * 8}, "deterministic": {"samples": [97.0] * 8}}
    (tmp_path / "bits").mkdir()
    (tmp_path / "bits" / "gpt2-124m-fast-cost.json").write_text(json.dumps(rates))
    (row,) = (line for line in script.performance(tmp_path).splitlines() if "-3.0 %" in line)
    assert "`gpt2-124m-fast`" in row
    assert "-3.0 % (-3.0 to -3.0)" in row


def test_a_row_says_its_share_of_the_limit(script: Any, tmp_path: Path) -> None:
    """With what the kernel bench found on the same kind of machine, and not without it."""
    record, kernels = made.models(), made.kernels()
    record["machine"] = kernels["machine"] = probe("cpu").to_dict()
    record["ceilings"] = {"matmul": {"bfloat16": 700e12}, "copy_bytes_per_s": 4e12}
    (work,) = record["workloads"]
    changes = ["techniques=['amp_bf16']", "batch.micro=64", "batch.total_tokens=65536"]
    recipe = load_recipe("gpt2-124m", changes)
    for ours in work["ours"]:
        ours["rung"]["recipe"] = write_toml(recipe)
    dims = {"batch": 16, "sequence": 1024, "heads": 12, "head_dim": 64}
    row = {**kernels["ops"][0]["rows"][0], "step": "both", "dims": dims, "flops_per_s": 350e12}
    kernels["ops"].append({**kernels["ops"][0], "op": "flash_attention", "rows": [row]})
    _write(tmp_path, models=record)
    assert _row(script.performance(tmp_path))[6] == "–"
    _write(tmp_path, kernels=kernels)
    rates = attention_rates([kernels])
    target = target_here(probe("cpu"), record["ceilings"])
    share = share_of_limit(spec_of(recipe), target, rates, work["ours"][0]["rung"]["tokens_per_s"]["median"])
    assert share is not None
    assert _row(script.performance(tmp_path))[6] == f"{100 * share:.0f} %"
    kernels["machine"] = {**kernels["machine"], "torch": "1.0"}
    (tmp_path / "kernels" / "kernels.json").write_text(json.dumps(kernels))
    assert _row(script.performance(tmp_path))[6] == "–", "another kind of machine"
