"""Whether a measured recipe is usable: a short life, and its record.

A trial makes steps and nothing else. Validation, sampling, checkpoints and resume may fail on a recipe that is fast and has
parity: compiled code that cannot run under no_grad, state that no checkpoint holds. So a recipe is usable only after four steps
of `rush train` with all of these, and the last two again in a new process, resumed from the checkpoint of step 2, to the same
losses. The micro batch is the recipe's own, and the compiler's cache is that of the trial.

Checkpoints of a large model take longer than the rest. Beyond `LARGEST_BYTES` the life has fewer layers, and the record says
so; failures of the whole model only, such as running out of memory at a validation, are not seen then.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rush.errors import Diverged, RecipeError
from rush.files import shareable
from rush.lab.life.life import UNDISTURBED, LifeResult, Lives, PartResult, short
from rush.lab.trial.starter import Starter
from rush.lab.trial.trial import compiler_caches
from rush.models import count_parameters
from rush.recipe import Recipe
from rush.records.life import LifePart, LifeRecord
from rush.techniques.api.rounding import trains_adapters

STEPS, EVERY = 4, 2
LARGEST_BYTES = 8e9
"""Largest checkpoint, at `STATE_BYTES` per parameter."""
STATE_BYTES = 12
"""fp32 weights with two moments; other dtypes take less."""
CPU_TOLERANCE, GPU_TOLERANCE = 1e-4, 2e-3
"""Relative tolerances of losses. GPU reductions are not deterministic, and bf16 rounds their results."""
NAMES = {"whole": "train", "again": "resume"}
VERBS = {"validation": "validate", "sample": "sample", "save": "save"}
"""What a run that failed in a phase cannot do."""


def quick(recipe: Recipe) -> Recipe:
    """The recipe with a schedule of a few steps that has every event; its own micro batch, gradient accumulation of at most 2."""
    tokens = recipe.micro * recipe.batch.sequence * recipe.data_ranks
    changes: dict[str, Any] = {
        "schedule.steps": STEPS,
        "batch.total_tokens": min(2, recipe.accumulation) * tokens,
        "run.save_every": EVERY,
        "run.keep": STEPS,
        "run.validate_every": EVERY,
        "run.validate_sequences": recipe.micro * recipe.data_ranks,
        "run.sample_every": EVERY,
        "run.sample_tokens": 2,
    }
    layers = _layers(recipe)
    if layers < recipe.shape().num_layers:
        changes["model.shape.num_layers"] = layers
    return short(recipe, **changes)


def _layers(recipe: Recipe) -> int:
    """All layers; fewer where checkpoints would be too large. Checkpoints of adapters do not hold the frozen weights."""
    shape = recipe.shape()
    if recipe.model.init_from is not None or trains_adapters(recipe):
        return shape.num_layers
    layers = shape.num_layers
    while layers > 1 and STATE_BYTES * count_parameters(replace(shape, num_layers=layers)) > LARGEST_BYTES:
        layers //= 2
    return layers


def live(
    starter: Starter,
    recipe: Recipe,
    folder: Path,
    *,
    device: str,
    compiled: Path,
    techniques: Sequence[str] = (),
    limit_s: float,
) -> LifeRecord:
    """Take a recipe made by `quick` through its life, in a temporary folder."""
    shutil.rmtree(folder, ignore_errors=True)
    lives = Lives(
        starter,
        folder.resolve(),
        compiler_caches(compiled),
        limit_s,
        tuple(word for path in techniques for word in ("--technique", path)),
        strict=False,
        tolerance=CPU_TOLERANCE if device == "cpu" else GPU_TOLERANCE,
    )
    try:
        life = lives.live(recipe, UNDISTURBED)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdict, problem = judged(life)
    parts: list[LifePart] = [{"name": NAMES[part.name], "seconds": part.seconds} for part in life.parts]
    techniques = [name for part in life.parts if part.problem for name in part.techniques]
    return {"verdict": verdict, "problem": problem, "parts": parts, "techniques": techniques}


def judged(life: LifeResult) -> tuple[str, str | None]:
    """The verdict on a life, and its problem. Failures from outside the run say nothing about the recipe."""
    part = next((part for part in life.parts if part.problem), None)
    if part is None:
        return "ok", None
    problem = shareable(str(part.problem))
    if part.code == -signal.SIGKILL:
        killed = problem if part.late else "the process was killed from outside (SIGKILL)"
        return "not known", f"{killed}."
    if part.disk_full:
        return "not known", "there is no room for its checkpoints on the disk."
    refused = part.code == RecipeError.exit_code and part.phase in (None, "build")
    if part.name == "whole" and (refused or part.code == Diverged.exit_code):
        # The schedule is not the recipe's own: few steps, at the full learning rate from the first one.
        return "not known", f"its short schedule could not be run: {_message(part)}"
    return "broken", f"it cannot {_what(part)}: {_message(part)}"


def _what(part: PartResult) -> str:
    if part.name == "again":
        return "resume"
    return VERBS.get(part.phase or "", "be trained with")


def _message(part: PartResult) -> str:
    """What went wrong, without the path of the log, which is gone."""
    return shareable(str(part.message or part.problem)).rstrip(".") + "."
