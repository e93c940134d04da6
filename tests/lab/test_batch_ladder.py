"""A real ladder over batches under a limit of memory: the plain one runs out, the one with checkpointing does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.lab.ladder.climb import climb
from rush.lab.ladder.ladder_file import load_ladder
from rush.ready import LADDERS
from rush.report.batch_view import PLAIN, batch_view, batch_words
from rush.report.ladder import read_ladder
from tests.real_text import write_to

REHEARSAL = Path(__file__).parents[2] / "results" / "studies-8-gpus" / "tiny-limit.toml"


@pytest.mark.parametrize("name", ["llama-3.2-1b-80gb", "llama-3.2-1b-24gb"])
def test_ladders_at_a_limit_vary_only_the_batch_and_checkpointing(name: str) -> None:
    plan = load_ladder(name)
    assert plan.base.run.memory_limit_gb in (80, 24)
    assert name in LADDERS.names()
    micros = set()
    for addition in plan.additions:
        assert addition.technique_name in (None, "checkpoint_selective", "checkpoint_full")
        assert set(addition.changes) == {"batch.micro"}
        micros.add(addition.changes["batch.micro"])
    assert {6, 12} & micros
    assert 2 in micros


@pytest.mark.slow
def test_under_a_real_limit_the_plain_batch_runs_out_and_the_checkpointed_one_runs(tmp_path: Path) -> None:
    text = json.dumps([str(write_to(tmp_path / "text") / "*.txt")])
    changes = ["data.source=files", f"data.files={text}", "data.vocab_size=320", "data.validation=0.2"]
    record = climb(load_ladder(str(REHEARSAL), changes), tmp_path / "out")
    status = {rung["name"]: (rung["status"], rung["reason"]) for rung in record["rungs"]}
    assert status["batch.micro=16"][0] == "out_of_memory", status
    assert status["checkpoint_full, batch.micro=8"][0] == "ok", status
    view = batch_view(read_ladder(tmp_path / "out"))
    assert view is not None
    assert [rung.micro for rung in view.series[PLAIN]] == [1, 2, 16]
    words = " ".join(batch_words(view))
    assert "Under 0.22 GB" in words
    assert "no checkpointing: 16 rows ran out of memory" in words
