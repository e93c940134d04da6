"""The results of the Python interface. Each holds its record and its folder, and renders in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rush.plan import Plan
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.metrics import MetricsRow, read_rows
from rush.records.run_folder import RunFolder

if TYPE_CHECKING:
    from rush.records.ladder import LadderRecord
    from rush.records.race import RaceRecord
    from rush.records.start import StartRecord
    from rush.records.tune import TuneRecord
    from rush.training.session import Summary


@dataclass(frozen=True)
class TrainingRun:
    """A run that ended: its summary, its folder, and its metrics."""

    summary: Summary

    @property
    def folder(self) -> Path:
        return Path(self.summary.folder)

    @property
    def rows(self) -> list[MetricsRow]:
        """One row per step, as in `metrics.jsonl`."""
        return list(read_rows(RunFolder(self.folder).metrics, MetricsRow))

    def _repr_html_(self) -> str:
        from rush.report.notebook import run_html

        ended = self.summary
        facts = {
            "folder": ended.folder,
            "step": f"{ended.step} of {ended.steps}",
            "loss": f"{ended.loss:.4f}",
            "validation loss": "" if ended.val_loss is None else f"{ended.val_loss:.4f}",
            "tokens/s": f"{ended.tokens_per_s:,.0f}",
        }
        return run_html(self.rows, facts)


@dataclass(frozen=True)
class LadderResult:
    """A measured ladder: its record, and the folder with `ladder.json`, `report.html` and the `recipe.toml` it leads to."""

    record: LadderRecord
    folder: Path

    @property
    def recipe(self) -> Recipe | None:
        """The fastest proven rung, ready to train; None where nothing was proved faster."""
        file = self.folder / "recipe.toml"
        return load_recipe(str(file)) if file.is_file() else None

    def _repr_html_(self) -> str:
        from rush.report.ladder import read_ladder
        from rush.report.ladder_picture import ladder_picture

        return ladder_picture(read_ladder(self.folder / "ladder.json"))


@dataclass(frozen=True)
class PlannedRecipe(Plan):
    """A plan that renders in a notebook."""

    def _repr_html_(self) -> str:
        from rush.report.notebook import plan_html

        return plan_html(self.to_dict())


@dataclass(frozen=True)
class TunedRecipe:
    """A finished search: its record, and the folder with the winner's `recipe.toml` and `report.html`."""

    record: TuneRecord
    folder: Path

    @property
    def recipe(self) -> Recipe:
        """The winner."""
        return load_recipe(str(self.folder / "recipe.toml"))

    def _repr_html_(self) -> str:
        from rush.report.notebook import tune_html

        return tune_html(self.record)


@dataclass(frozen=True)
class RaceResult:
    """A race: its record, and the folder with `race.json`, `report.html`, the recipes and a run for each of them and each seed."""

    record: RaceRecord
    folder: Path

    @property
    def winner(self) -> Recipe | None:
        """The recipe that reached the same loss soonest beyond noise; None if the race is inconclusive."""
        from rush.report.race_words import winner_of

        letter = winner_of(self.record)
        return None if letter is None else load_recipe(str(self.folder / "recipes" / f"{letter}.toml"))

    def _repr_html_(self) -> str:
        from rush.report.race import race_html

        return race_html(self.record)


@dataclass(frozen=True)
class StartedRecipe:
    """A recipe for a model and data: the record of the decisions, and the file where it was written."""

    record: StartRecord
    recipe: Recipe
    file: Path | None

    def _repr_html_(self) -> str:
        from rush.report.notebook import start_html

        return start_html(self.record)


@dataclass(frozen=True)
class GeneratedText:
    """A prompt, its continuation, and the tokens of the continuation."""

    prompt: str
    text: str
    tokens: list[int]

    def __str__(self) -> str:
        return self.prompt + self.text
