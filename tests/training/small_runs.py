"""A run small enough to be started, killed and compared many times: its recipe and how to look at it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rush.lab.trial.starter import Starter, Streams
from tests.forks import shared_starter
from tests.fresh_cache import fresh_cache
from tests.real_text import write_to

ROOT = Path(__file__).resolve().parents[2]
TIMES = {"tokens_per_s", "trained_per_s", "step_s", "data_s", "memory_bytes", "mfu", "ceiling_fraction"}


def write_corpus(folder: Path) -> Path:
    """A few documents of real text."""
    return write_to(folder)


def small_recipe(corpus: Path, family: str = "gpt2", **sections: dict[str, Any]) -> str:
    """TOML of a model of some ten thousand parameters on that corpus; `run={"keep": 5}` and the like change it."""
    kv_heads = 4 if family == "gpt2" else 2
    shape = {
        "num_layers": 2,
        "hidden": 32,
        "num_kv_heads": kv_heads,
        "head_dim": 8,
        "intermediate": 64,
        "vocab_size": 320,
    }
    tree: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny" if family == "gpt2" else "llama-tiny", "shape": shape},
        "data": {"source": "files", "files": [str(corpus / "*.txt")], "validation": 0.2},
        "batch": {"micro": 2, "sequence": 16, "total_tokens": 64},
        "optimizer": {"lr": 1e-2},
        "schedule": {"steps": 40, "warmup": 5},
        "run": {
            "deterministic": True,
            "save_every": 1,
            "validate_every": 7,
            "validate_sequences": 4,
            "sample_every": 11,
            "sample_tokens": 8,
            "tensorboard": False,
        },
    }
    for name, changes in sections.items():
        tree[name] = {**tree.get(name, {}), **changes}
    lines: list[str] = []
    for name, part in tree.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in part.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def rush(*words: str | Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, forked from one that has imported everything."""
    with TemporaryDirectory() as folder:
        streams = Streams(Path(os.devnull), Path(folder) / "stdout", Path(folder) / "stderr")
        codes = _starter().rush([str(word) for word in words], streams, [environment(cache)], limit_s=240)
        assert codes is not None, f"not done after 240 s: {streams.stderr.read_text()}"
        return subprocess.CompletedProcess(
            words, codes[0], streams.stdout.read_text(), streams.stderr.read_text()
        )


@functools.cache
def _starter() -> Starter:
    starter = shared_starter(dismantle=True)
    atexit.register(starter.close)
    return starter


def rush_alone(*words: str | Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process that nothing was imported into before: where its memory or its end is looked at."""
    return subprocess.run(
        [sys.executable, "-m", "rush", *map(str, words)],
        check=False,
        cwd=ROOT,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=240,
    )


def start_rush(*words: str | Path, cache: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rush", *map(str, words)],
        cwd=ROOT,
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def environment(cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        "RUSH_CACHE": str(fresh_cache(cache)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows without what depends on the clock; an unfinished last line is left out."""
    path = folder / name
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in whole]


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Every sealed checkpoint's files by name; the manifest's are the hashes of the others."""
    found = (folder / "checkpoints").glob("step-*/*") if (folder / "checkpoints").is_dir() else []
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
