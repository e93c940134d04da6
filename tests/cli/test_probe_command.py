"""`rush probe` as a person and as a program use it: the machine, its rates with their age, and the techniques."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from rush.cli import probe as command
from rush.errors import MachineError, RecipeError
from rush.files import cache_folder
from rush.hardware import Ceilings, Machine, ceilings, datasheet_peaks, launch_rate, measure, probe
from rush.hardware.conditions import load_now
from rush.hardware.machine import Device, Link
from rush.hardware.samples import Sample
from rush.recipe_io import load_recipe
from rush.techniques import registry
from rush.techniques.api.known import KnownTechniques

H200 = Device("NVIDIA H200", 141 * 2**30, (9, 0), 132, 18)

app = typer.Typer()
app.command("probe")(command.probe)


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rates themselves are tested elsewhere; here small copies and a hundredth of the time will do."""
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(measure, "matmul", partial(measure.matmul, budget_s=0.02))
    monkeypatch.setattr(measure, "bandwidth", partial(measure.bandwidth, budget_s=0.02, size=2**20))
    monkeypatch.setattr(launch_rate, "launching", partial(launch_rate.launching, budget_s=0.02))
    monkeypatch.setattr(import_module("rush.hardware.ceilings"), "load_now", partial(load_now, seconds=0.01))


def call(*words: str) -> tuple[str, str]:
    """Standard output and error of a probe that must succeed."""
    result = CliRunner().invoke(app, words)
    if result.exception is not None:
        raise result.exception
    return result.stdout, result.stderr


def cache_file() -> Path:
    (path,) = cache_folder().glob("ceilings-*.json")
    return path


def with_gpus(number: int) -> Machine:
    link = Link(0, 1, "nvlink", True)
    return replace(
        probe("cpu"),
        device="cuda",
        devices=(H200,) * number,
        links=(link,) if number > 1 else (),
        driver="580.1",
    )


def rows(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found}


def test_the_json_has_machine_rates_and_every_technique() -> None:
    out, _ = call("tiny", "run.device=cpu", "--collectives", "2", "--json")
    told = json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert set(told) == {
        "machine", "packages", "rates", "age_s", "peaks", "ceilings", "recipe", "techniques"
    }  # fmt: skip
    machine = probe("cpu")
    assert Machine.from_dict(told["machine"]) == machine
    kept = ceilings(machine, collectives=2)
    assert Ceilings.from_dict(told["ceilings"]) == kept
    assert told["rates"] == kept.rates()
    assert told["rates"]["matmul"]["float32"] > 1e8
    assert told["rates"]["copy_bytes_per_s"] > 1e8
    assert [row["operation"] for row in told["rates"]["collectives"]] == ["all_reduce", "all_gather"]
    assert 0 <= told["age_s"] < 120
    assert told["peaks"] is None
    assert told["recipe"]["digest"] == load_recipe("tiny", ["run.device=cpu"]).digest
    assert set(rows(told["techniques"])) == set(registry())
    assert [row["group"] for row in told["techniques"]] == sorted(row["group"] for row in told["techniques"])
    for row in told["techniques"]:
        assert set(row) == {"name", "group", "stage", "runs", "reasons"}
        assert row["runs"] == (row["reasons"] == [])


def test_the_table_shows_rates_with_their_age_and_refreshing_starts_it_anew() -> None:
    out, _ = call("run.device=cpu")
    assert "measured just now" in out
    assert "float32 matmul" in out
    kept = json.loads(cache_file().read_text())
    cache_file().write_text(json.dumps({**kept, "measured_at": time.time() - 3 * 3600 - 60}))
    out, err = call("run.device=cpu")
    assert "measured 3 hours ago" in out
    assert "Measuring" not in err
    out, _ = call("run.device=cpu", "--refresh")
    assert "measured just now" in out
    assert json.loads(cache_file().read_text())["matmul"] != kept["matmul"]


@pytest.mark.parametrize(
    "content", ["", "not JSON", "[1]", '{"version": 2}', '{"version": 1, "collectives": [{}]}']
)
def test_a_damaged_cache_is_reported_and_measured_again(content: str) -> None:
    ceilings(probe("cpu"), (), bandwidth=False)
    path = cache_file()
    path.write_text(content)
    out, err = call("run.device=cpu", "--json")
    assert json.loads(out)["rates"]["matmul"]["float32"] > 0
    assert "".join(str(path).split()) in "".join(err.split())
    assert "measuring again" in err
    assert Ceilings.from_dict(json.loads(path.read_text())).matmul


def test_a_busy_processor_is_mentioned() -> None:
    call("run.device=cpu", "--json")
    kept = json.loads(cache_file().read_text())
    for load, busy in ((0.1, False), (1.5, True)):
        cache_file().write_text(json.dumps({**kept, "load": load}))
        assert ("Other processes were running" in call("run.device=cpu")[1]) == busy


def test_a_technique_that_cannot_run_here_has_the_sentence_of_its_requirement() -> None:
    judged = rows(command.check_techniques(load_recipe("tiny"), probe("cpu")))
    sentences = {need.message for need in registry()["tf32"].requires}
    assert not judged["tf32"]["runs"]
    assert set(judged["tf32"]["reasons"]) <= sentences
    facts = {"name": "compile", "group": "host", "stage": "COMPILE"}
    assert judged["compile"] == {**facts, "runs": True, "reasons": []}
    assert rows(command.check_techniques(load_recipe("tiny"), with_gpus(1)))["tf32"]["runs"]


