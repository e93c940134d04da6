"""Every pair of techniques that the check allows trains, validates, samples, saves, is killed, resumes and generates.

Here in few lives that cover all pairs, compiled graphs interpreted (`quick_compiler.py`), and what is compiled not killed (ready
recipes that compile are, `test_recipes.py`); alone, pair by pair and with Inductor, in `make test-all`. Each technique also with every objective and, on two ranks, with every axis of the layout. What
needs a GPU has its own arrays, `test_pairs_gpu.py`.
"""

from __future__ import annotations

from functools import cache

import pytest

from rush.hardware import probe
from tests.lives.arrays import Wanted, compiles, wanted
from tests.lives.covering import Items
from tests.lives.joint import Life, joint
from tests.lives.living import PARTS, TEST_S, UNDISTURBED, Living

pytestmark = pytest.mark.timeout(TEST_S)


@cache
def settings() -> dict[str, Wanted]:
    return {str(one.checked.setting): one for one in wanted(probe("cpu"))}


def _lives() -> list[object]:
    lives = joint(list(settings().values()))
    return [
        pytest.param(life, id=f"{number:02d}-{life.setting}-{len(life.techniques)}")
        for number, life in enumerate(lives)
    ]


def _alone() -> list[object]:
    return [
        pytest.param(name, techniques, id=f"{name}-{'+'.join(map(str, sorted(techniques)))}")
        for name, one in settings().items()
        for techniques in one.recipes
    ]


@pytest.mark.parametrize("life", _lives())
def test_every_allowed_pair_lives_in_some_recipe(living: Living, life: Life) -> None:
    parts = UNDISTURBED if compiles(life.techniques) else PARTS
    living.must_live(life.setting, life.techniques, life.checked.allowed, parts)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "techniques"), _alone())
def test_every_allowed_pair_lives_alone(compiled_living: Living, setting: str, techniques: Items) -> None:
    checked = settings()[setting].checked
    compiled_living.must_live(checked.setting, techniques, checked.allowed)
