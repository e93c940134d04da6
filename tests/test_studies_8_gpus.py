"""results/studies-8-gpus/commands.sh: every command is one that rush accepts, and a rehearsal on the CPU writes every record."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rush.cli import app
from rush.lab.ladder.ladder_file import load_ladder
from rush.lab.race.contenders import check_comparable, read_contenders
from rush.lab.scaling.layouts import laid_out
from rush.lab.scaling.study_file import StudyPlan, load_study
from rush.records.ladder import LADDER
from rush.records.race import RACE
from rush.records.scaling import SCALE
from tests.several_devices_script import load

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "results" / "studies-8-gpus" / "commands.sh"


def listed(**environment: str) -> list[list[str]]:
    """The commands that the script would run."""
    own = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    made = subprocess.run(["bash", SCRIPT], env={**own, **environment, "LIST": "1"}, capture_output=True, text=True, check=True)  # fmt: skip
    lines = [shlex.split(line) for line in made.stdout.splitlines()]
    return [words[words.index("rush") :] for words in lines]


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command, as the real command line reads them; an error of usage where it does not."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = group.commands[words[1]].make_context(words[1], list(words[2:])).params
    return found


@pytest.mark.parametrize(("tiny", "devices"), [("", "8"), ("1", "2")])
def test_every_command_is_one_that_rush_accepts(tiny: str, devices: str) -> None:
    commands = listed(TINY=tiny, DEVICES=devices)
    assert {words[1] for words in commands} == {"scale", "ladder", "race"}
    for words in commands:
        given = parsed(words)
        if words[1] == "scale":
            _check_study(load_study(given["recipe"], given["overrides"], given["devices"], given["layouts"], group_of_one=given["group_of_one"]))  # fmt: skip
        elif words[1] == "ladder":
            assert load_ladder(given["name"], given["overrides"] or []).base.run.memory_limit_gb
        else:
            contenders = read_contenders(given["recipes"])
            check_comparable(contenders)
            assert {one.recipe.layout.fsdp for one in contenders} == {int(devices)}


def _check_study(plan: StudyPlan) -> None:
    """Every layout of the study can be written as a recipe on the most devices, strong and weak; few are refused on fewer."""
    for layout in plan.layouts:
        if layout == "hybrid" and plan.devices[-1] < 4:
            continue
        if layout == "zero3xtp2" and plan.devices[-1] < 4:
            continue
        for scaling in ("strong", "weak"):
            devices = plan.devices[-1]
            recipe = laid_out(plan.recipe, layout, devices, plan.tokens(scaling, devices))
            assert recipe.world == devices


def test_an_unknown_study_is_refused_with_the_known_ones() -> None:
    made = subprocess.run(["bash", SCRIPT, "scales"], capture_output=True, text=True, check=False)
    assert made.returncode == 2
    assert "allowed: scale, links, ladders, race, page" in made.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_on_cpu_ranks_writes_every_record_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    out = tmp_path / "results" / "studies-8-gpus"
    rush = Path(sys.executable).parent / "rush"
    environment = {
        **os.environ,
        "TINY": "1",
        "DEVICES": "2",
        "OUT": str(out),
        "RUSH": str(rush),
        "OMP_NUM_THREADS": "1",
    }
    first = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    for name in ("scale-1b", "scale-cp", "scale-8b", "links"):
        record = SCALE.read(out / name)
        assert record["finished"]
        ran = [p for p in record["points"] if p["devices"] == 2 and p["status"] == "ok" and p["peer_to_peer"]]
        assert ran or name == "scale-cp"
        assert all((p["parity"] or {}).get("verdict") == "equal" for p in ran), name
    statuses = {rung["name"]: rung["status"] for rung in LADDER.read(out / "llama-3.2-1b-24gb")["rungs"]}
    assert statuses["batch.micro=16"] == "out_of_memory"
    assert statuses["checkpoint_full, batch.micro=8"] == "ok"
    assert len(RACE.read(out / "race-zero")["contenders"]) == 2
    (out / ".done-links").unlink()  # as after an interruption: this study resumes, all others are done
    again = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.count("done before") == 5
    (tmp_path / "results" / "plan-charts").symlink_to(ROOT / "results" / "plan-charts")
    found = load().pieces(tmp_path / "results")
    assert "| zero3 | 2 |" in found["studies gpu"]
    assert "race-zero" in found["studies gpu"]
    assert "Under 0.22 GB" in found["chart batch"]
