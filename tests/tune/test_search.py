"""The search against a machine that answers from a table: thrifty, within its budget, and never fooled."""

from __future__ import annotations

import re

import pytest

from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.tune import PLANNED
from rush.techniques import Parity, registry
from rush.tune.finals import decide
from rush.tune.goal import Goal, TrialLimit, TuneResult
from rush.tune.moves import named
from rush.tune.search import Search
from tests.tune.simulated import Table, measured_batches, measured_factors, search_for

F = measured_factors()
BF16 = F["tf32"] * F["amp_bf16"]
H200 = {
    "tf32": F["tf32"],
    "amp_fp16": F["tf32"] * F["amp_fp16"],
    "amp_bf16": BF16,
    "bf16_master": BF16 * F["bf16_master"],
    "pure_bf16": BF16 * F["pure_bf16"],
    "flash_attention": F["flash_attention"],
    "flex_attention": F["flex_attention"],
    "cudnn_attention": F["flash_attention"] * F["cudnn_attention"],
    "fused_adamw": 1.02,
    "fused_update": 1.02,
    "adam8bit": 0.98,
    "compile": 0.97 * F["compile(scope=block)"],
    "compile(scope=block)": F["compile(scope=block)"],
    "chunked_loss": F["chunked_loss(chunk_tokens=4096)"],
    "fused_loss": F["fused_loss"],
    "checkpoint_selective": F["checkpoint_selective"],
    "checkpoint_full": F["checkpoint_full"],
    "offload_activations": F["offload_activations"],
    "fp8": F["fp8"],
}
"""What techniques gained on an H200 (results/llama-3.2-1b-h200), those of the batch of 8 from its rungs at that batch; an update is
a small part of a step of this size."""
ROUNDS_BY_RULE = frozenset({"pure_bf16", "fused_adamw"})
"""Weights in bf16 that are rounded to the nearest: that ladder found it to learn something else."""


def h200(**changes: object) -> Table:
    return Table(H200, measured_batches(), **{"different": (ROUNDS_BY_RULE,), **changes})  # type: ignore[arg-type]


def done(recipe: Recipe, table: Table, **options: object) -> Search:
    search = search_for(recipe, table, **options)  # type: ignore[arg-type]
    search.climb()
    decide(search)
    return search


@pytest.fixture(scope="module")
def llama() -> Search:
    nearest = 'techniques=["pure_bf16","flash_attention","fused_adamw","compile"]'
    return done(load_recipe("llama-3.2-1b", [nearest]), h200())


def test_fifteen_minutes_beat_the_hand_made_recipe(llama: Search) -> None:
    table = llama.lab
    assert isinstance(table, Table)
    assert llama.winner is not None
    found = table.speed(llama.winner.known_recipe)
    assert found >= table.speed(load_recipe("llama-3.2-1b-fast"))
    bf16 = load_recipe("llama-3.2-1b", ['techniques=["amp_bf16"]'])
    assert found >= 1.5 * table.speed(bf16)
    parity = llama.winner.results["prove"].parity
    assert parity is not None
    assert parity["verdict"] == "equal"


def test_the_budget_is_respected_and_no_trial_made_twice(llama: Search) -> None:
    table = llama.lab
    assert isinstance(table, Table)
    assert llama.budget.spent_s <= 900
    assert len(set(table.made)) == len(table.made)
    assert 10 <= len(table.made) <= 30


def test_what_learns_something_else_is_not_built_upon(llama: Search) -> None:
    of_itself = llama.base.results["prove"].parity
    assert of_itself is not None
    assert of_itself["verdict"] == "different", "the recipe itself rounds by rule"
    later = [c for c in llama.candidates if c.results and c is not llama.base]
    assert later
    for candidate in later:
        assert not {name for name, _ in candidate.known_recipe.technique_uses()} >= ROUNDS_BY_RULE


