"""Whatever rows and words `rush start` is given, it ends in a recipe or in a message."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rush import start_recipe
from rush.recipe_io import load_recipe
from tests.fuzz.harness import cases, fuzz
from tests.start.small_data import chat, preferences, small_model, texts

SEEDS = [
    "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    for rows in (chat(4), preferences(4), texts(3), chat(2) + texts(2))
]
WORDS = (
    b"optimizer.lr=1e-4",
    b"batch.sequence=64",
    b'techniques=["pad"]',
    b"techniques+=fused_adamw",
    b"schedule.steps=3",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small")


@cases(0.02)
def test_any_rows_end_in_a_recipe_or_a_message(count: int, model: Path, tmp_path: Path) -> None:
    data, file = tmp_path / "rows.jsonl", tmp_path / "recipe.toml"

    def read(content: bytes) -> object:
        data.write_bytes(content)
        made = start_recipe(model, data, "data.bad_rows=drop", device="cpu", out=file, force=True)
        assert load_recipe(str(file)) == made.recipe
        return made

    fuzz("start-rows", read, SEEDS, count)


@cases(0.01)
def test_any_override_ends_in_a_recipe_or_a_message(count: int, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(SEEDS[0])
    pick = random.Random(0)

    def read(content: bytes) -> object:
        return start_recipe(
            model, data, content.decode(errors="replace"), device=pick.choice(("cpu", "4090"))
        )

    fuzz("start-words", read, WORDS, count)
