"""A corpus is prepared with the tokenizer that the starting weights know, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.data import Tokenizer, train_bpe
from rush.errors import DataError
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe
from rush.training.corpus import open_corpus
from tests.training.small_runs import small_recipe, write_corpus

ONE = "the quick brown fox jumps over the lazy dog while a small cat sleeps under the old apple tree " * 8
TWO = "def wrap(text, width): return [line.strip() for line in split(text, width) if len(line) > 0] " * 8
SIZE = 300


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, as far as tokenizers go."""
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    train_bpe([ONE], SIZE).save(tmp_path / "base")
    train_bpe([TWO], SIZE).save(tmp_path / "other")
    return tmp_path / "base"


def recipe_for(kind: str, base: Path, tokenizer: str | Path) -> Recipe:
    folder = base.parent
    changes = {"model.init_from": str(base), "data.tokenizer": str(tokenizer), "objective.kind": kind}
    if kind == "sft":
        talks = folder / "talks.jsonl"
        talks.write_text(
            "".join(
                json.dumps({"prompt": f"the fox {n}?", "completion": f"a dog {n}"}) + "\n" for n in range(40)
            )
        )
        changes |= {
            "data.files": [str(talks)],
            "data.validation": 0.2,
            "data.template": "plain",
            "batch.sequence": 64,
        }
    (folder / "recipe.toml").write_text(
        small_recipe(write_corpus(folder / "corpus"), batch={"total_tokens": 128})
    )
    return changed(load_recipe(str(folder / "recipe.toml")), changes)


@pytest.mark.parametrize("kind", ["sft", "lm"])
def test_a_named_tokenizer_of_the_same_size_that_is_not_the_models_is_refused(kind: str, base: Path) -> None:
    with pytest.raises(
        DataError, match=r"other' is not the tokenizer of the weights of .*base: \d+ of 300 entries"
    ):
        open_corpus(recipe_for(kind, base, base.parent / "other"), None, lambda text: None)
    prepared = [path for kind in ("corpora", "documents") if (path := base.parent / "cache" / kind).exists()]
    assert not prepared, "it is refused before anything is prepared"


@pytest.mark.parametrize("kind", ["sft", "lm"])
def test_the_models_own_tokenizer_is_taken_from_wherever_it_is(kind: str, base: Path) -> None:
    copy = base.parent / "copy"
    own = Tokenizer.load(base)
    Tokenizer(json.dumps(json.loads(own.json_text), indent=1), own.eos_token).save(copy)
    assert Tokenizer.load(copy).sha256 != own.sha256
    corpus = open_corpus(recipe_for(kind, base, copy), None, lambda text: None)
    assert corpus.tokenizer.difference(own) is None


def test_a_tokenizer_trained_anew_does_not_go_with_old_weights(base: Path) -> None:
    recipe = changed(recipe_for("lm", base, "train"), {"data.vocab_size": SIZE})
    with pytest.raises(DataError, match=r"'train' is not the tokenizer .* set data\.tokenizer=.*base"):
        open_corpus(recipe, None, lambda text: None)


def test_weights_without_a_tokenizer_take_the_one_that_is_named(base: Path) -> None:
    (base / "tokenizer.json").unlink()
    corpus = open_corpus(recipe_for("sft", base, base.parent / "other"), None, lambda text: None)
    assert corpus.tokenizer.difference(Tokenizer.load(base.parent / "other")) is None
