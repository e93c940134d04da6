"""The plan of a scaling study: a recipe, numbers of devices, layouts, and how to measure."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rush.errors import RecipeError
from rush.lab.ladder.ladder_file import MeasureConfig, ParityConfig, read_table
from rush.lab.scaling.layouts import base_of, read_layout
from rush.ready import short_name
from rush.recipe import Recipe
from rush.recipe_io import apply_override, parse, read_tree

OWN_TABLES = ("measure", "parity")
USUAL: dict[str, Any] = {"processes": 2, "windows": 6, "warmup_max_steps": 20, "limit_s": 900.0}
"""Defaults of `[measure]`: a study has many points, and collectives make long samples."""

PARITY_STEPS = 6
MOST_NUMBERS = 64


@dataclass(frozen=True)
class StudyPlan:
    name: str
    recipe: Recipe
    devices: tuple[int, ...]
    layouts: tuple[str, ...]
    measure: MeasureConfig
    parity: ParityConfig
    without_peers: bool = False
    """Whether to measure everything again with peer-to-peer switched off."""
    share_device: bool = False
    group_of_one: bool = False
    """Whether to measure ddp on one device, too: a process group of one."""
    links: bool = True
    launcher: str | None = None
    """A cluster's own command that starts the ranks, with {ranks} for their number; torchrun's engine here without it."""
    extra_techniques: tuple[str, ...] = ()
    """Python files that define further techniques."""

    @property
    def step_tokens(self) -> int:
        """Tokens per step: in strong scaling at every number of devices, in weak scaling at the largest."""
        batch = self.recipe.batch
        return batch.total_tokens or self.recipe.micro * batch.sequence * self.devices[-1]

    def tokens(self, scaling: str, devices: int) -> int:
        """Tokens of a step on this number of devices."""
        if scaling == "strong":
            return self.step_tokens
        total, rest = divmod(self.step_tokens * devices, self.devices[-1])
        if rest:
            raise RecipeError(
                f"a step of {self.step_tokens:,} tokens on {self.devices[-1]} devices leaves no whole number for {devices}; set "
                f"batch.total_tokens to a multiple of {self.devices[-1]}."
            )
        return total


def load_study(name: str, overrides: Iterable[str], devices: str, layouts: str, **options: Any) -> StudyPlan:
    """A study of a recipe by name or path. Overrides change the recipe, or `measure.` and `parity.` keys."""
    tree = read_tree(name)
    own: dict[str, Any] = {"measure": dict(USUAL), "parity": {"steps": PARITY_STEPS}}
    for override in overrides:
        apply_override(own if override.split(".", 1)[0] in OWN_TABLES else tree, override)
    recipe = parse(tree)
    base_of(recipe)  # refuses a layout of its own
    if recipe.objective.kind == "dpo":
        raise RecipeError(
            "objective.kind is dpo, whose references a study of scale does not make; it takes lm or sft."
        )
    numbers = read_devices(devices)
    _check_launcher(options.get("launcher"))
    if options.get("group_of_one") and 1 not in numbers:
        raise RecipeError(
            f"--group-of-one measures ddp on one device, but --devices is {devices}; add 1 to it, or leave --group-of-one out."
        )
    return StudyPlan(
        short_name(name),
        recipe,
        numbers,
        read_layouts(layouts),
        read_table(MeasureConfig, own, "measure", "rush scale"),
        read_table(ParityConfig, own, "parity", "rush scale"),
        **options,
    )


def read_devices(text: str) -> tuple[int, ...]:
    """Numbers of devices, in order."""
    words = [word.strip() for word in text.split(",")]
    if len(words) > MOST_NUMBERS:
        raise RecipeError(
            f"--devices has {len(words):,} numbers; at most {MOST_NUMBERS} are measured. Leave some out."
        )
    if not all(re.fullmatch("0*[1-9][0-9]{0,5}", word) for word in words):
        raise RecipeError(
            f"--devices is {text!r:.200}; allowed: whole numbers from 1 to 999,999 with commas, as in 1,2,4,8."
        )
    return tuple(sorted({int(word) for word in words}))


def _check_launcher(launcher: str | None) -> None:
    """Refuse a command that cannot start, before the first measurement."""
    try:
        words = [] if launcher is None else shlex.split(launcher) or [""]
    except ValueError as error:
        raise RecipeError(
            f"--launcher is {launcher!r:.200}, which is no command line ({error}); close its quotes."
        ) from None
    if words and shutil.which(words[0]) is None:
        raise RecipeError(
            f"--launcher begins with {words[0]!r:.200}, which is no command on this machine; give one such as "
            '"srun --ntasks={ranks}", or leave it out.'
        )


def read_layouts(text: str) -> tuple[str, ...]:
    """Layouts by name, in the order given; each must mean something on some number of devices."""
    names: Sequence[str] = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        read_layout(name)
    return tuple(names)
