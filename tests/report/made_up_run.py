"""Run folders for tests: files as a run writes them, with curves that look like training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rush.records.metrics import MetricsRow, RowWriter, SampleRow

ROOT = Path(__file__).resolve().parent.parent.parent
REAL_RUN = ROOT / "results/from-nothing-h200/pretrain"
"""A real run on an H200: 3,540 steps."""


def row_of(step: int, *, rate: float = 1.0, tokens: int = 2048) -> MetricsRow:
    """A row of a run whose loss falls with its tokens, with noise that depends on the step alone."""
    noise = 0.15 * math.sin(step * 12.9898) * math.cos(step * 78.233)
    row: MetricsRow = {
        "step": step,
        "loss": 2.0 + 5.0 * math.exp(-rate * step / 60) + noise,
        "grad_norm": 1.0 + abs(noise),
        "lr": 1e-3 * min(1.0, step / 10),
        "tokens": step * tokens,
        "labels": tokens,
        "epoch": round(step * 0.01, 4),
        "tokens_per_s": tokens / 0.5,
        "step_s": 0.5,
        "data_s": 0.001,
        "memory_bytes": 2**30,
        "mfu": 0.4,
    }
    if step % 25 == 0:
        row["val_loss"] = 2.1 + 5.0 * math.exp(-rate * step / 60)
    return row


def recipe_text(steps: int, lr: float = 2e-3, about: str = "") -> str:
    known = about or "a small GPT-2 on the Python standard library: CPU, a minute or two"
    return (
        f'about = {json.dumps(known)}\ntechniques = ["compile"]\n[model]\nname = "tiny"\n[optimizer]\nlr = {lr}\n'
        f"[schedule]\nsteps = {steps}\nwarmup = 20\n"
    )


def write_run(
    folder: Path, rows: int = 100, steps: int | None = None, *, rate: float = 1.0, lr: float = 2e-3,
    samples: list[SampleRow] | None = None, machine: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A run folder with so many rows of `steps` (all of them unless told otherwise)."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(recipe_text(steps or rows, lr))
    found = {
        "device": "cpu",
        "devices": [{"name": "Test CPU", "memory_bytes": 2**34}],
        "cpu": {"num_threads": 2},
    }
    (folder / "machine.json").write_text(json.dumps(machine or found))
    append_rows(folder, range(1, rows + 1), rate=rate)
    drawn: list[SampleRow] = samples or [{"step": rows, "prompt": "def ", "text": "def main():\n    pass"}]
    with RowWriter(folder / "samples.jsonl", SampleRow) as writer:
        for sample in drawn:
            writer.write(sample)
    return folder


def append_rows(folder: Path, steps: range, *, rate: float = 1.0) -> None:
    with RowWriter(folder / "metrics.jsonl", MetricsRow) as writer:
        for step in steps:
            writer.write(row_of(step, rate=rate))