def test_reasons_follow_the_recipe_as_well_as_the_machine() -> None:
    machine = with_gpus(1)
    plain = rows(command.check_techniques(load_recipe("tiny"), machine))["flash_attention"]
    assert not plain["runs"]
    assert "amp_bf16" in plain["reasons"][0]
    mixed = rows(command.check_techniques(load_recipe("tiny", ["techniques+=amp_bf16"]), machine))
    assert mixed["flash_attention"]["runs"]
    assert mixed["amp_bf16"]["runs"]
    assert mixed["pure_bf16"]["reasons"] == ["it conflicts with amp_bf16, which the recipe uses"]


def test_a_conflict_counts_whichever_of_the_two_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = registry()["compile"]
    known = KnownTechniques(
        [
            plain,
            replace(plain, name="first", conflicts=("compile",)),
            replace(plain, name="second", conflicts=()),
        ]
    )
    monkeypatch.setattr("rush.techniques.registry", lambda: known)
    recipe = load_recipe("tiny", ["techniques=['compile']"])
    judged = rows(command.check_techniques(recipe, probe("cpu")))
    assert {name for name, row in judged.items() if row["runs"]} == {"compile", "second"}
    recipe = load_recipe("tiny", ["techniques=['first']"])
    judged = rows(command.check_techniques(recipe, probe("cpu")))
    assert {name for name, row in judged.items() if row["runs"]} == {"first", "second"}


def test_a_recipes_own_technique_that_cannot_run_is_a_row_not_the_end() -> None:
    out, _ = call("run.device=cpu", "techniques+=tf32", "--json")
    assert not rows(json.loads(out)["techniques"])["tf32"]["runs"]


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (["tiny", "techniques+=flash_atention"], RecipeError, "did you mean 'flash_attention'"),
        (["techniques+={name='compile', mod='default'}"], RecipeError, "no knob 'mod'"),
        (["tinny"], RecipeError, "did you mean 'tiny'"),
        (["tiny", "batch.macro=3"], RecipeError, "batch.micro"),
        (["tiny", "run.device=cpu", "--collectives", "9999"], MachineError, "Ask for 2 to"),
        pytest.param(["run.device=cuda"], MachineError, "cuda was asked for",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_before_anything_is_measured(
    words: list[str], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        call(*words)
    assert not cache_folder().exists()


@pytest.mark.parametrize("value", ["0", "1", "-2", "two", "2.5"])
def test_a_number_of_processes_that_is_none_ends_with_exit_code_2(value: str) -> None:
    result = CliRunner().invoke(app, ["--collectives", value])
    assert result.exit_code == 2
    assert "--collectives" in result.stderr
    assert not cache_folder().exists()


def test_gpus_and_the_links_between_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    command._show_machine(with_gpus(2))
    out = capsys.readouterr().out
    assert "2 × NVIDIA H200 (141 GiB each)" in out
    assert "driver 580.1" in out
    assert [line.split() for line in out.splitlines() if "nvlink" in line] == [
        ["0", "–", "1", "nvlink", "yes"]
    ]


def test_several_gpus_are_measured_together_unasked_and_a_failure_does_not_end_the_probe(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | None] = []
    single = Ceilings("f", time.time())

    def measured(
        machine: Machine,
        dtypes: object = None,
        *,
        collectives: int | None = None,
        **rest: Callable[..., None],
    ) -> Ceilings:
        asked.append(collectives)
        if collectives is not None:
            raise MachineError("process 1 of 2 ended with 1: no route")
        return single

    monkeypatch.setattr("rush.hardware.ceilings", measured)
    assert command._measure(with_gpus(2), None, False) is single
    assert asked == [None, 2]
    assert "no route" in capfd.readouterr().err
    with pytest.raises(MachineError, match="no route"):
        command._measure(with_gpus(2), 2, False)
    assert command._measure(with_gpus(1), None, False) is single
    assert asked[-1] is None


def test_measured_rates_stand_beside_the_datasheet(capsys: pytest.CaptureFixture[str]) -> None:
    found = Ceilings("f", time.time(), matmul={"bfloat16": (Sample("8192x8192x8192", 7.9152e14, (1.0,)),)})
    command._show_rates(found, datasheet_peaks(with_gpus(1)))
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "bfloat16" in line)
    assert row == ["bfloat16", "matmul", "792", "TFLOP/s", "80%", "8192", "×", "8192", "×", "8192"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "just now"), (59.9, "just now"), (60, "1 minute ago"), (3599, "59 minutes ago"), (3600, "1 hour ago"),
     (3 * 3600 + 5, "3 hours ago"), (86_400 * 2.5, "2 days ago")],
)  # fmt: skip
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert command.ago(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(69.8e9, "69.8 GFLOP/s"), (9.89e14, "989 TFLOP/s"), (251e6, "251 MFLOP/s"), (7, "7 FLOP/s")],
)
def test_a_rate_has_three_digits(value: float, text: str) -> None:
    assert command.quantity(value, "FLOP/s") == text
