"""On a CUDA device: a compiled run that is asked to stop saves first."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.small_runs import ROOT, environment, rows, small_recipe, write_corpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("techniques", ["[]", "['amp_bf16', 'flash_attention', 'fused_adamw', 'compile']"])
def test_sigterm_to_the_group_ends_the_run_after_its_step_with_a_checkpoint(
    tmp_path: Path, techniques: str
) -> None:
    recipe = tmp_path / "recipe.toml"
    run = {
        "save_every": 0,
        "validate_every": 0,
        "sample_tokens": 0,
        "tensorboard": True,
        "deterministic": False,
    }
    corpus = write_corpus(tmp_path / "corpus")
    recipe.write_text(small_recipe(corpus, schedule={"steps": 100_000}, run=run))
    words = ["train", recipe, f"techniques={techniques}", "--out", tmp_path / "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rush", *map(str, words)],
        cwd=ROOT,
        env=environment(tmp_path / "cache"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(rows(tmp_path / "run")) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    subprocess.run(["kill", "-TERM", "--", f"-{process.pid}"], check=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (process.returncode, out[-800:], err[-800:])
    last = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:06d}" / "manifest.json").is_file()
    assert signal.Signals.SIGTERM.name not in err