@pytest.mark.slow
def test_a_jump_without_parity_is_rejected() -> None:
    eight_bits = [frozenset({named("fp8", setting.knobs)}) for setting in registry()["fp8"].settings]
    table = h200(different=(*eight_bits, ROUNDS_BY_RULE))
    search = done(load_recipe("llama-3.2-1b", ["techniques=[]"]), table)
    assert any(c.state == "different" for c in search.candidates)
    assert search.winner is not None
    assert "fp8" not in {name for name, _ in search.winner.known_recipe.technique_uses()}
    # The hand-made recipe without 8 bits, or a better one.
    assert table.speed(search.winner.known_recipe) >= 0.999 * table.speed(load_recipe("llama-3.2-1b-fast"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_processes_that_lie_some_per_cent_apart_do_not_lead_it_astray(seed: int) -> None:
    table = h200(noise=0.03)
    table.rng.seed(seed)
    search = done(load_recipe("llama-3.2-1b"), table)
    assert search.winner is not None
    assert table.speed(search.winner.known_recipe) >= table.speed(load_recipe("llama-3.2-1b-fast"))


def test_what_cannot_fit_or_pay_is_pruned_with_the_reason(llama: Search) -> None:
    reasons = {c.key: c.reason for c in llama.candidates if c.state == "pruned"}
    assert reasons["offload_activations"].startswith("predicted 0.1")
    assert not any(event.candidate in reasons for event in llama.events)


def test_a_recipe_that_cannot_fit_is_not_tried_unchanged() -> None:
    search = search_for(load_recipe("llama-3.2-1b", ["batch.micro=64"]), h200())
    search.begin()
    assert search.candidates[0].state == "pruned"
    assert re.fullmatch(r"predicted \d+ GiB of 140", search.candidates[0].reason)
    assert search.base.known_recipe.batch.micro == 32
    assert search.base.known_recipe.step_tokens == search.start.step_tokens


def test_a_short_budget_still_leaves_time_for_the_proof() -> None:
    search = done(load_recipe("llama-3.2-1b"), h200(different=()), budget_s=300.0)
    assert search.budget.spent_s <= 300
    assert search.winner is not None
    assert search.winner is not search.base
    assert "prove" in search.winner.results
    assert any(c.state == "not tried" for c in search.candidates)


def test_a_planned_recipe_there_is_no_time_for_is_in_the_record() -> None:
    search = done(load_recipe("llama-3.2-1b"), h200(different=()), budget_s=200.0)
    planned = [(c.state, c.reason) for c in search.candidates if c.key.startswith(PLANNED)]
    assert planned
    assert set(planned) == {("not tried", "no time was left")}


@pytest.mark.slow
def test_only_allowed_parity_classes_are_added() -> None:
    rounding = frozenset({Parity.EXACT, Parity.CLOSE})
    search = done(load_recipe("llama-3.2-1b", ["techniques=[]"]), h200(), allowed=rounding)
    assert search.winner is not None
    names = {name for name, _ in search.winner.known_recipe.technique_uses()}
    assert "amp_bf16" in names
    assert not names & {"pure_bf16", "fp8", "bf16_master", "adam8bit", "lora"}


def test_adapters_of_the_recipe_stay_as_they_are() -> None:
    recipe = load_recipe("llama-3.2-1b", ['techniques=[{name="lora",rank=32,alpha=64},"amp_bf16"]'])
    search = done(recipe, h200(), budget_s=300.0)
    for candidate in search.candidates:
        if candidate.recipe is not None:
            assert dict(candidate.recipe.technique_uses())["lora"] == {"rank": 32, "alpha": 64}


def test_tokens_of_a_step_stay_those_of_the_recipe(llama: Search) -> None:
    steps = {c.recipe.step_tokens for c in llama.candidates if c.recipe is not None}
    assert steps == {load_recipe("llama-3.2-1b").step_tokens}
    assert len({c.recipe.batch.micro for c in llama.candidates if c.recipe is not None}) > 1


def test_techniques_without_effect_are_removed_from_the_winner() -> None:
    table = h200(idle=("cudnn_attention", "cudnn_attention(heads=grouped)"))
    search = done(load_recipe("llama-3.2-1b"), table)
    assert any(c.state == "no effect" for c in search.candidates)
    assert search.winner is not None
    assert "cudnn_attention" not in {name for name, _ in search.winner.known_recipe.technique_uses()}


@pytest.mark.slow
def test_where_nothing_pays_the_recipe_stays_as_it_was() -> None:
    flat = Table({}, {8: 1.0}, noise=0.001)
    search = done(load_recipe("llama-3.2-1b"), flat, budget_s=400.0)
    assert search.winner is search.base
    assert search.gain is None


@pytest.mark.slow
def test_a_gain_found_here_before_is_tried_first() -> None:
    search = search_for(load_recipe("llama-3.2-1b"), h200(), known={"fused_norm": 1.5})
    search.climb()
    tried = [c.key for c in search.candidates if c.results and not c.key.startswith("planned")]
    assert tried[1] == "fused_norm"


class OutOfMemory(Table):
    """A device on which micro batches above 2 do not fit, whatever the planner says."""

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        result = super().trial(kind, recipe, limit)
        return result if recipe.batch.micro <= 2 else TuneResult("out_of_memory", "full", wall_s=5.0)


@pytest.mark.slow
def test_a_recipe_that_does_not_fit_starts_with_a_smaller_micro_batch() -> None:
    search = done(load_recipe("llama-3.2-1b"), OutOfMemory(H200, measured_batches()))
    assert search.base.known_recipe.batch.micro == 2
    assert search.winner is not None
    assert search.winner.known_recipe.batch.micro <= 2


class Weighs(Table):
    """Peak memory as the planner would have it, a tenth more."""

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        from dataclasses import replace

        found = self.planner.predict(recipe)  # type: ignore[attr-defined]
        return replace(super().trial(kind, recipe, limit), peak_memory_bytes=int(1.1 * found.memory_bytes))


@pytest.mark.slow
def test_least_memory_keeps_its_share_of_the_speed() -> None:
    table = Weighs(H200, measured_batches(), different=(ROUNDS_BY_RULE,))
    search = search_for(load_recipe("llama-3.2-1b"), table, goal=Goal("memory", 0.8))
    table.planner = search.outlook.planner  # type: ignore[attr-defined]
    search.climb()
    winner = decide(search)
    assert winner.best.peak_memory_bytes < 0.7 * search.base.best.peak_memory_bytes
    assert table.speed(winner.known_recipe) >= 0.79 * table.speed(search.base.known_recipe)
