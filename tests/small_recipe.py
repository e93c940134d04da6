"""A recipe that trains in seconds: a model of ten thousand parameters on real text."""

from __future__ import annotations

import json
from pathlib import Path

from tests.real_text import write_to


def write_small_recipe(folder: Path, *, batch: str = "", run: str = "", steps: int = 1000) -> Path:
    """Its file in `folder`, with the text beside it; `batch` and `run` are further lines of these tables."""
    corpus = write_to(folder / "corpus")
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
        {batch}
        [optimizer]
        lr = 1e-3
        [schedule]
        steps = {steps}
        warmup = {min(10, steps // 2)}
        [run]
        device = "cpu"
        {run}
        """
    )
    return recipe
