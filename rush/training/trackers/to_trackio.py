"""trackio: a run of a project in trackio's own folder (TRACKIO_DIR), or in the Space that TRACKIO_SPACE_ID names.

It prints to standard output, which is reserved for `--json`: its output is dropped, and `where_to_look` gives
the same information.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path

from rush.training.trackers.contract import PROJECT, Ended, TrackedRun


def check() -> None:
    """Its local store needs no login."""


def where_to_look(folder: Path, project: str | None) -> str:
    return f"trackio show --project {shlex.quote(project or PROJECT)}"


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        # trackio identifies runs by name, and many folders have the same name.
        self.id = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        with _quiet():
            self._run = trackio.init(
                run.project or PROJECT,
                name=self.id,
                resume="allow",
                config=run.recipe.model_dump(mode="json"),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # Otherwise trackio ends it a second time when the process exits, and prints that.
        trackio.context_vars.current_run.set(None)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def sample(self, step: int, text: str) -> None:
        self._run.log({"sample": self._trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def end(self, ended: Ended) -> None:
        levels = self._trackio.AlertLevel
        level = {"finished": levels.INFO, "interrupted": levels.WARN, "failed": levels.ERROR}[ended.how]
        with _quiet():
            self._run.alert(title=ended.how, text=ended.reason or None, level=level)
            self._run.finish()


def open_tracker(run: TrackedRun) -> Trackio:
    return Trackio(run)


def _quiet() -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO())
