"""Single changes of a recipe: what they take out, what they keep, and why they are refused."""

from __future__ import annotations

import pytest

from rush.plan.target import target_of
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.techniques import Parity, registry, resolve_uses
from rush.tune.moves import Move, Refusal, Rules, combine_moves, moves, parity_techniques
from rush.tune.trials import kept_of, plain_of

ALL_BUT_CHANGES = frozenset(Parity) - {Parity.CHANGES}


def rules_for(
    recipe: Recipe, machine: str = "h200-sxm", allowed: frozenset[Parity] = ALL_BUT_CHANGES
) -> Rules:
    return Rules(target_of(machine).machine(), allowed, kept_of(recipe), recipe.step_tokens)


def names(recipe: Recipe) -> set[str]:
    return {name for name, _ in recipe.technique_uses()}


def made(recipe: Recipe, key: str, machine: str = "h200-sxm") -> Move | Refusal:
    return next(move for move in moves(recipe, rules_for(recipe, machine)) if move.key == key)


@pytest.fixture(scope="module")
def llama() -> Recipe:
    return load_recipe("llama-3.2-1b")


def test_a_technique_removes_those_it_conflicts_with(llama: Recipe) -> None:
    move = made(llama, "cudnn_attention")
    assert isinstance(move, Move)
    assert names(move.recipe) == {"pure_bf16", "cudnn_attention", "fused_update", "compile"}


def test_a_technique_whose_requirement_is_lost_is_removed_too(llama: Recipe) -> None:
    chance = load_recipe("llama-3.2-1b-fast")
    move = made(chance, "amp_bf16")
    assert isinstance(move, Move)
    assert "fused_update" not in names(move.recipe), "stochastic rounding of what is no longer rounded"


def test_pure_bf16_comes_with_stochastic_rounding() -> None:
    recipe = load_recipe("llama-3.2-1b", ['techniques=["amp_bf16","fused_adamw"]'])
    move = made(recipe, "pure_bf16 with fused_update(stochastic_rounding=True, state=bfloat16)")
    assert isinstance(move, Move)
    assert names(move.recipe) == {"pure_bf16", "fused_update"}


def test_a_refusal_is_in_the_techniques_own_words() -> None:
    refusal = made(load_recipe("tiny"), "tf32", machine="cpu")
    assert isinstance(refusal, Refusal)
    assert refusal.reason in [requirement.message for requirement in registry()["tf32"].requires]


def test_nothing_that_changes_what_is_learned_unless_it_is_allowed(llama: Recipe) -> None:
    def put_on(allowed: frozenset[Parity]) -> set[str]:
        found = [m.recipe for m in moves(llama, rules_for(llama, allowed=allowed)) if isinstance(m, Move)]
        return set().union(*(names(recipe) for recipe in found))

    assert "lora" not in put_on(ALL_BUT_CHANGES)
    assert "lora" in put_on(frozenset(Parity))
    exact = put_on(frozenset({Parity.EXACT})) - names(llama)
    assert exact
    assert all(registry()[name].parity is Parity.EXACT for name in exact)


def test_adapters_are_kept_and_belong_to_the_reference() -> None:
    recipe = load_recipe("qlora")
    assert kept_of(recipe) == {"qlora"}
    assert plain_of(recipe).technique_uses() == [("qlora", {"rank": 16, "alpha": 32})]
    for move in moves(recipe, rules_for(recipe)):
        if isinstance(move, Move):
            assert dict(move.recipe.technique_uses())["qlora"] == {"rank": 16, "alpha": 32}
    fp8 = made(recipe, "fp8")
    assert isinstance(fp8, Refusal)
    assert "qlora" in fp8.reason


def test_a_default_that_is_written_out_is_no_change(llama: Recipe) -> None:
    keys = {move.key for move in moves(llama, rules_for(llama))}
    assert "compile(scope=block)" in keys
    assert "compile(scope=model)" not in keys, "it is the default, and there"


def test_micro_batches_divide_the_tokens_of_a_step(llama: Recipe) -> None:
    found = [
        m.recipe for m in moves(llama, rules_for(llama)) if isinstance(m, Move) and m.key.startswith("micro")
    ]
    assert {recipe.batch.micro for recipe in found} == {4, 16}
    assert {recipe.step_tokens for recipe in found} == {llama.step_tokens}


def test_every_setting_that_is_declared_can_be_settled() -> None:
    for technique in registry().values():
        for setting in technique.settings:
            entries = {technique.name: setting.knobs, **setting.together_with}
            recipe = load_recipe("tiny").model_copy(
                update={"techniques": [{"name": name, **knobs} for name, knobs in entries.items()]}
            )
            assert len(resolve_uses(recipe)) == len(entries)


def test_a_promise_is_what_is_loose_and_the_update_beside_it(llama: Recipe) -> None:
    assert parity_techniques(llama, frozenset()) == {
        "pure_bf16",
        "fused_update(stochastic_rounding=True, state=bfloat16)",
    }
    nearest = load_recipe("llama-3.2-1b", ['techniques=["pure_bf16","flash_attention","fused_adamw"]'])
    assert parity_techniques(nearest, frozenset()) == {"pure_bf16", "fused_adamw"}
    assert parity_techniques(load_recipe("gpt2-124m"), frozenset()) == frozenset()


def test_changes_made_together_undo_none_of_each_other() -> None:
    recipe = load_recipe("tiny", ['techniques=["flash_attention"]'])
    rules = rules_for(recipe, "cpu")
    keys = ["adam8bit", "fused_adamw", "micro 16", "compile(scope=block)", "compile(scope=model)", "tf32"]
    found = combine_moves(recipe, keys, lambda one: list(moves(one, rules)))
    assert found is not None
    move, these = found
    assert these == ["adam8bit", "micro 16", "compile(scope=block)"]
    assert move.key == "together: adam8bit + micro 16 + compile(scope=block)"
    assert names(move.recipe) == {"flash_attention", "adam8bit", "compile"}
    assert move.recipe.micro == 16
    assert dict(move.recipe.technique_uses())["compile"] == {"scope": "block"}
    assert combine_moves(recipe, ["adam8bit", "fused_adamw"], lambda one: list(moves(one, rules))) is None


def test_chunks_of_the_loss_that_hold_all_tokens_are_no_change() -> None:
    small, large = load_recipe("tiny"), load_recipe("gpt2-124m", ["batch.micro=64"])
    for recipe, offered in ((small, False), (large, True)):
        keys = {move.key for move in moves(recipe, rules_for(recipe))}
        assert ("fused_loss(chunk_tokens=16384)" in keys) is offered
        assert ("chunked_loss(chunk_tokens=4096)" in keys) is offered
        assert "fused_loss" in keys
