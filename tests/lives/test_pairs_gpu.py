"""The same on a GPU: every pair of techniques that the check allows there lives in some recipe of a covering array.

Kernels are compiled instead of interpreted, and what needs a GPU (captured graphs, offloading, cuDNN, fp8 in hardware, ...) is in
the array too. A pair that both families allow lives on one of them; with `RUSH_LIVES_ALL=1` on both. `RUSH_LIVES_REPORT=FILE` gets a line of JSON for every life that fails: setting, techniques, part and last words.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from rush.hardware import probe
from tests.lives.arrays import Wanted, array, quick, wanted
from tests.lives.covering import Items
from tests.lives.living import TEST_S, Living

SHRINK_S = float(os.environ.get("RUSH_LIVES_SHRINK_S", "0"))
"""Seconds for taking a failing recipe apart. None as a rule: time on a GPU is dear, and a pair can be taken from the report."""

ALL = os.environ.get("RUSH_LIVES_ALL") == "1"
"""Whether a pair that both families allow lives on both of them."""
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_S)]


@cache
def settings() -> dict[str, Wanted]:
    if not torch.cuda.is_available():
        return {}
    every = list(wanted(probe("cuda")))
    return {str(one.checked.setting): one for one in (every if ALL else quick(every))}


def _lives() -> list[object]:
    rows = [(name, number, techniques) for name, one in settings().items() for number, techniques in enumerate(array(one))]  # fmt: skip
    # Workers begin with neighbouring tests: each gets its share of those that compile, and begins with them.
    rows.sort(key=lambda row: (all(item.name != "compile" for item in row[2]), row[1], row[0]))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    dealt = [row for worker in range(workers) for row in rows[worker::workers]]
    return [pytest.param(name, techniques, id=f"{name}-{number:02d}") for name, number, techniques in dealt]


@pytest.mark.parametrize(("setting", "techniques"), _lives())
def test_every_allowed_pair_lives_on_a_gpu(compiled_living: Living, setting: str, techniques: Items) -> None:
    checked = settings()[setting].checked
    compiled_living.must_live(checked.setting, techniques, checked.allowed, limit_s=SHRINK_S)
