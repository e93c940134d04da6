"""Whether what was measured can be trained with: a short life of it, and what is written down of that.

A trial makes steps and nothing else. What a user meets beside them (a validation, a sample, a checkpoint, a resume) may break
on a recipe that is fast and learns the same: compiled code that cannot run without gradients, state that no checkpoint holds.
So a recipe is called usable only after four steps of `rush train` in which all of that happens, and the last two of
them once more in a new process, from the checkpoint of the second, to the same losses. The micro batch is the recipe's own, and
the compiler finds what it made for the trial.

Checkpoints of a large model take longer than all the rest. Beyond `LARGEST_BYTES` the life has fewer layers, and says so; what
only the whole model meets, as memory that runs out at a validation, is not seen then.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rush.errors import Diverged, RecipeError
from rush.lab.life.life import UNDISTURBED, LifeResult, Lives, PartResult, short
from rush.lab.trial.starter import Starter
from rush.lab.trial.trial import compiler_caches
from rush.models import count_parameters
from rush.recipe import Recipe
from rush.records.life import LifePart, LifeRecord
from rush.techniques.api.rounding import trains_adapters

STEPS, EVERY = 4, 2
LARGEST_BYTES = 8e9
"""Of a checkpoint, at `STATE_BYTES` a parameter."""
STATE_BYTES = 12
"""fp32 weights with two moments; less precise ones take less."""
CPU_TOLERANCE, GPU_TOLERANCE = 1e-4, 2e-3
"""Relative, of losses. Kernels of a GPU add in changing orders, and bf16 rounds what comes of it."""
NAMES = {"whole": "train", "again": "resume"}
VERBS = {"the validation after": "validate", "the sample after": "sample", "the checkpoint of": "save",
         "validations after": "validate", "samples after": "sample", "checkpoints after": "save"}  # fmt: skip
"""Where a run broke off, or what it left out, as is told of it; and what it cannot do then."""
NO_ROOM = "No space left on device"


def quick(recipe: Recipe) -> Recipe:
    """The recipe with a schedule of a few steps in which everything happens; its own micro batch, accumulated at most twice."""
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
    """All of them; fewer where checkpoints would be too large. Those of adapters do not hold the weights beside them."""
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
    """Take a recipe that `quick` made through its life, in a folder that is removed after it."""
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
    return {"verdict": verdict, "problem": problem, "parts": parts}


def judged(life: LifeResult) -> tuple[str, str | None]:
    """The verdict on a life, and the sentence to it. What came from outside says nothing about the recipe."""
    part = next((part for part in life.parts if part.problem), None)
    if part is None:
        return "ok", None
    told = str(part.problem)
    if part.code == -signal.SIGKILL:
        killed = "the process was killed from outside (SIGKILL)" if told.startswith("exit code") else told
        return "not known", f"{killed}."
    if NO_ROOM in told:
        return "not known", "there is no room for its checkpoints on the disk."
    if part.name == "whole" and part.code in (RecipeError.exit_code, Diverged.exit_code):
        # The schedule is not the recipe's own: few steps, at the full learning rate from the first on.
        return "not known", f"its short schedule could not be run: {_message(part)}"
    return "broken", f"it cannot {_what(part)}: {_message(part)}"


def _what(part: PartResult) -> str:
    if part.name == "again":
        return "resume"
    return next((verb for place, verb in VERBS.items() if place in str(part.problem)), "be trained with")


def _message(part: PartResult) -> str:
    """What the command said, without the log that is gone."""
    told = re.sub(r"^exit code [^:]*: error: ", "", str(part.problem))
    return told.split(" The full log is")[0].rstrip(".") + "."
