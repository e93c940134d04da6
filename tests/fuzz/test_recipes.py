"""Recipes and overrides of any content end in a recipe or in one message."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from rush.ready import RECIPES
from rush.recipe import Recipe
from rush.recipe_io import load_recipe, parse, read_tree, write_toml
from rush.techniques import check_recipe, registry
from tests.fuzz.harness import cases, explore, fuzz
from tests.fuzz.mutations import HOSTILE_TOKENS, HOSTILE_VALUES, mutate_tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def accept(recipe: Recipe) -> None:
    """What every command does with a recipe: techniques checked, digest taken, written and read again."""
    check_recipe(recipe)
    assert len(recipe.digest) == 64
    if "name" in recipe.model.model_fields_set:
        import tomllib

        assert parse(tomllib.loads(write_toml(recipe)), auto=recipe.auto) == recipe


@cases(0.08)
def test_any_text_in_place_of_a_recipe(count: int, folder: Path) -> None:
    file = folder / "recipe.toml"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        accept(load_recipe(str(file), auto=True))

    names = RECIPES.names()
    seeds = [RECIPES.find(name).read_bytes() for name in names]
    seeds += [write_toml(load_recipe(name, auto=True)).encode() for name in names[:6]]
    fuzz("recipe_text", read, seeds, count)


@cases(0.08)
def test_any_tree_in_place_of_a_recipe(count: int) -> None:
    def change(chance: Random, content: bytes) -> bytes:
        return (
            content[:-1] + b"," + json.dumps([chance.randrange(2**32), chance.randrange(1, 4)]).encode()[1:]
        )

    def read(content: bytes) -> None:
        # A case is a recipe's name, a random seed and a number of mutations: some hostile values are no JSON.
        name, *rest = json.loads(content)
        tree: Any = read_tree(name)
        if rest:
            chance = Random(rest[0])
            tree = load_recipe(name, auto=True).model_dump() if chance.random() < 0.5 else tree
            for _ in range(rest[1]):
                tree = mutate_tree(chance, tree)
        accept(parse(tree, auto=True))

    fuzz(
        "recipe_tree",
        read,
        [json.dumps([name]).encode() for name in RECIPES.names()],
        count,
        mutators=[change],
    )


def keys() -> list[str]:
    found = []
    for name, field in Recipe.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        found += [f"{name}.{key}" for key in inner] if inner else [name]
    return [
        *found,
        *(f"model.shape.{key}" for key in ("hidden", "num_layers", "rope_theta", "rope_scaling", "x")),
    ]


hostile_text = st.one_of(
    st.sampled_from([token.decode("utf-8", "surrogateescape") for token in HOSTILE_TOKENS]),
    st.sampled_from([str(value) for value in HOSTILE_VALUES if not isinstance(value, int)]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=20),
    st.sampled_from(
        ["none", "auto", "true", "[]", "{}", "1e-3", "16", "64", "1024", "cosine", "sft", "chatml", "nan"]
    ),
    st.sampled_from(sorted(registry())).map(lambda name: f'["{name}"]'),
)
overrides = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(keys()), st.text(alphabet="abmodel.shape_-=+ \n[]\"'", max_size=20)),
        st.sampled_from(["=", "+=", "-=", " = ", ""]),
        hostile_text,
    ).map("".join),
    min_size=1,
    max_size=3,
)


@cases(0.03)
def test_any_override_of_a_recipe(count: int) -> None:
    def read(content: bytes) -> None:
        name, *changes = json.loads(content)
        accept(load_recipe(name, changes, auto=True))

    names = st.sampled_from(["tiny", "sft-lora-tiny", "llama-3.2-1b", "dpo-tiny"])
    lines = st.tuples(names, overrides).map(lambda drawn: json.dumps([drawn[0], *drawn[1]]).encode())
    explore("overrides", lines, read, count)
