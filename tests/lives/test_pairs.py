"""Every pair of techniques that the check allows trains, validates, samples, saves and generates; every technique is also
killed and resumed, with every objective and, on two ranks, with every axis of the layout.

Here in few lives that cover all pairs, compiled graphs interpreted (`quick_compiler.py`), and what is compiled not killed (ready
recipes that compile are, `test_recipes.py`); alone, pair by pair, killed and with Inductor, in `make test-all`. What needs a GPU
has its own arrays, `test_pairs_gpu.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.lives.arrays import Wanted, on_a_cpu
from tests.lives.covering import Items
from tests.lives.joint import Life, killed, quick_lives
from tests.lives.living import PARTS, TEST_S, UNDISTURBED, Living

pytestmark = pytest.mark.timeout(TEST_S)


@cache
def settings() -> dict[str, Wanted]:
    return {str(one.checked.setting): one for one in on_a_cpu()}


def _lives() -> list[object]:
    lives = quick_lives()
    return [
        pytest.param(
            life, PARTS if kill else UNDISTURBED, id=f"{number:02d}-{life.setting}-{len(life.techniques)}"
        )
        for number, (life, kill) in enumerate(zip(lives, killed(lives), strict=True))
    ]


def _alone() -> list[object]:
    return [
        pytest.param(name, techniques, id=f"{name}-{'+'.join(map(str, sorted(techniques)))}")
        for name, one in settings().items()
        for techniques in one.recipes
    ]


@pytest.mark.parametrize(("life", "parts"), _lives())
def test_every_allowed_pair_lives_in_some_recipe(living: Living, life: Life, parts: tuple[str, ...]) -> None:
    living.must_live(life.setting, life.techniques, life.checked.allowed, parts)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "techniques"), _alone())
def test_every_allowed_pair_lives_alone(compiled_living: Living, setting: str, techniques: Items) -> None:
    """With `compile` a model of one layer: g++ takes two seconds for each kernel of a graph, and there are some thirty."""
    checked, compiled = settings()[setting].checked, any(item.name == "compile" for item in techniques)
    living = replace(compiled_living, shallow=compiled)
    living.must_live(checked.setting, techniques, checked.allowed)
