"""The script that compares runs: it sees a difference where there is one, in a whole study too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.same_bits import astray, between, difference
from scripts.same_bits_ops import try_case
from tests.fresh_cache import fresh_cache

ROOT = Path(__file__).resolve().parents[1]


def run(loss: float = 2.0, digest: str = "a") -> dict[str, Any]:
    rows = [{"step": 1, "loss": 3.0, "grad_norm": 1.0}, {"step": 2, "loss": loss, "grad_norm": 1.0}]
    return {
        "rows": {"metrics.jsonl": rows, "samples.jsonl": []},
        "files": {"checkpoints/step-000002/model.safetensors": digest},
    }


def test_the_first_difference_of_two_runs_is_named() -> None:
    assert difference(run(), run()) == ""
    assert difference(run(), run(loss=2.0000002)).startswith("metrics.jsonl, step 2: loss 2.0 and")
    assert difference(run(), run(digest="b")) == "files: checkpoints/step-000002/model.safetensors"
    assert difference(run(), {"failed": "exit 1: no"}) == "exit 1: no"
    assert astray(run(), run(loss=2.5)) == {"loss": 0.25, "grad_norm": 0.0}


def test_traces_of_two_processes_tell_gradients_weights_and_tiles_apart() -> None:
    def trace(gradient: str, tile: str) -> dict[str, Any]:
        step = {"loss": "0x1p0", "grad_norm": gradient, "weights": {"w": gradient}}
        return {"gradients": [{"w": gradient}] * 2, "losses": ["0x1p0"] * 2, "steps": [step],
                "kernels": {"triton_red": [tile]}, "seconds": 1.0}  # fmt: skip

    found = between(trace("a", "8"), trace("b", "16"))
    assert found["same process, gradients"] == [[], []]
    assert found["two processes, gradients"] == found["two processes, steps"][0]["weights"] == ["w"]
    assert found["kernels with other tiles"] == {"triton_red": [["8"], ["16"]]}


def test_an_operator_that_draws_or_reads_unwritten_memory_is_found_out() -> None:
    def inputs() -> dict[str, torch.Tensor]:
        return {"x": torch.ones(64)}

    assert set(try_case((lambda x: x * 2, inputs), 3).values()) == {"equal"}
    drawn = try_case((lambda x: x * torch.rand(()), inputs), 3)
    assert drawn["as it is"] == drawn["deterministic"] == {"the result": "2 of 3"}
    unwritten = try_case((lambda x: torch.empty_like(x).copy_(x)[:0].sum() + torch.empty(4)[0], inputs), 1)
    assert "the result (reads unwritten memory)" in unwritten["deterministic, memory filled"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_runs_and_a_killed_one_of_a_ready_recipe_are_equal(tmp_path: Path) -> None:
    words = ["tiny", "run.device=cpu", "--layers", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "same_bits.py", *words],
        check=False, capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RUSH_CACHE": str(fresh_cache(tmp_path / "cache"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| tiny | equal | equal | - | - |" in done.stdout
    found = json.loads((tmp_path / "out" / "same_bits.json").read_text())["deterministic"]["tiny"]
    assert 0 < found["killed"]["saved"] < found["killed"]["made"]
