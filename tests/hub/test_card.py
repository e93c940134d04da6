"""Model cards: what they say of a run, of what a ladder verified and an evaluation measured, and what they keep to themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.errors import DataError, RecipeError
from rush.hub.card import Card, card_of, public_base, shareable_recipe
from rush.hub.push import prepare_upload, repository
from rush.models import SIZES
from rush.recipe import Recipe
from rush.recipe_io import load_recipe, write_toml

LADDER = Path(__file__).parents[2] / "results" / "llama-3.2-1b-h200"


def quiet(text: str) -> None: ...


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """With everything that is private: paths, a project."""
    return load_recipe(
        "llama-3.2-1b",
        [
            f"model.init_from={tmp_path}/bases/mine",
            "data.source=files",
            f'data.files=["{tmp_path}/texts/a.jsonl"]',
            f"data.tokenizer={tmp_path}/bases/mine",
            "run.wandb=secret-project",
            'techniques=["amp_bf16", "flash_attention", "gc_control"]',
        ],
    )


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text(write_toml(recipe))
    rows = [
        {"step": step, "loss": 9.0 - step / 100, "tokens": step * 1000, "epoch": step / 500}
        for step in range(1, 301)
    ]
    rows[-1]["val_loss"], rows[99]["val_loss"] = 6.5, 6.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def card(run: Path, **options: object) -> str:
    made: Card = card_of(run, "someone/model", SIZES["llama-3.2-1b"], step=300, **options)  # type: ignore[arg-type]
    return made.text()


def test_nothing_of_this_machine_is_in_a_card(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    text = card(run, base=None)
    assert str(tmp_path) not in text
    assert "secret-project" not in text
    assert 'files = ["a.jsonl"]' in text
    assert "from `mine`" in text
    assert shareable_recipe(recipe).data.tokenizer == "mine"


def test_the_curve_has_a_dozen_rows_with_the_first_the_last_and_the_validations(run: Path) -> None:
    section = card(run).split("## Loss")[1].split("##")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert 12 <= len(rows) <= 16
    assert rows[0].startswith("| 1 |")
    assert rows[-1] == "| 300 | 6.0000 | 6.5000 |"
    assert "6.2500 at the lowest" in card(run)


def test_a_ladder_says_what_was_verified(run: Path) -> None:
    text = card(run, record=LADDER)
    assert "Measured on NVIDIA H200" in text
    assert "| `amp_bf16` | equal | yes | " in text
    assert "| `gc_control` | not measured |" in text
    without = card(run)
    assert "it was not measured for this card" in without
    assert "| `amp_bf16` | the same up to rounding |" in without


def test_an_evaluation_is_told(run: Path, tmp_path: Path) -> None:
    measured = {
        "models": [
            {"folder": "x", "held_out": {"loss": 2.5, "perplexity": 12.18}, "wins": None, "choices": None}
        ]
    }
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    assert "| held out perplexity | 12.18 |" in card(run, evaluation=tmp_path / "measured.json")
    (tmp_path / "measured.json").write_text("[]")
    with pytest.raises(DataError, match="rush evaluate --json"):
        card(run, evaluation=tmp_path / "measured.json")


def test_a_base_on_the_hub_is_named_with_its_commit(run: Path) -> None:
    assert public_base("some/base@" + "0" * 40) == "some/base@" + "0" * 40
    text = card(run, base="some/base@main", adapter=True)
    assert 'base_model: "some/base"' in text
    assert 'from_pretrained("some/base", revision="main")' in text
    assert "library_name: peft" in text


@pytest.mark.parametrize("name", ["name", "a/b/c", "a/b@main", "../a/b", "hub:a/b", "/a/b", ""])
def test_only_an_owner_and_a_name_are_uploaded_to(name: str) -> None:
    with pytest.raises(RecipeError, match="OWNER/NAME"):
        repository(name)


def test_a_folder_that_is_no_run_is_taken_without_pickles_and_code(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in (
        "adapter_model.safetensors",
        "adapter_model.bin",
        "code.py",
        "tokenizer.json",
        ".hidden.json",
    ):
        (folder / name).write_text("x")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{tmp_path}/base"}))
    ready = prepare_upload(folder, tmp_path / "up", "someone/adapter", note=quiet)
    assert set(ready.files) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert not [path for path in (tmp_path / "up").iterdir() if str(tmp_path) in path.read_text()]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither a run folder, nor"):
        prepare_upload(tmp_path / "empty", tmp_path / "other", "x", note=quiet)
