"""The page of a run: what it says, what it weighs, and how it behaves in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import rush
from rush.errors import DataError, RecipeError
from rush.records.metrics import MetricsRow
from rush.report.redraw import redraw
from rush.report.run_page import run_page
from rush.report.run_view import headline, read_run, recipe_changes, warnings
from rush.training.view import View
from tests.report.browser import Browser, Page
from tests.report.made_up_run import REAL_RUN, append_rows, write_run
from tests.report.test_report_browser import CONTRAST, OVERFLOWING
from tests.small_recipe import write_small_recipe

ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_a_real_run_is_told_in_its_headline_and_its_figures() -> None:
    run = read_run(REAL_RUN)
    assert headline(run) == (
        "gpt2-124m finished at step 3\u202f540 of 3\u202f540: validation loss 2.7899, training loss 1.7463."
    )
    page = run_page(run)
    for words in (
        "best 2.7007 at step 2478",
        "NVIDIA H200",
        "fused_update",
        "The validation loss was best at step 2478",
    ):
        assert words in page
    for title in ("Speed", "MFU", "Memory", "Learning rate", "Gradient norm"):
        assert f"<strong>{title}</strong>" in page


def test_the_page_of_a_run_of_any_length_stays_under_a_megabyte(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 400 * 16 + 1):  # as many points as a curve can have
            noise = (step * 7919 % 1000) / 1000
            file.write(
                f'{{"step":{step},"loss":{3 + noise},"grad_norm":{noise},"lr":{1e-3 * noise},"tokens":{step * 4096},"epoch":{step / 1e4},'
                f'"tokens_per_s":{1e5 + 1e4 * noise},"step_s":0.04,"memory_bytes":{10**9 + int(1e8 * noise)},"mfu":{0.4 + noise / 10}'
                + (f',"val_loss":{3.5 + noise / 10}}}\n' if step % 7 == 0 else "}\n")
            )
    run = read_run(folder)
    assert len(run.series.buckets) == 400
    assert 300_000 < len(run_page(run).encode()) < 1_000_000
    assert "finished" not in headline(run)  # there is no recipe to tell how many steps it should have


@pytest.mark.parametrize(
    ("lock", "failed", "rows", "status"),
    [
        ("", False, 100, "finished"),
        ("", False, 60, "interrupted"),
        ("", True, 60, "failed"),
        ("alive", False, 60, "running"),
        ("dead", False, 60, "interrupted"),
        ("elsewhere", False, 60, "running"),
    ],
)
def test_the_status_comes_from_lock_steps_and_failure(
    tmp_path: Path, lock: str, failed: bool, rows: int, status: str
) -> None:
    folder = write_run(tmp_path / "run", rows=rows, steps=100)
    host = "another-host" if lock == "elsewhere" else socket.gethostname()
    pid = 2**31 - 2 if lock == "dead" else os.getpid()
    (folder / ".lock").write_text(json.dumps({"pid": pid, "host": host, "started": ""}) if lock else "")
    if failed:
        (folder / "failure.json").write_text('{"phase": "step", "step": 61, "techniques": ["compile"]}')
    run = read_run(folder)
    assert run.status == status
    if failed:
        assert "compile" in " ".join(warnings(run))


def test_a_run_that_wrote_nothing_for_long_is_stale(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows=60, steps=100)
    (folder / ".lock").write_text(
        json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": ""})
    )
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    assert read_run(folder).status == "stale"


def test_differences_from_the_ready_recipe_are_those_that_were_made(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rows=30, lr=3e-4))
    changes = {key: (before, after) for key, before, after in recipe_changes(run.recipe)}
    assert changes["optimizer.lr"] == ("0.002", "0.0003")
    assert changes["schedule.steps"] == ("200", "30")
    assert "schedule.warmup" not in changes
    assert "2e-3" not in str(changes)


def test_hostile_names_and_samples_are_text(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(0)<"
    write_run(folder, rows=30, samples=[{"step": 30, "prompt": ATTACK, "text": ATTACK, "why": ATTACK}],
              machine={"device": ATTACK, "devices": [{"name": ATTACK}]})  # fmt: skip
    (folder / "notes.jsonl").write_text(json.dumps({"step": 1, "note": ATTACK}) + "\n")
    page = run_page(read_run(folder))
    assert page.count("<script>") == 1  # our own
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize(
    "spoiled", ["metrics.jsonl", "samples.jsonl", "machine.json", "recipe.toml", "notes.jsonl"]
)
def test_a_damaged_file_costs_its_part_and_not_the_page(tmp_path: Path, spoiled: str) -> None:
    folder = write_run(tmp_path / "run", rows=30)
    with open(folder / spoiled, "ab") as file:
        file.write(b"\xff\x00{[garbage\n")
    assert "30" in run_page(read_run(folder))


def test_a_folder_without_steps_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no record"):
        redraw(tmp_path, tmp_path / "report.html")
    folder = write_run(tmp_path / "run", rows=0, steps=10)
    with pytest.raises(DataError, match="no step is recorded"):
        redraw(folder, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_one_step_and_values_far_apart_can_be_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", rows=1, steps=10)
    redraw(folder, tmp_path / "one.html")
    drawn = (tmp_path / "one.html").read_text()
    assert 'class="curve series-1 line" d="M46' not in drawn  # no line of one point,
    assert (
        drawn.count("<title>training, smoothed") == 6
    )  # but its mark, over steps, tokens and time, wide and narrow
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": -1e90, "lr": 0, "grad_norm": 1e-90, "tokens_per_s": 1e90}\n')
    redraw(folder, tmp_path / "far.html")
    assert "nan" not in (tmp_path / "far.html").read_text().lower().replace("finance", "")


class Interrupting(View):
    """Presses Ctrl-C after the second step, and remembers what it is told."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.notes = at, list[str]()

    def row(self, row: MetricsRow) -> None:
        if row["step"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_real_run_writes_its_page_when_interrupted_and_ends_well_where_it_cannot(tmp_path: Path) -> None:
    recipe, out = write_small_recipe(tmp_path, steps=4), tmp_path / "run"
    stopped = rush.train(str(recipe), out=out, view=Interrupting(2)).summary
    assert stopped.interrupted
    page = (out / "report.html").read_text()
    assert f"tiny stopped at step {stopped.step} of 4" in page
    assert "in the folder that holds this one: rush train --out run --resume" in page
    (out / "report.html").unlink()
    (out / "report.html").mkdir()  # where a file is to go
    view = Interrupting()
    assert rush.train(out=out, resume=True, view=view).summary.step == 4
    assert "page was not written" in view.notes[-1]
    said = [json.loads(line) for line in (out / "notes.jsonl").read_text().splitlines()]
    resumed = f"Resuming from step-{stopped.step:06d}."
    assert {"step": stopped.step, "note": resumed} in said
    (out / "report.html").rmdir()
    assert rush.write_report(out) == out / "report.html"
    assert "tiny finished at step 4 of 4" in (out / "report.html").read_text()
    assert resumed in (out / "report.html").read_text()
    with pytest.raises(RecipeError, match="already holds a run"):
        rush.train(str(recipe), out=out, view=view)


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    redraw(REAL_RUN, tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html")
    yield page
    page.close()


VISIBLE = "[...document.querySelectorAll('#curves .axis-title')].filter(e => e.getClientRects().length).map(e => e.textContent)"


def test_the_axis_switch_shows_one_axis_in_every_panel(page: Page) -> None:
    assert page.complaints() == []
    for name, title in (("steps", "step"), ("tokens", "tokens"), ("time", "minutes of training")):
        page.click(f"button[data-show={name}]")
        seen = page.evaluate(VISIBLE)
        assert seen.count(title) == 6
        assert sum(word in ("step", "tokens", "minutes of training") for word in seen) == 6
    drawn = (
        "[...document.querySelectorAll('path.curve')].filter(p => p.getAttribute('d').length > 1000).length"
    )
    assert page.evaluate(drawn) == 3 * (
        2 * 2 + 5
    )  # raw and smoothed loss, wide and narrow, and five other panels


def test_the_page_fits_a_phone_and_asks_for_nothing(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows=60, steps=100)
    append_rows(folder, range(61, 65))
    redraw(folder, tmp_path / "page.html")
    page = browser.open(tmp_path / "page.html", width=390, dark=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(OVERFLOWING) == []
    for dark in (True, False):
        page.prefer(dark=dark)
        seen, low = page.evaluate(CONTRAST)
        assert seen > 80
        assert low == []
    assert page.complaints() == []
    assert page.requests() == [(tmp_path / "page.html").as_uri()]
    assert re.search("not finished|stopped at step", page.evaluate("document.body.innerText"))
    page.close()
