"""A recipe small enough to tune in seconds: a model of ten thousand parameters on this project's own text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tune_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _surroundings(tune_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tune_cache))
    # Kernels that are only interpreted here are no candidates.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # One thread: with two, every other process on a small machine makes them wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    corpus = folder / "corpus"
    corpus.mkdir()
    for path in sorted((ROOT / "rush" / "models").glob("*.py")):
        (corpus / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    recipe = folder / "small.toml"
    recipe.write_text(
        f"""
        [model]
        name = "tiny"
        shape = {{num_layers = 2, hidden = 32, num_kv_heads = 4, head_dim = 8, intermediate = 64, vocab_size = 320}}
        [data]
        source = "files"
        files = [{json.dumps(str(corpus / "*.txt"))}]
        validation = 0.2
        [batch]
        micro = 2
        sequence = 32
        total_tokens = 256
        [optimizer]
        lr = 1e-3
        [schedule]
        steps = 4
        warmup = 2
        [run]
        device = "cpu"
        sample_tokens = 0
        tensorboard = false
        """
    )
    return recipe
