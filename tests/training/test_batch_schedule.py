"""Batch-size schedules: tokens of every step, what is refused, and a run that is interrupted while its batch grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rush.batch_schedule import BatchSizes
from rush.data import Loader
from rush.data.document_loader import DocumentLoader
from rush.data.packing import Pad
from rush.errors import RecipeError
from rush.plan import plan, spec_of, target_of
from rush.plan.micro_batch import candidates
from rush.recipe import Recipe
from rush.recipe_io import load_recipe, parse, read_tree, write_toml
from rush.records.metrics import MetricsRow, read_rows
from rush.records.run_folder import RunFolder
from rush.techniques.host import cuda_graph
from rush.techniques.parallel import pp
from rush.training.epochs import with_steps
from rush.training.fewer_ranks import fewer_ranks
from rush.training.loop import train_recipe
from tests.data.small_documents import SmallDocuments
from tests.data.test_data_loader import Numbered, ids
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import small_recipe, write_corpus

GROWING = "batch.schedule=[{tokens=2048,until=0.1},{tokens=4096,until=100}]"


def recipe_of(*overrides: str, **options: Any) -> Recipe:
    return load_recipe("tiny", ["batch.total_tokens=8192", "schedule.steps=200", *overrides], **options)


def test_a_phase_ends_at_its_fraction_or_step() -> None:
    sizes = recipe_of(GROWING).batch_sizes()
    assert [sizes.of(step) for step in (1, 20, 21, 100, 101, 200)] == [2048, 2048, 4096, 4096, 8192, 8192]
    assert recipe_of(GROWING).run_tokens == 20 * 2048 + 80 * 4096 + 100 * 8192
    assert recipe_of(GROWING).accumulations == (2, 4, 8)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 40))
def test_tokens_until_a_step_are_those_of_its_steps(lengths: list[int], every: int, step: int) -> None:
    ends = tuple(sum(lengths[: place + 1]) for place in range(len(lengths)))
    sizes = BatchSizes(ends, tuple(range(1, len(ends) + 2)))
    each = [size for length, size in zip(lengths, sizes.sizes, strict=False) for _ in range(length)]
    each += [sizes.sizes[-1]] * 41
    assert sizes.until(step) == sum(each[:step])
    assert sizes.of(step + 1) == each[step]
    assert each[:step] == [] or sizes.step_at(sum(each[:step])) == step
    assert sizes.step_at(sum(each[:step]) + 1) == step + 1
    crossed = [n for n in range(sum(each[:step]) + 1, sum(each[: step + 1]) + 1) if n % every == 0]
    assert sizes.passes(every, step + 1) == bool(crossed)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["batch.schedule=abc"], r"batch.schedule is 'abc'; allowed: a list of tables"),
        (["batch.schedule=[]"], "allowed: a list of tables"),
        (["batch.schedule=[{tokens=2048}]"], r"has {'tokens': 2048}; allowed: a table such as"),
        (["batch.schedule=[{tokens=2048,until=1.0}]"], "below 1 the fraction of all steps"),
        (["batch.schedule=[{tokens=2048,until=0.1,x=1}]"], "allowed: a table such as"),
        ([f"batch.schedule=[{{tokens={10**20},until=0.1}}]"], "allowed: a table such as"),
        (["batch.schedule=[{tokens=8192,until=0.1}]"], "8,192, 8,192 tokens; allowed: each larger than the one before"),
        (["batch.schedule=[{tokens=1024,until=0.1}]", "batch.total_tokens=none"], "needs batch.total_tokens"),
        (["batch.schedule=[{tokens=2000,until=0.1}]"], "a step of 2,000 tokens, which is not a multiple .* nearest allowed: 1,024 or 2,048"),
        (["batch.schedule=[{tokens=2048,until=900}]"], "leaves no step of 8,192 tokens: .*more schedule.steps"),
        (["batch.schedule=[{tokens=2048,until=0.001}]"], "leaves no step of 2,048 tokens: until = 0.001 is step 0"),
        (["batch.schedule=[{tokens=2048,until=0.5},{tokens=4096,until=9}]"], "leaves no step of 4,096 tokens: until = 9 is step 9"),
        ([GROWING, "layout.ddp=4"], "a step of 2,048 tokens, which is not a multiple"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_run_is_refused_in_one_sentence(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe_of(*overrides)


def test_a_schedule_stays_in_the_file_and_changes_the_digest_only_where_it_is() -> None:
    import tomllib

    recipe = recipe_of(GROWING)
    assert parse(tomllib.loads(write_toml(recipe))) == recipe
    assert recipe_of(GROWING, "batch.schedule=none") == recipe_of()
    assert recipe_of(GROWING).digest != recipe_of().digest
    assert "schedule" not in recipe_of().content()["batch"]


def test_micro_batches_and_ranks_divide_every_step() -> None:
    recipe = recipe_of(GROWING, "batch.micro=auto", auto=True)
    assert [one.micro for one in candidates(recipe, lambda one: None)] == [1, 2, 4, 8, 16]
    with pytest.raises(RecipeError, match="a step of 2,000 tokens"):
        recipe_of("batch.micro=auto", "batch.schedule=[{tokens=2000,until=0.1}]", auto=True)
    three = load_recipe(
        "tiny", ["layout.ddp=3", "batch.total_tokens=12288", "batch.schedule=[{tokens=3072,until=0.1}]"]
    )
    assert fewer_ranks(three, 3, 1) == 1, "two ranks divide the last steps, not the first ones"


def test_gradients_that_a_graph_writes_and_too_few_micro_batches_of_a_pipeline_are_refused() -> None:
    with pytest.raises(RecipeError, match="gradients is 'written', but a step here is 8 micro batches"):
        cuda_graph.check_sizes(recipe_of(GROWING), {"gradients": "written"})
    four = recipe_of(GROWING, "layout.pp=4")
    with pytest.raises(
        RecipeError, match=r"a step has 2 micro batches, .* Set the tokens in batch.schedule to that"
    ):
        pp.check_sizes(four, {"schedule": "1f1b", "stages": 0})
    pp.check_sizes(recipe_of(GROWING, "layout.pp=2"), {"schedule": "1f1b", "stages": 0})


def test_ranks_share_the_samples_of_a_growing_step_in_the_order_of_one_rank() -> None:
    def read(rank: int, world: int) -> list[list[int]]:
        with Loader(Numbered(40), 16, 2, seed=3, rank=rank, world=world, workers=rank) as loader:
            return [[i for batch in loader.next_step(count) for i in ids(batch)] for count in (2, 2, 4, 8)]

    alone, first, second = read(0, 1), read(0, 2), read(1, 2)
    assert [len(step) for step in alone] == [4, 4, 8, 16]
    assert sorted(i for step in alone for i in step) == sorted({i for step in alone for i in step})
    for whole, ours, theirs in zip(alone, first, second, strict=True):
        assert sorted(whole) == sorted(ours + theirs)


def test_documents_follow_each_other_whatever_the_size_of_the_step() -> None:
    def names(*counts: int) -> list[str]:
        documents = SmallDocuments([5 + n % 20 for n in range(40)])
        loader = DocumentLoader(documents, 2, 32, 4, seed=7, packing=Pad())
        return [name for count in counts for batch in loader.next_step(count) for name in batch.samples]

    assert names(1, 2, 5) == names(4, 4)


def test_epochs_become_the_steps_that_read_the_data() -> None:
    tree = read_tree("tiny")
    tree["schedule"] = {"epochs": 2.0}
    tree["batch"] |= {"total_tokens": 8192, "schedule": [{"tokens": 2048, "until": 0.5}]}
    loader = Loader(Numbered(6400), samples_per_step=64, micro=8, seed=1)
    found = with_steps(parse(tree), loader)
    assert found.steps == 320, "160 steps of 16 samples and 160 of 64 are 2 × 6,400"
    assert found.run_tokens == 2 * 6400 * 128


def test_the_planner_counts_the_tokens_and_the_time_of_every_phase() -> None:
    target = target_of("h100-sxm")
    found = plan(spec_of(recipe_of(GROWING)), target)
    small, middle, last = (
        plan(spec_of(recipe_of(f"batch.total_tokens={tokens}")), target).time.step
        for tokens in (2048, 4096, 8192)
    )
    assert found.run is not None
    assert found.run["tokens"] == recipe_of(GROWING).run_tokens
    assert found.run["hours"] * 3600 == pytest.approx(20 * small + 80 * middle + 100 * last)
    assert found.time.step == last
    constant = plan(spec_of(recipe_of()), target)
    assert constant.budget(1e9, None)["hours"] == pytest.approx(1e9 / constant.tokens_per_s / 3600)
    assert found.budget(1e9, None)["hours"] > constant.budget(1e9, None)["hours"], (
        "small steps update more often"
    )


def test_a_run_killed_while_its_batch_grows_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    run = {
        "save_every": 0,
        "validate_every": 0,
        "validate_every_tokens": 128,
        "sample_every": 0,
        "sample_tokens": 0,
    }
    (path := tmp_path / "small.toml").write_text(
        small_recipe(write_corpus(tmp_path / "text"), schedule={"steps": 7, "warmup": 1}, run=run)
    )
    recipe = load_recipe(
        str(path), ["batch.total_tokens=128", "batch.schedule=[{tokens=32,until=2},{tokens=64,until=5}]"]
    )
    legs, whole = tmp_path / "legs", tmp_path / "whole"
    train_recipe(recipe, legs, until=3)
    train_recipe(recipe, legs, resume=True)
    summary = train_recipe(recipe, whole)
    found, wanted = (list(read_rows(RunFolder(folder).metrics, MetricsRow)) for folder in (legs, whole))
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "labels", "epoch", "val_loss")
    assert [[row.get(key) for key in keys] for row in found] == [
        [row.get(key) for key in keys] for row in wanted
    ]
    assert [row["tokens"] for row in wanted] == [32, 64, 128, 192, 256, 384, 512]
    assert [row["step"] for row in wanted if "val_loss" in row] == [3, 5, 6, 7]
    assert summary.tokens == recipe.run_tokens == 512
    with pytest.raises(RecipeError, match=r"started with another recipe \(batch.schedule"):
        train_recipe(load_recipe(str(path), ["batch.schedule=none"]), legs, resume=True)
