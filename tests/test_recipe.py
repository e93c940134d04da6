"""Recipes: TOML in and out, overrides, digests, and what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.data.conversations.rows import DOCSTRINGS, HUB_CONVERSATIONS
from rush.data.published_tokenizers import TOKENIZERS
from rush.data.sources import HUB_SOURCES, PYTHON_SOURCES
from rush.errors import RecipeError, nearest
from rush.hub.config import config_from_shape, shape_from_config
from rush.lab.ladder.ladder_file import load_ladder
from rush.models import LinearRopeScaling, RopeScaling
from rush.ready import LADDERS, RECIPES, short_name
from rush.recipe import Recipe
from rush.recipe_io import apply_override, changed, differences, load_recipe, parse, read_tree, write_toml

MINIMAL: dict[str, Any] = {
    "model": {"name": "tiny"},
    "batch": {"micro": 2, "sequence": 16},
    "optimizer": {"lr": 1e-3},
    "schedule": {"steps": 10},
}
READY = ("tiny", "llama-tiny", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b", "llama-3.2-1b", "llama-3.2-3b",
         "llama-3.1-8b")  # fmt: skip


def read_back(tmp_path: Any, recipe: Recipe) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(write_toml(recipe), encoding="utf-8")
    return load_recipe(str(path))


def test_the_ready_recipes_are_the_promised_ones() -> None:
    assert set(READY) <= set(RECIPES.names())


@pytest.mark.parametrize("name", READY)
def test_a_ready_recipe_survives_toml_unchanged(name: str, tmp_path: Any) -> None:
    recipe = load_recipe(name)
    again = read_back(tmp_path, recipe)
    assert again == recipe
    assert again.digest == recipe.digest


text = st.text(max_size=30).filter(lambda value: "\ud800" not in value)


@settings(max_examples=60, deadline=None)
@given(
    about=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40),
    files=st.lists(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=20), max_size=3),
    lr=st.floats(min_value=1e-12, max_value=10, exclude_min=True),
    micro=st.integers(1, 10**6),
    knob=st.one_of(
        st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False)
    ),
    key=st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8),
)
def test_any_recipe_survives_toml_unchanged(
    tmp_path_factory: Any, about: str, files: list[str], lr: float, micro: int, knob: Any, key: str
) -> None:
    technique = {"name": "compile", ("k" + key): knob}
    tree = {**MINIMAL, "about": about, "data": {"files": files}, "techniques": ["tf32", technique]}
    recipe = parse({**tree, "optimizer": {"lr": lr}, "batch": {"micro": micro, "sequence": 16}})
    assert read_back(tmp_path_factory.mktemp("recipe"), recipe) == recipe


def test_the_digest_depends_on_content_and_not_on_how_it_was_written() -> None:
    spelled_out = parse({**MINIMAL, "data": {"source": "python-stdlib"}, "run": {"seed": 1337}})
    assert parse(MINIMAL).digest == spelled_out.digest
    assert changed(parse(MINIMAL), {"run.seed": 2}).digest != spelled_out.digest


def test_a_key_of_run_that_is_as_always_does_not_count() -> None:
    """So a later version can add one, and older runs and measurements keep their names."""
    recipe = parse(MINIMAL)
    assert recipe.content()["run"] == {}
    assert recipe.content()["optimizer"] == recipe.model_dump(mode="json")["optimizer"]
    assert changed(recipe, {"run.keep": recipe.run.keep}).digest == recipe.digest
    assert changed(recipe, {"run.keep": recipe.run.keep + 1}).digest != recipe.digest


def test_dotted_overrides_change_what_they_name() -> None:
    recipe = load_recipe("gpt2-124m", ["batch.micro=16", "optimizer.lr=3e-4", "run.deterministic=true",
                                       "data.files=['a b.txt']", "run.sample_prompt=Once upon a time"])  # fmt: skip
    assert recipe.batch.micro == 16
    assert recipe.optimizer.lr == 3e-4
    assert recipe.run.deterministic is True
    assert recipe.data.files == ["a b.txt"]
    assert recipe.run.sample_prompt == "Once upon a time"


def test_lists_can_be_lengthened_and_shortened() -> None:
    recipe = load_recipe("gpt2-124m", ["techniques-=compile", "techniques+={name='compile', scope='block'}"])
    assert recipe.technique_uses()[-1] == ("compile", {"scope": "block"})
    assert [name for name, _ in recipe.technique_uses()].count("compile") == 1


@pytest.mark.parametrize(
    ("former", "trackers", "digest"),
    [
        ({}, ["tensorboard"], "934117bf"),
        ({"tensorboard": False}, [], "338b3b69"),
        ({"wandb": "p"}, ["tensorboard", "wandb:p"], "940b9755"),
        ({"tensorboard": False, "wandb": "p"}, ["wandb:p"], "e712cb94"),
    ],
)
def test_the_former_keys_of_trackers_are_read_and_keep_their_digests(
    former: dict[str, Any], trackers: list[str], digest: str
) -> None:
    """The digests are those of recipes from before `run.trackers`."""
    old, new = parse({**MINIMAL, "run": former}), parse({**MINIMAL, "run": {"trackers": trackers}})
    assert old.run.trackers == trackers
    assert old.digest[:8] == new.digest[:8] == digest


def test_trackers_are_added_to_and_taken_from_their_default_and_former_keys_do_not_bring_them_back() -> None:
    def trackers(run: dict[str, Any], *overrides: str) -> list[str]:
        tree = {**MINIMAL, "run": run}
        for override in overrides:
            apply_override(tree, override)
        return parse(tree).run.trackers

    assert trackers({}, "run.trackers+=wandb:mine") == ["tensorboard", "wandb:mine"]
    assert trackers({}, "run.trackers-=tensorboard") == []
    assert trackers({"tensorboard": True, "wandb": "p"}, "run.trackers-=tensorboard") == ["wandb:p"]
    assert trackers({"trackers": ["tensorboard", "mlflow"]}, "run.tensorboard=false") == ["mlflow"]
    assert trackers({"wandb": "p"}, "run.wandb=none") == ["tensorboard"]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            {"trackers": ["wandv"]},
            r"run.trackers names 'wandv'; did you mean 'wandb'\? Allowed: mlflow, tensorboard",
        ),
        ({"trackers": ["wandb:"]}, "names 'wandb:'; allowed: a project after the colon"),
        ({"trackers": ["tensorboard:x"]}, "none for tensorboard"),
        ({"trackers": ["wandb", "wandb:x"]}, "names wandb more than once"),
        ({"trackers": "wandb"}, r"run.trackers is 'wandb' \(text\); allowed: a valid list"),
        ({"tensorboard": "yes"}, "run.tensorboard is 'yes'; allowed: true or false"),
        ({"wandb": 3}, "run.wandb is 3; allowed: the name of a project"),
    ],
)
def test_trackers_that_are_none_are_refused(run: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        parse({**MINIMAL, "run": run})


def test_a_former_technique_name_is_read_and_keeps_its_digest() -> None:
    old = load_recipe("results/tune-tiny-n1/recipe.toml")
    assert "fp16_matmul" in old.techniques
    assert old.digest == "7850072f96a94763cacad67486eb7818e8dc83f7c835b7603a38df730c903e48"
    table = parse({**MINIMAL, "techniques": [{"name": "half_products", "scope": "blocks"}]})
    assert table.techniques == [{"name": "fp16_matmul", "scope": "blocks"}]
    assert parse({**MINIMAL, "techniques": table.techniques}).digest == table.digest
    with pytest.raises(RecipeError, match="fp16_matmul more than once"):
        parse({**MINIMAL, "techniques": ["half_products", "fp16_matmul"]})


def test_overrides_know_former_technique_names() -> None:
    assert load_recipe("tiny", ["techniques+=fp16_matmul", "techniques-=half_products"]).techniques == []


def test_accumulation_fills_the_total_batch() -> None:
    recipe = load_recipe("gpt2-124m", ["batch.micro=16"])
    assert recipe.step_tokens == 524_288
    assert recipe.accumulation * 16 * 1024 == 524_288
    assert parse(MINIMAL).accumulation == 1
    assert parse(MINIMAL).step_tokens == 32


def test_a_technique_with_knobs_is_taken_out_by_its_name() -> None:
    given = ["techniques=['tf32', {name='compile', mode='default'}]", "techniques-=compile"]
    assert load_recipe("tiny", given).techniques == ["tf32"]


@pytest.mark.parametrize(("ddp", "fsdp", "accumulation"), [(1, 1, 16), (2, 1, 8), (1, 4, 4), (2, 4, 2)])
def test_ranks_with_other_samples_share_the_tokens_of_a_step(ddp: int, fsdp: int, accumulation: int) -> None:
    words = [
        "batch.micro=1",
        "batch.sequence=64",
        "batch.total_tokens=1024",
        f"layout.ddp={ddp}",
        f"layout.fsdp={fsdp}",
    ]
    recipe = load_recipe("tiny", words)
    assert recipe.accumulation == accumulation
    assert recipe.step_tokens == 1024
    assert load_recipe("tiny", [*words, "layout.tp=2"]).accumulation == accumulation, (
        "ranks of tp read the same"
    )


def test_the_schema_knows_every_key_and_its_meaning() -> None:
    schema = json.loads(json.dumps(Recipe.model_json_schema()))
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert (
        "Sequences per forward pass" in schema["$defs"]["BatchSection"]["properties"]["micro"]["description"]
    )
    assert schema["additionalProperties"] is False


def test_differences_name_the_key_and_both_values() -> None:
    recipe = parse(MINIMAL)
    assert differences(recipe, recipe) == {}
    assert differences(recipe, changed(recipe, {"optimizer.lr": 0.5})) == {"optimizer.lr": (0.001, 0.5)}


REFUSED = [
    (["batch.micr=2"], ["batch.micr", "did you mean 'batch.micro'", "batch.sequence"]),
    (["bach.micro=2"], ["bach", "did you mean 'batch'"]),
    (["batch.micro=two"], ["batch.micro", "'two'", "integer"]),
    (["batch.micro=0"], ["batch.micro", "0", "greater than 0"]),
    (["batch.micro=1.5"], ["batch.micro", "1.5", "integer"]),
    (["batch.micro=true"], ["batch.micro", "True", "integer"]),
    (["optimizer.lr=fast"], ["optimizer.lr", "'fast'", "number"]),
    (["optimizer.lr=nan"], ["optimizer.lr", "nan"]),
    (["optimizer.lr=-1"], ["optimizer.lr", "-1", "greater than 0"]),
    (["optimizer.kind=sgd"], ["optimizer.kind", "'sgd'", "'adamw'"]),
    (["objective.kind=lmm"], ["objective.kind", "'lmm'", "'lm'"]),
    (["batch.micro=16", "batch.total_tokens=5000"], ["batch.total_tokens is 5,000", "4,096 or 6,144"]),
    (["batch.micro=16", "batch.total_tokens=100"], ["batch.total_tokens is 100", "2,048"]),
    (["batch.sequence=512", "batch.total_tokens=8192"], ["batch.sequence is 512", "256 tokens"]),
    (["schedule.warmup=1000"], ["schedule.warmup is 1000", "schedule.steps"]),
    (["model.name=gpt-2"], ["model.name is 'gpt-2'", "gpt2-124m"]),
    (["model.shape.layers=2"], ["model.shape.layers", "num_layers"]),
    (["model.shape.num_heads=5"], ["model.shape"]),
    (["model.shape.num_layers=2.5"], ["model.shape.num_layers", "2.5", "whole number"]),
    (["techniques=[3]"], ["techniques", "3"]),
    (["techniques=['tf32', 'tf32']"], ["tf32", "more than once"]),
    (["techniques=[{mode='default'}]"], ["a technique table needs a name"]),
    (["batch=3"], ["batch", "3", "table"]),
    (["batch.micro.x=3"], ["batch.micro", "value"]),
    (["nonsense"], ["nonsense", "key=value"]),
    (["batch.micro+=1"], ["batch.micro+=", "lists only"]),
    (["techniques-=compile"], ["compile", "not in techniques"]),
    (["run.device=tpu"], ["run.device", "'tpu'", "'cuda'"]),
    (["data.validation=0.9"], ["data.validation", "0.9", "less than 0.5"]),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_a_wrong_value_is_refused_with_what_was_found_and_what_is_allowed(
    overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", overrides)
    message = str(caught.value)
    assert all(part in message for part in said), message
    assert "\n" not in message
    assert message.endswith((".", ")"))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"model = [", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"", "model is missing")],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Any, content: bytes, said: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=said):
        load_recipe(str(path))


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'gpt2-124m'"):
        load_recipe("gpt2-125m")
    with pytest.raises(RecipeError, match="no recipe file at"):
        load_recipe("nowhere/none.toml")


def test_the_page_about_recipes_is_current() -> None:
    import importlib.util

    root = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location("recipe_page", root / "scripts" / "recipe_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (root / "docs" / "recipes.md").read_text(encoding="utf-8") == script.page(), (
        "run scripts/recipe_page.py"
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [("llama-3.1-8b", "llama-3.1-8b"), ("recipes/my-0.5b.toml", "my-0.5b"), ("tiny", "tiny")],
)
def test_a_name_with_points_in_it_stays_whole(given: str, name: str) -> None:
    assert short_name(given) == name


def test_a_word_that_others_begin_with_is_answered_with_those() -> None:
    said = nearest("h200", ["b200", "h200-nvl", "h200-sxm"])
    assert said == "did you mean 'h200-nvl' or 'h200-sxm'? Allowed: b200, h200-nvl, h200-sxm."
    assert nearest("b2000", ["b200", "h200-nvl"]).startswith("did you mean 'b200'?")
    assert nearest("quite else", ["b200"]) == "allowed: b200."


LLAMA3 = '{rope_type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 256}'


@pytest.mark.parametrize(
    ("name", "override", "expected"),
    [
        ("llama-tiny", 'rope_scaling={rope_type = "linear", factor = 4.0}', LinearRopeScaling(4.0)),
        ("llama-tiny", f"rope_scaling={LLAMA3}", RopeScaling(8.0, 1.0, 4.0, 256)),
        ("llama-3.2-1b", "rope_scaling.factor=16.0", RopeScaling(16.0, 1.0, 4.0, 8192)),
        ("llama-3.2-1b", 'rope_scaling={rope_type = "default"}', None),
    ],
)
def test_rope_scaling_is_written_in_a_recipe_and_kept(name: str, override: str, expected: object) -> None:
    recipe = load_recipe(name, [f"model.shape.{override}"])
    assert recipe.shape().rope_scaling == expected
    assert parse(tomllib.loads(write_toml(recipe))) == recipe
    assert shape_from_config(config_from_shape(recipe.shape())) == recipe.shape()


@pytest.mark.parametrize(
    ("name", "table", "says"),
    [
        ("llama-tiny", "4.0", "allowed: a table such as"),
        ("llama-tiny", "{factor = 2.0}", "rope_type is None; allowed: default, linear, llama3"),
        ("llama-tiny", '{rope_type = "dynamic", factor = 2.0}', "rope_type is 'dynamic'"),
            ("llama-tiny", '{rope_type = "yarn", factor = 2.0}', "yarn lacks original_context"),
        ("llama-tiny", '{rope_type = "llama3", factor = 2.0}', "lacks low_freq_factor, high_freq_factor, original_context"),
        ("llama-tiny", '{rope_type = "linear", factors = 2.0}', "did you mean 'factor'"),
        ("llama-tiny", '{rope_type = "linear", factor = inf}', "factor must be a number greater than 0"),
        ("tiny", '{rope_type = "linear", factor = 2.0}', "GPT-2 learns its positions"),
    ],
)  # fmt: skip
def test_a_rope_scaling_that_makes_no_sense_is_refused(name: str, table: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(name, [f"model.shape.rope_scaling={table}"])


def test_an_optional_key_takes_none_as_the_docs_have_it() -> None:
    assert load_recipe("tiny").batch.total_tokens is not None
    recipe = load_recipe("tiny", ["batch.total_tokens=none", "data.limit=none", "model.init_from = none"])
    assert (recipe.batch.total_tokens, recipe.data.limit, recipe.model.init_from) == (None, None, None)
    assert recipe.step_tokens == recipe.micro * recipe.batch.sequence
    with pytest.raises(RecipeError, match=r"batch\.sequence is 'none'"):
        load_recipe("tiny", ["batch.sequence=none"])
    assert load_recipe("tiny", ['model.init_from="none"']).model.init_from == "none"


def test_fields_that_a_model_may_lack_are_set_and_turned_off() -> None:
    recipe = load_recipe("llama-tiny", ["model.name=mistral-tiny", 'model.shape.window="none"'])
    assert recipe.shape().window is None
    windows = ["model.shape.window=7", "model.shape.window_layers=[true, false]"]
    recipe = load_recipe("llama-tiny", ["model.name=qwen3-tiny", *windows])
    assert [recipe.shape().window_of(layer) for layer in range(4)] == [7, None, 7, None]
    for override, says in (
        ("model.shape.window=0.5", "found a number, allowed: a whole number"),
        ("model.shape.window_layers=3", r"allowed: a list such as \[true, false\]"),
        ("model.shape.windows=3", "did you mean 'window'"),
        ("model.shape.window=7", "window is 7, which models of the family llama do not have"),
    ):
        with pytest.raises(RecipeError, match=says):
            load_recipe("llama-tiny", [override]).shape()


def trees() -> dict[str, Any]:
    return {name: read_tree(name) for name in RECIPES.names()}


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_ready_recipe_needs_neither_network_nor_account(name: str) -> None:
    """Text of this machine and a tokenizer trained on it, that fits the published vocabulary; no weights of others."""
    recipe = load_recipe(name)
    assert recipe.data.source in (*PYTHON_SOURCES, *DOCSTRINGS)
    assert recipe.data.tokenizer == "train"
    assert (recipe.data.vocab_size or 0) <= recipe.shape().vocab_size
    assert recipe.model.init_from is None
    assert recipe.data.template in ("auto", "plain")


@pytest.mark.parametrize("name", [name for name, tree in trees().items() if "published" in tree])
def test_one_override_takes_the_published_data(name: str) -> None:
    own, published = load_recipe(name), load_recipe(name, ["data=published"])
    assert published.data.source in (*HUB_SOURCES, *HUB_CONVERSATIONS)
    assert published.data.tokenizer in (*TOKENIZERS, "Qwen/Qwen3-1.7B", "google/gemma-3-4b-pt")
    assert published.data.vocab_size is None
    assert all(key.startswith("data.") for key in differences(own, published))


@pytest.mark.parametrize("name", LADDERS.names())
def test_a_ready_ladder_stands_on_such_a_recipe(name: str) -> None:
    assert load_ladder(name).base.data.source in (*PYTHON_SOURCES, *DOCSTRINGS)


def test_published_data_is_a_table_of_data_keys() -> None:
    with pytest.raises(RecipeError, match=r"needs a recipe file with a table \[published\]"):
        load_recipe("tiny", ["data=published"])
    tree = {**read_tree("tiny"), "published": {"data.sauce": "hot"}}
    with pytest.raises(RecipeError, match=r"published\.'data\.sauce'.*did you mean 'data\.source'"):
        parse(tree)
    with pytest.raises(RecipeError, match="allowed: a table"):
        parse({**read_tree("tiny"), "published": "yes"})
