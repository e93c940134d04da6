"""A real ladder over batches under a limit of memory: the plain one runs out, the one with checkpointing does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.lab.ladder.climb import climb
from rush.lab.ladder.ladder_file import load_ladder
from rush.ready import LADDERS
from rush.report.batch_view import PLAIN, batch_view, batch_words
from rush.report.ladder import read_ladder

TINY = """
recipe = "tiny"
rungs = [
  {{ "batch.micro" = 2 }},
  {{ "batch.micro" = 8 }},
  {{ name = "checkpoint_full", "batch.micro" = 8, keep = false }},
]
[base]
techniques = ["fused_loss"]
"batch.micro" = 1
"batch.total_tokens" = "none"
"run.memory_limit_gb" = {limit}
"model.shape.num_layers" = 8
"data.source" = "files"
"data.files" = ["{text}"]
[measure]
windows = 2
window_ms = 10.0
warmup_max_steps = 2
warmup_max_s = 1.0
[parity]
steps = 2
changes = {{ "batch.micro" = 1, "model.shape.num_layers" = 1 }}
"""


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
    text = tmp_path / "text.txt"
    text.write_text("a line of text that a tiny model can read\n" * 3000, encoding="utf-8")
    file = tmp_path / "limit.toml"
    file.write_text(TINY.format(limit=0.2, text=text), encoding="utf-8")
    record = climb(load_ladder(str(file)), tmp_path / "out")
    status = {rung["name"]: rung["status"] for rung in record["rungs"]}
    assert status["batch.micro=8"] == "out_of_memory"
    assert status["checkpoint_full, batch.micro=8"] == "ok"
    view = batch_view(read_ladder(tmp_path / "out"))
    assert view is not None
    assert [rung.micro for rung in view.series[PLAIN]] == [1, 2, 8]
    words = " ".join(batch_words(view))
    assert "Under 0.2 GB" in words
    assert "no checkpointing: 8 rows ran out of memory" in words
