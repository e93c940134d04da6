"""Every pair of techniques that the check allows trains, validates, samples, saves, is killed, resumes and generates.

Here in a covering array, compiled graphs interpreted (`quick_compiler.py`); alone, pair by pair and with Inductor, in
`make test-all`. Each technique also with every objective and, on two ranks,
with every axis of the layout. What needs a GPU has its own array, `test_pairs_gpu.py`.
"""

from __future__ import annotations

from functools import cache

import pytest

from rush.hardware import probe
from tests.lives.arrays import Wanted, array, quick, wanted
from tests.lives.covering import Items
from tests.lives.living import TEST_S, Living

pytestmark = pytest.mark.timeout(TEST_S)


@cache
def settings() -> dict[str, Wanted]:
    return {str(one.checked.setting): one for one in wanted(probe("cpu"))}


def _lives(slow: bool) -> list[object]:
    rows = []
    every = list(settings().values())
    for one in every if slow else quick(every):
        for number, techniques in enumerate(one.recipes if slow else array(one)):
            name = str(one.checked.setting)
            short = "+".join(map(str, sorted(techniques))) if slow else f"{number:02d}"
            rows.append(pytest.param(name, techniques, id=f"{name}-{short}"))
    return rows


@pytest.mark.parametrize(("setting", "techniques"), _lives(slow=False))
def test_every_allowed_pair_lives_in_some_recipe(living: Living, setting: str, techniques: Items) -> None:
    checked = settings()[setting].checked
    living.must_live(checked.setting, techniques, checked.allowed)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "techniques"), _lives(slow=True))
def test_every_allowed_pair_lives_alone(compiled_living: Living, setting: str, techniques: Items) -> None:
    checked = settings()[setting].checked
    compiled_living.must_live(checked.setting, techniques, checked.allowed)
