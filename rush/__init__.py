"""Optimization Rush: measure, prove, tune and train language models on the machine you have.

The names below are the whole public interface; they load on first use, so that `import rush` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rush.version import __version__

if TYPE_CHECKING:
    from rush.api import (
        generate,
        plan_chart,
        plan_config,
        plan_recipe,
        race,
        run_ladder,
        start_recipe,
        train,
        tune_recipe,
        write_report,
    )
    from rush.errors import DataError, Diverged, MachineError, RecipeError, RushError
    from rush.hub.export import export_model
    from rush.hub.folders import load_model
    from rush.hub.tokenizers import load_tokenizer
    from rush.recipe import Recipe
    from rush.recipe_io import load_recipe
    from rush.results import (
        GeneratedText,
        LadderResult,
        PlannedRecipe,
        RaceResult,
        StartedRecipe,
        TrainingRun,
        TunedRecipe,
    )
    from rush.training.loop import train_recipe

_NAMES = {
    "api": "generate plan_chart plan_config plan_recipe race run_ladder start_recipe train tune_recipe write_report",
    "errors": "DataError Diverged MachineError RecipeError RushError",
    "hub.export": "export_model",
    "hub.folders": "load_model",
    "hub.tokenizers": "load_tokenizer",
    "recipe": "Recipe",
    "recipe_io": "load_recipe",
    "results": "GeneratedText LadderResult PlannedRecipe RaceResult StartedRecipe TrainingRun TunedRecipe",
    "training.loop": "train_recipe",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "DataError",
    "Diverged",
    "GeneratedText",
    "LadderResult",
    "MachineError",
    "PlannedRecipe",
    "RaceResult",
    "Recipe",
    "RecipeError",
    "RushError",
    "StartedRecipe",
    "TrainingRun",
    "TunedRecipe",
    "__version__",
    "export_model",
    "generate",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "plan_chart",
    "plan_config",
    "plan_recipe",
    "race",
    "run_ladder",
    "start_recipe",
    "train",
    "train_recipe",
    "tune_recipe",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"rush.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rush' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
