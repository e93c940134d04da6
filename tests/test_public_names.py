"""The public namespace is what it says, no more and no less."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rush

EXPECTED = {
    "GeneratedText",
    "LadderResult",
    "PlannedRecipe",
    "RaceResult",
    "StartedRecipe",
    "TrainingRun",
    "TunedRecipe",
    "generate",
    "plan_chart",
    "plan_config",
    "plan_recipe",
    "race",
    "run_ladder",
    "start_recipe",
    "train",
    "tune_recipe",
    "DataError",
    "Diverged",
    "MachineError",
    "Recipe",
    "RecipeError",
    "RushError",
    "__version__",
    "export_model",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "train_recipe",
    "write_report",
}


def test_all_names_exactly_the_public_interface_and_every_name_loads() -> None:
    assert set(rush.__all__) == EXPECTED
    assert list(rush.__all__) == sorted(rush.__all__)
    assert set(dir(rush)) == EXPECTED
    for name in rush.__all__:
        assert getattr(rush, name) is not None


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="load_model"):
        rush.nothing  # noqa: B018


def test_importing_rush_does_not_import_torch() -> None:
    code = "import sys, rush; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
