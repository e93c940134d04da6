"""A run whose held-out answers are far longer than those it trains on, beside a wide vocabulary: its steps take less than its
validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rush.data.conversations import DocumentPreparation
from rush.data.holdout import split_of
from tests.training.small_runs import small_recipe

MICRO = 8
SHARE = 0.25


def write_answers(path: Path, held_out_words: int = 150, count: int = 64) -> Path:
    """Questions with answers of one word, and of many where they will be held out."""
    seed = DocumentPreparation.__dataclass_fields__["seed"].default
    rows = []
    for index in range(count):
        question = f"What comes after {index}?"
        held_out = split_of(question, seed, SHARE) == "validation"
        words = [str(index + 1 + more) for more in range(held_out_words if held_out else 1)]
        rows.append({"prompt": question, "completion": " ".join(words)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def long_recipe(answers: Path, vocab_size: int, **sections: dict[str, Any]) -> str:
    """TOML of a fine-tuning on that file, from random weights."""
    given: dict[str, dict[str, Any]] = {
        "model": {"shape": {"num_layers": 1, "hidden": 32, "num_kv_heads": 4, "head_dim": 8, "intermediate": 64,
                            "vocab_size": vocab_size, "context": 1024}},
        "data": {"source": "files", "files": [str(answers)], "validation": SHARE, "template": "plain",
                 "too_long": "error", "vocab_size": 320},
        "objective": {"kind": "sft"},
        "batch": {"micro": MICRO, "sequence": 768, "total_tokens": 768 * MICRO},
        "schedule": {"steps": 4, "warmup": 1},
        "run": {"save_every": 2, "validate_every": 2, "validate_sequences": MICRO, "sample_every": 0, "sample_tokens": 4},
    }  # fmt: skip
    for name, changes in sections.items():
        given[name] = {**given.get(name, {}), **changes}
    # Rows as long as the longest of them, not as batch.sequence.
    return 'techniques = [{name = "pad", shapes = 0}]\n' + small_recipe(answers.parent, **given)
