"""The arrays hold what they promise: every allowed pair is in a recipe, every recipe is allowed, a failing one is taken apart."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations

import pytest

from rush.errors import RushError
from rush.hardware import Machine, probe
from rush.parallel import AXES
from rush.recipe_io import changed, load_recipe
from rush.techniques import check, registry
from tests.lives.arrays import Wanted, compiles, on_a_cpu
from tests.lives.covering import allowed_pairs, covering, shrunk
from tests.lives.joint import killed, quick_lives
from tests.lives.small import FAMILIES, OBJECTIVES, Item, Setting, items


def _never(one: int, other: int) -> bool:
    return False


@pytest.mark.parametrize("seed", range(20))
def test_every_allowed_pair_of_made_up_items_is_covered_by_allowed_sets(seed: int) -> None:
    draw = random.Random(seed)
    numbers = list(range(14))
    apart = {frozenset(pair) for pair in combinations(numbers, 2) if draw.random() < 0.3}
    needs = {draw.choice(numbers): draw.choice(numbers) for _ in range(3)}

    def allowed(chosen: frozenset[int]) -> bool:
        fits = not any(frozenset(pair) in apart for pair in combinations(chosen, 2))
        return fits and all(needs[one] in chosen for one in chosen if one in needs)

    found = allowed_pairs(numbers, allowed, _never)
    sets = list(covering(found, numbers, allowed))
    assert all(allowed(chosen) for chosen in sets)
    for pair in map(frozenset, combinations(numbers, 2)):
        if allowed(pair):
            assert any(pair <= chosen for chosen in sets)
    assert len(sets) <= len(found)


def test_the_same_seed_gives_the_same_array() -> None:
    wanted_ones = {frozenset(pair): frozenset(pair) for pair in combinations(range(9), 2)}
    first, second = (list(covering(wanted_ones, range(9), lambda chosen: len(chosen) < 5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("guilty", [{3}, {1, 8}, {0, 5, 9}])
def test_a_failing_set_shrinks_to_what_is_guilty(guilty: set[int]) -> None:
    whole = frozenset(range(12))
    found = shrunk(whole, lambda fewer: guilty <= fewer, lambda fewer: True, limit_s=10.0)
    assert found == guilty


def test_a_failing_set_never_shrinks_to_what_the_check_forbids() -> None:
    found = shrunk(frozenset(range(6)), lambda fewer: 2 in fewer, lambda fewer: 5 in fewer, limit_s=10.0)
    assert found == {2, 5}


def test_every_technique_of_the_registry_is_an_item_or_an_axis() -> None:
    assert {item.name for item in items()} | set(AXES) == set(registry())


@pytest.fixture(scope="module")
def machine() -> Machine:
    return probe("cpu")


@pytest.fixture(scope="module")
def every() -> list[Wanted]:
    return on_a_cpu()


@pytest.fixture(scope="module")
def recipes() -> Mapping[Setting, list[frozenset[Item]]]:
    """The recipes of `make test`, by setting."""
    found: dict[Setting, list[frozenset[Item]]] = {}
    for life in quick_lives():
        found.setdefault(life.setting, []).append(life.techniques)
    return found


def _passes(setting: Setting, machine: Machine, *names: str) -> bool:
    """Whether the check lets these techniques, by their names, into a recipe; nothing of what makes the arrays is asked."""
    try:
        with setting.surroundings():
            check(changed(setting.recipe(), {"techniques": list(names)}), machine)
    except RushError:
        return False
    return True


def test_each_allowed_pair_occurs_in_the_quick_array(
    machine: Machine, recipes: Mapping[Setting, list[frozenset[Item]]]
) -> None:
    covered = {
        frozenset(pair)
        for chosen in (chosen for sets in recipes.values() for chosen in sets)
        for pair in combinations({item.name for item in chosen}, 2)
    }
    ways = [
        Setting(family, objective, interpreted=interpreted)
        for family in FAMILIES
        for objective in OBJECTIVES
        for interpreted in (False, True)
    ]
    names = [name for name in registry() if name not in AXES]
    alone = {name: [way for way in ways if _passes(way, machine, name)] for name in names}
    missing = [
        (one, other)
        for one, other in combinations(names, 2)
        if any(_passes(way, machine, one, other) for way in alone[one] if way in alone[other])
        and frozenset((one, other)) not in covered
    ]
    assert not missing


@pytest.mark.parametrize(
    ("objective", "axes"), [*((one, (None,)) for one in OBJECTIVES), ("lm", AXES)], ids=[*OBJECTIVES, "ranks"]
)
def test_each_technique_occurs_with_every_objective_and_on_two_ranks_where_that_is_allowed(
    objective: str,
    axes: tuple[str | None, ...],
    machine: Machine,
    every: list[Wanted],
    recipes: Mapping[Setting, list[frozenset[Item]]],
) -> None:
    settings = [one.checked.setting for one in every]
    there = [one for one in settings if one.objective == objective and one.axis in axes]
    met = {item.name for way in there for chosen in recipes.get(way, []) for item in chosen}
    for name, technique in registry().items():
        slow = technique.compiles({key: knob.default for key, knob in technique.knobs.items()})
        if name in AXES or (slow and (axes == AXES or objective == "dpo")):
            continue  # what compiles meets these in `make test-all`
        assert name in met or not any(_passes(way, machine, name) for way in there)


def test_each_axis_occurs(recipes: Mapping[Setting, list[frozenset[Item]]]) -> None:
    assert {setting.axis for setting in recipes} == {None, *AXES}


def test_each_technique_is_killed_and_resumed_with_every_objective_and_on_two_ranks() -> None:
    lives = quick_lives()
    kills = killed(lives)
    plain = [(life, kill) for life, kill in zip(lives, kills, strict=True) if not compiles(life.techniques)]
    met, resumed = (
        {
            (life.setting.objective, life.setting.axis is None, item)
            for life, kill in plain
            if kill or not wanted
            for item in life.techniques
        }
        for wanted in (False, True)
    )
    assert resumed == met
    assert not any(kill for life, kill in zip(lives, kills, strict=True) if compiles(life.techniques))


@pytest.mark.parametrize(
    ("objective", "axis"), [("sft", None), ("lm", None), *(("lm", axis) for axis in AXES)]
)
def test_no_technique_is_left_out_because_the_lives_are_small(
    objective: str, axis: str | None, machine: Machine, every: list[Wanted]
) -> None:
    """What the check allows in a ready recipe, whose sizes are usual ones, it allows in some life."""
    met = {
        item.name
        for one in every
        if (one.checked.setting.objective, one.checked.setting.axis) == (objective, axis)
        for chosen in one.singles
        for item in chosen
    }
    layout = {} if axis is None else {axis: 2}
    usual = [
        changed(
            load_recipe(name),
            {"layout": layout, "run.device": "cpu", "batch.micro": 4, "batch.total_tokens": 8 * 256},
        )
        for name in (("tiny", "llama-tiny") if objective == "lm" else ("sft-tiny",))
    ]
    for name in registry():
        if name in AXES or name in met:
            continue
        for interpreted in (False, True):
            with Setting("gpt2", interpreted=interpreted).surroundings():
                for recipe in usual:
                    with pytest.raises(RushError):
                        check(changed(recipe, {"techniques": [name]}), machine)


def test_every_recipe_of_the_arrays_is_allowed(
    machine: Machine, recipes: Mapping[Setting, list[frozenset[Item]]]
) -> None:
    for setting, sets in recipes.items():
        for chosen in sets:
            with setting.surroundings():
                check(setting.recipe(chosen), machine)


def test_the_slow_set_has_every_allowed_pair_with_as_little_beside_it_as_may_be(every: list[Wanted]) -> None:
    for one in every:
        for pair, whole in one.pairs.items():
            assert pair <= whole
            assert len(whole) == 2 or not one.checked.allowed(pair)
