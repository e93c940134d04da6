"""A rung is usable only after a short life, with real processes and techniques that break beside the steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rush.cli.ladder_table import caption_of, row_cells
from rush.lab.ladder.climb import climb
from rush.lab.ladder.ladder_file import load_ladder
from rush.lab.life.life import LifeResult, PartResult
from rush.lab.life.usable import judged, quick
from rush.recipe_io import load_recipe
from rush.records.ladder import read_ladder
from rush.report import headlines
from rush.report.ladder import read_ladder as read_for_page
from rush.report.page import report_page

PLANTED = Path(__file__).parent / "planted"
BREAKS, STEADY = PLANTED / "breaks.py", PLANTED / "steady.py"
LadderFile = Callable[..., Path]


def _breaks(kind: str, more: str = "") -> str:
    return f'{{name = "breaks", kind = "{kind}"{more}}}'


@pytest.mark.slow
def test_a_rung_that_fails_outside_its_steps_is_unusable_and_the_verdict_names_where(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    kinds = ("validate", "sample", "resume", "killed")
    path = ladder_file([*map(_breaks, kinds[:3]), '"fused_adamw"', _breaks("killed")])
    out = tmp_path / "out"
    record = climb(load_ladder(str(path)), out, extra_techniques=[BREAKS])
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    lives = {kind: rungs[f"breaks(kind={kind})"]["life"] for kind in kinds}
    for kind in ("validate", "sample", "resume"):
        rung, life = rungs[f"breaks(kind={kind})"], lives[kind]
        assert life is not None
        assert rung["verdict"] == "unusable"
        assert rung["tokens_per_s"] is not None
        assert rung["parity"] is not None
        assert rung["parity"]["verdict"] == "equal"
        assert str(life["problem"]).startswith(f"it cannot {kind}: ")
        assert not rung["kept"]
        assert row_cells(rung)[-1] == f"unusable: {str(rung['reason'])[:60]}"
        assert str(life["problem"]) in str(caption_of(record))
    assert lives["validate"] is not None
    assert "planted under no_grad" in str(lives["validate"]["problem"])
    assert "breaks" in str(lives["validate"]["problem"]), "the message names the technique"
    assert lives["resume"] is not None
    assert "it cannot resume: after a resume the " in str(lives["resume"]["problem"])
    # A kill from outside says nothing about the recipe.
    assert lives["killed"] is not None
    assert lives["killed"]["verdict"] == "not known"
    assert rungs["breaks(kind=killed)"]["verdict"] in ("no gain", "cannot tell", "slower", "equal and faster")
    assert "not known: the process was killed from outside" in str(rungs["breaks(kind=killed)"]["reason"])
    last = rungs["fused_adamw"]
    assert last["life"] is not None
    assert last["life"]["verdict"] == "ok"
    assert [part["name"] for part in last["life"]["parts"]] == ["train", "resume"]
    assert "2 of 6 rungs validated, sampled, saved and resumed" in str(caption_of(record))
    assert read_ladder(out) == record
    assert not (out / "work").exists()
    # Gone on with, only the life that is not known is tried again.
    before = {file.name: file.read_bytes() for file in out.glob("trials/*.json")}
    assert sum(name.endswith("-life.json") for name in before) == 5
    climb(load_ladder(str(path)), out, extra_techniques=[BREAKS])
    assert {file.name: file.read_bytes() for file in out.glob("trials/*.json")} == before


@pytest.mark.slow
def test_a_fast_rung_that_cannot_validate_is_not_recommended_and_the_one_below_is(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    base = 'techniques = [{name = "steady", step_us = 60000}]'
    rungs = ['{"batch.micro" = 4}', _breaks("validate", ', "batch.micro" = 8')]
    path, out = ladder_file(rungs, base), tmp_path / "out"
    record = climb(load_ladder(str(path)), out, extra_techniques=[STEADY, BREAKS])
    _, below, top = record["rungs"]
    assert top["gain"] is not None
    assert top["gain"]["ratio"] > 1.2
    assert top["gain"]["over"] == below["name"]
    assert top["verdict"] == "unusable"
    ladder = read_for_page(out)
    said, page = headlines.headline(ladder), report_page(ladder)
    assert f"to {below['title']} at" in said
    assert f"{top['title']} reached" in said
    assert said.endswith("but cannot be trained with.")
    assert "it cannot validate: the validation after step 2 failed" in page
    assert "Life: ok: trained, validated, sampled, saved and resumed." in page
    best = headlines.credited(ladder)
    assert best is not None
    assert best.name == below["name"]


def test_records_without_lives_are_read_and_shown_as_not_lived(tmp_path: Path) -> None:
    old = Path(__file__).parents[2] / "results" / "gpt2-124m-ladder-h200" / "ladder.json"
    ladder = read_for_page(old)
    assert all(rung.life is None and rung.usable for rung in ladder.rungs)
    assert "Life: not lived." in report_page(ladder)
    assert caption_of(read_ladder(old)) is None or "resumed" not in str(caption_of(read_ladder(old)))


def test_a_short_life_has_the_micro_batch_of_the_rung_and_fewer_layers_where_checkpoints_are_large() -> None:
    tiny = load_recipe("tiny")
    assert tiny.accumulation == 2
    short = quick(tiny)
    assert (short.micro, short.accumulation, short.schedule.steps) == (tiny.micro, 2, 4)
    assert short.shape() == tiny.shape()
    assert quick(load_recipe("tiny", ["batch.total_tokens=1024"])).accumulation == 1
    assert quick(load_recipe("tiny", ["batch.total_tokens=8192"])).accumulation == 2
    assert quick(load_recipe("llama-3.1-8b-fast")).shape().num_layers < 8
    assert quick(load_recipe("qlora")).shape().num_layers == load_recipe("qlora").shape().num_layers


@pytest.mark.parametrize(
    ("part", "verdict", "said"),
    [
        (PartResult("whole", "`rush train` was not done after 60 s", 60.0, -signal.SIGKILL, late=True), "not known", "not done after 60 s"),
        (PartResult("again", "exit code -9: Loading", 1.0, -9), "not known", "killed from outside (SIGKILL)"),
        (PartResult("whole", "exit code 4: error: the checkpoint of step 2 failed with OSError: [Errno 28] No space left on "
              "device: 'x'.", 1.0, 4, disk_full=True), "not known", "no room for its checkpoints"),
        (PartResult("whole", "exit code 4: error: the checkpoint of step 2 failed with ValueError: No space left on device", 1.0, 4, phase="save",
              message="the checkpoint of step 2 failed with ValueError: No space left on device."),
         "broken", "it cannot save: "),
        (PartResult("whole", "exit code 5: error: the loss of step 3 is not finite.", 1.0, 5, message="the loss of step 3 is not finite."), "not known", "the loss of step 3"),
        (PartResult("whole", "exit code 2: error: batch.micro is too large.", 1.0, 2), "not known", "its short schedule could not"),
        (PartResult("whole", "exit code 2: error: the validation after step 2 failed: no rows of 17.", 1.0, 2, phase="validation",
              message="the validation after step 2 failed: no rows of 17."),
          "broken", "it cannot validate: the validation after step 2 failed: no rows of 17."),
        (PartResult("again", "exit code 2: error: the technique x changed.", 1.0, 2, message="the technique x changed."), "broken", "it cannot resume: the technique"),
        (PartResult("whole", "exit code 4: error: the checkpoint of step 2 failed with KeyError: 'x'. The full log is /a/b.", 1.0, 4, phase="save",
              message="the checkpoint of step 2 failed with KeyError: 'x'."),
         "broken", "it cannot save: the checkpoint of step 2 failed with KeyError: 'x'."),
        (PartResult("whole", "validations after the steps [4], due after [2, 4]", 1.0, phase="validation"), "broken", "it cannot validate: "),
        (PartResult("whole", "exit code -11: no output", 1.0, -11), "broken", "it cannot be trained with: exit code -11"),
    ],
)  # fmt: skip
def test_what_comes_from_outside_is_not_held_against_a_recipe(
    part: PartResult, verdict: str, said: str
) -> None:
    found, sentence = judged(LifeResult((part,)))
    assert found == verdict
    assert said in str(sentence)
    assert "/a/b" not in str(sentence)
