"""A ladder on a GPU: its fastest kinds of rungs are lived, resume to the same losses within the lab's tolerance, and are usable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.lab.ladder.climb import climb
from rush.lab.ladder.ladder_file import load_ladder
from tests.real_text import write_to

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LADDER = """
recipe = "llama-tiny"
rungs = ["amp_bf16", "fused_projections", {{ name = "compile", scope = "block" }}, "fused_adamw"]
[base]
techniques = []
"data.source" = "files"
"data.files" = [{files}]
"data.validation" = 0.2
"run.device" = "cuda"
[measure]
windows = 4
[parity]
steps = 3
"""


def test_rungs_with_fused_projections_and_compile_live_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    files = json.dumps(str(write_to(tmp_path / "corpus") / "*.txt"))
    (tmp_path / "ladder.toml").write_text(LADDER.format(files=files))
    record = climb(load_ladder(str(tmp_path / "ladder.toml")), tmp_path / "out")
    lives = {rung["name"]: rung.get("life") for rung in record["rungs"] if rung["status"] == "ok"}
    assert len(lives) == 5, [(rung["name"], rung["reason"]) for rung in record["rungs"]]
    for name, life in lives.items():
        assert life is not None
        assert life["verdict"] == "ok", (name, life["problem"])
