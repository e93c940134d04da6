"""`rush ladder here`: the ladder that the probe and the planner choose for a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rush.cli import app, ladder
from rush.hardware import Machine, probe
from rush.lab.ladder.here import ROOM, choose, ladder_here, peak
from rush.lab.ladder.ladder_file import load_ladder
from rush.techniques import registry
from tests.new_process import in_new_process

ROOT = Path(__file__).resolve().parents[2]
H200 = Machine.from_dict(
    json.loads((ROOT / "results/gpt2-124m-ladder-h200/ladder.json").read_text())["machine"]
)


def _with_memory(gib: float) -> Machine:
    return replace(H200, devices=(replace(H200.devices[0], memory_bytes=int(gib * 2**30)),))


@pytest.mark.parametrize(
    ("gib", "name"), [(139.8, "gpu"), (39.4, "gpu"), (31.8, "gpu-small"), (11.6, "gpu-small"), (7.6, "tiny")]
)
def test_the_memory_of_the_gpu_decides(gib: float, name: str) -> None:
    chosen, reason = choose(_with_memory(gib))
    assert chosen == name
    assert name in reason
    assert H200.name in reason
    assert (chosen == "tiny") == ("needs" in reason)


def test_a_machine_without_a_gpu_climbs_tiny() -> None:
    name, reason = choose(probe("cpu"))
    assert name == "tiny"
    assert reason.startswith("The ladder for this machine is tiny: CPU ")


def test_the_probe_is_the_real_one() -> None:
    assert ladder_here() == choose(probe())


def _choose_and_look() -> tuple[str, bool]:
    import torch

    return ladder_here()[0], torch.cuda.is_initialized()


@pytest.mark.gpu
def test_the_process_of_a_ladder_never_opens_the_gpu() -> None:
    name, opened = in_new_process(_choose_and_look)
    assert name == choose(probe("cuda"))[0]
    assert not opened


def test_what_the_planner_says_of_the_base_is_what_an_h200_measured() -> None:
    record = json.loads((ROOT / "results/gpt2-124m-ladder-h200/ladder.json").read_text())
    measured = max(rung["peak_memory_bytes"] or 0 for rung in record["rungs"][:4])
    assert load_ladder("gpu").base.micro == record["rungs"][0]["micro"]
    assert measured <= peak(load_ladder("gpu")) <= measured / ROOM


@pytest.mark.parametrize("name", ["gpu", "gpu-small"])
def test_the_ladders_for_gpus_need_no_network_and_begin_plain(name: str) -> None:
    plan = load_ladder(name)
    assert plan.base.techniques == []
    assert (plan.base.data.source, plan.base.data.tokenizer) == ("python-packages", "train")
    cuda = [need.met(H200, plan.base) for a in plan.additions if a.technique_name == "tf32"
            for need in registry()["tf32"].requires]  # fmt: skip
    assert cuda
    assert all(cuda)


def test_the_command_says_which_ladder_it_climbs_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def stop(name: str, changes: list[str]) -> None:
        asked.append(name)
        raise KeyError

    monkeypatch.setattr("rush.lab.ladder.ladder_file.load_ladder", stop)
    monkeypatch.setattr("rush.lab.ladder.here.ladder_here", lambda: ("gpu-small", "The reason."))
    said = CliRunner().invoke(app, ["ladder", "here"])
    assert asked == ["gpu-small"]
    assert "The reason." in said.stderr
    assert ladder.ladder.__doc__ is not None
    assert "rush ladder here" in ladder.ladder.__doc__
