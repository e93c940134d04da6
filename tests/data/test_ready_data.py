"""The data of the ready recipes as they stand, prepared where no hub may be asked: one recipe for each kind of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.ready import RECIPES
from rush.recipe_io import load_recipe
from rush.training.corpus import open_corpus

KINDS = {
    (recipe.data.source, recipe.data.vocab_size or recipe.shape().vocab_size): name
    for name in RECIPES.names()
    for recipe in [load_recipe(name)]
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_a_ready_recipe_has_its_data_on_every_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of the vocabulary that was asked for, something to learn from and something held out."""
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = load_recipe(name)
    said: list[str] = []
    corpus = open_corpus(recipe, None, said.append)
    assert corpus.tokenizer.vocab_size <= recipe.shape().vocab_size
    batch = next(iter(corpus.validation(recipe, {})))
    assert batch.tokens_bt.numel() > 0
    assert said
