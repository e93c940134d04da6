"""The recipes that the planner is to be measured by: each can be planned, runs on an H200 by its rules, and is unlike the others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rush.plan import plan, spec_of, target_of
from rush.plan.planning import unmet

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_cases", SCRIPTS / "plan_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_case_fits_an_h200_and_none_is_there_twice(script: ModuleType) -> None:
    cases, how = script.read_cases(SCRIPTS / "plan_cases.toml")
    target = target_of("h200-sxm")
    assert how.processes == 1
    for name, recipe in cases.items():
        found = plan(spec_of(recipe), target, limits=False, problems=unmet(recipe, target))
        assert found.fits, name
        assert not found.problems, (name, found.problems)
        assert found.time.step < 2, name
    assert len({recipe.digest for recipe in cases.values()}) == len(cases) == 25


def test_the_cases_are_of_every_kind_the_planner_promises(script: ModuleType) -> None:
    cases = list(script.read_cases(SCRIPTS / "plan_cases.toml")[0].values())
    used = {name for recipe in cases for name, _ in recipe.technique_uses()}
    assert {
        "amp_bf16",
        "pure_bf16",
        "tf32",
        "fp8",
        "checkpoint_full",
        "checkpoint_selective",
        "compile",
    } <= used
    assert {"lora", "qlora", "adam8bit", "pack_best_fit"} <= used
    assert any(not recipe.techniques for recipe in cases)
    assert {recipe.batch.sequence for recipe in cases} >= {512, 1024, 2048, 4096, 8192}
    assert {recipe.micro for recipe in cases} >= {1, 2, 4, 8, 32}
    assert {recipe.model.name for recipe in cases} >= {
        "llama-3.2-1b",
        "llama-3.2-3b",
        "llama-3.1-8b",
        "gpt2-124m",
    }
