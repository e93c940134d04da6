"""The contenders of a race and its plan: words, what cannot race, where everybody is validated, who begins."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rush.errors import RecipeError
from rush.lab.race.contenders import check_comparable, read_contenders
from rush.lab.race.race_plan import plan_race
from rush.ready import RECIPES
from rush.recipe_io import load_recipe


def test_overrides_belong_to_the_recipe_before_them_and_the_first_ones_to_all() -> None:
    found = read_contenders(
        [
            "optimizer.lr=1e-3",
            "tiny",
            "tiny",
            "techniques+=chunked_loss",
            "batch.micro=4",
            "tiny optimizer.lr=5e-3",
        ]
    )
    assert [one.letter for one in found] == ["A", "B", "C"]
    assert [one.name for one in found] == [
        "tiny", "tiny techniques+=chunked_loss batch.micro=4", "tiny optimizer.lr=5e-3",
    ]  # fmt: skip
    assert [one.recipe.optimizer.lr for one in found] == [1e-3, 1e-3, 5e-3]
    assert [one.recipe.micro for one in found] == [8, 4, 8]
    assert found[1].recipe.techniques == ["chunked_loss"]


def test_recipes_and_files_race_too(tmp_path: Path) -> None:
    (file := tmp_path / "a=b.toml").write_bytes(Path(str(RECIPES.find("tiny"))).read_bytes())
    found = read_contenders([load_recipe("tiny", ["batch.micro=4"]), str(file), "optimizer.lr=1e-3"])
    assert [one.name for one in found] == ["tiny", "a=b optimizer.lr=1e-3"]
    with pytest.raises(RecipeError, match="overrides beside a Recipe"):
        read_contenders([load_recipe("tiny"), "optimizer.lr=1e-3", "tiny"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny"], "at least two recipes; 1 named"),
        (["optimizer.lr=1"], "at least two recipes; 0 named"),
        (["tiny"] * 7, "at most 6 recipes; 7 named"),
        (["tiny", "nope"], "recipe B of the race: there is no recipe named 'nope'"),
        (["tiny", "tiny", "optimizer.lrr=1"], r"recipe B of the race: optimizer\.lrr is not a key"),
        (["tiny", ""], "recipe B of the race"),
        (["tiny", "tiny", 'batch.micro="auto"'], 'recipe B of the race: batch.micro is "auto"'),
    ],
)
def test_words_that_are_no_race_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_contenders(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "tiny", "data.validation=0.05"], r"data\.validation is 0\.02 in A and 0\.05 in B"),
        (["tiny", "tiny", "data.shuffle=false"], "data.shuffle is True in A and False in B"),
        (["tiny", "tiny", "batch.sequence=64"], "batch.sequence is 128 in A and 64 in B"),
        (["tiny", "tiny", "model.shape.vocab_size=512"], "vocabulary has 2,048 tokens in A and 512 in B"),
        (["tiny", "tiny", "objective.train_on=all"], r"objective\.train_on"),
        (["sft-tiny", "sft-tiny", "batch.micro=4"], "batch.micro is 8 in A and 4 in B"),
        (["sft-tiny", "sft-tiny", "techniques=['pad']"], "the packing is .* in A and pad in B"),
        (
            ["tiny", "tiny", "model.init_from=elsewhere"],
            r"model\.init_from is None in A and 'elsewhere' in B",
        ),
    ],
)
def test_losses_of_other_things_do_not_race(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        check_comparable(read_contenders(words))


def test_another_model_and_other_techniques_may_race() -> None:
    check_comparable(
        read_contenders(["tiny", "tiny", "model.shape.num_layers=2", "techniques=['chunked_loss']"])
    )


def test_all_are_validated_after_the_same_tokens_whatever_their_step_holds() -> None:
    words = [
        "schedule.warmup=2",
        "tiny",
        "tiny",
        "batch.total_tokens=3072",
        "tiny",
        "batch.total_tokens=1024",
    ]
    plan = plan_race(read_contenders(words), tokens=100_000, points=10, legs=3)
    assert plan.every_tokens == 12_288
    assert plan.tokens == 9 * 12_288, "rounded up"
    for one in plan.contenders:
        recipe = plan.raced(one, 7)
        assert recipe.steps * recipe.step_tokens == plan.tokens
        assert (recipe.run.validate_every, recipe.run.validate_every_tokens) == (0, plan.every_tokens)
        ends = plan.leg_ends(one)
        assert ends[-1] == recipe.steps
        assert all(end * recipe.step_tokens % plan.every_tokens == 0 for end in ends)
        assert recipe.run.seed == 7
        assert (recipe.run.save_every, recipe.run.sample_tokens, recipe.run.trackers) == (0, 0, [])


def test_a_growing_batch_reaches_every_validation_with_a_whole_step() -> None:
    grows = "batch.schedule=[{tokens=2048,until=0.25},{tokens=4096,until=0.6}]"
    words = [
        "schedule.warmup=2",
        "batch.total_tokens=8192",
        "tiny",
        "tiny",
        grows,
        "tiny",
        "batch.total_tokens=6144",
    ]
    plan = plan_race(read_contenders(words), tokens=1_000_000, points=8, legs=3)
    _, grown, _ = plan.contenders
    recipe = plan.raced(grown, 7)
    sizes = recipe.batch_sizes()
    assert recipe.run_tokens == plan.tokens
    assert plan.unit == 24_576, "steps of every size divide it"
    for place in range(1, plan.points + 1):
        step = sizes.step_at(place * plan.every_tokens)
        assert sizes.until(step) == place * plan.every_tokens
    assert {sizes.until(end) for end in plan.leg_ends(grown)} == {
        plan.raced(one, 7).batch_sizes().until(end) for one in plan.contenders for end in plan.leg_ends(one)
    }
    asked = [end / recipe.steps for end in sizes.ends]
    assert asked == pytest.approx([0.25, 0.6], abs=0.05)
    with pytest.raises(RecipeError, match=r"recipe B of the race, .* rounded to a multiple of 24,576"):
        plan_race(
            read_contenders([*words[:4], "batch.schedule=[{tokens=2048,until=2}]", *words[5:]]),
            tokens=1_000_000,
        )


def test_the_ranks_that_are_given_are_those_of_every_layout() -> None:
    words = ["tiny", "layout.fsdp=2", "tiny", "layout.ddp=2"]
    assert plan_race(read_contenders(words), nproc=2).contenders[1].recipe.world == 2
    assert plan_race(read_contenders(["tiny", "tiny layout.ddp=2"]), tokens=40_960).tokens == 40_960
    with pytest.raises(
        RecipeError, match=r"recipe B of the race: layout.fsdp is 2, which takes 2 ranks, but .* has 1"
    ):
        plan_race(read_contenders(["tiny", "tiny layout.fsdp=2"]), nproc=1, tokens=40_960)


def test_everybody_begins_as_often_as_the_others() -> None:
    plan = plan_race(read_contenders(["tiny", "tiny", "tiny"]), seeds=3, legs=6, points=6)
    order = plan.order()
    assert len(order) == len({(number, one.letter, seed) for number, one, seed in order}) == 54
    assert Counter(one.letter for _, one, _ in order[::3]) == {"A": 6, "B": 6, "C": 6}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": 4096}, "at least 4 validations, and of 4,096 tokens only 2"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"seeds": 10**9}, "--seeds is 1,000,000,000"),
        ({"legs": -1}, "--legs is -1"),
        ({"points": 3}, "--points is 3"),
        ({"loss": 0.0}, "--loss is 0.0"),
        ({"loss": float("nan")}, "--loss is nan"),
        ({"tokens": 20_480}, "recipe A of the race, over 20,480 tokens: schedule.warmup is 20"),
        (
            {"nproc": 2},
            "recipe A of the race: every size of the layout is 1, which takes 1 rank, but this run has 2",
        ),
    ],
)
def test_numbers_that_make_no_race_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        plan_race(read_contenders(["tiny", "tiny"]), **options)  # type: ignore[arg-type]


def test_recipes_of_different_lengths_need_a_number_of_tokens() -> None:
    contenders = read_contenders(["tiny", "tiny", "schedule.steps=100"])
    with pytest.raises(
        RecipeError, match=r"different numbers of tokens \(A 409,600, B 204,800\); give --tokens"
    ):
        plan_race(contenders)
    assert plan_race(contenders, tokens=204_800).tokens == 204_800


def test_techniques_that_cannot_be_combined_are_refused_before_anything_starts() -> None:
    with pytest.raises(RecipeError, match=r"recipe B of the race, .* cannot be combined"):
        plan_race(read_contenders(["tiny", "tiny", "techniques=['chunked_loss','fused_loss']"]))
