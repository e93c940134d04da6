"""Taking a small recipe through its life in a test: one warm process per worker, and a failure that names its recipe."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rush.lab.life.life import Lives
from rush.lab.trial.starter import Starter
from tests.lives.covering import Allowed, Items, shrunk
from tests.lives.small import Setting

PARTS = ("train", "resume", "generate")
UNDISTURBED = ("whole", "generate")
"""The same without a kill: a resume waits for the compiler once more."""
LIMIT_S, TEST_S = 500.0, 1200.0
"""How long a command and a test may take: with a compiler, on a busy machine."""
REPORT = "RUSH_LIVES_REPORT"
"""Names a file that gets a line of JSON for every life that fails."""


@dataclass
class Living:
    """Where lives happen: their data, prepared once, and a folder of its own for each."""

    starters: tuple[Starter, Starter]
    """Of commands with compiled kernels, and with interpreted ones."""
    folder: Path
    data: Path
    environment: dict[str, str]
    shallow: bool
    """Whether models whose layers take long have one."""
    count: int = 0
    stderr: str = ""
    """The end of standard error of the last life, if it failed."""

    def problem(self, setting: Setting, techniques: Items, parts: Sequence[str]) -> str | None:
        """What goes wrong in the life of this recipe; None after a whole one."""
        self.count += 1
        place = self.folder / f"life-{self.count}"
        lives = Lives(self.starters[setting.interpreted], place, self.environment, limit_s=LIMIT_S)
        try:
            with setting.surroundings():
                life = lives.live(setting.recipe(techniques, self.data, shallow=self.shallow), parts)
            self.stderr = life.parts[-1].stderr
            return life.problem
        finally:
            shutil.rmtree(place)

    def must_live(
        self,
        setting: Setting,
        techniques: Items,
        allowed: Allowed,
        parts: Sequence[str] = PARTS,
        limit_s: float = 100.0,
    ) -> None:
        """Fail with the smallest part of the recipe that still fails, as far as `limit_s` gives time to find it."""
        problem = self.problem(setting, techniques, parts)
        if problem is None:
            return
        told = {"setting": str(setting), "techniques": sorted(map(str, techniques)), "problem": problem}
        _report({**told, "stderr": self.stderr})

        def fails(fewer: Items) -> bool:
            return _kind(self.problem(setting, fewer, parts) or "") == _kind(problem)

        if limit_s and len(techniques) > 1:
            told["smallest"] = sorted(map(str, shrunk(techniques, fails, allowed, limit_s)))
            _report(told)
        raise AssertionError(json.dumps(told, indent=1, ensure_ascii=False))


def _kind(problem: str) -> str:
    """What two failures have in common that are one: the part, and how the message begins, without its numbers."""
    return re.sub(r"[\d.]+", "", problem)[:60]


def _report(told: dict[str, object]) -> None:
    if REPORT in os.environ:
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps(told, ensure_ascii=False) + "\n")
