"""Weights & Biases: a run of a project; with WANDB_MODE=offline files in the run folder, which `wandb sync` sends later.

W&B's own step never decreases, but a resumed run's may: rows log their step as the metric `step`, the x axis of every chart.
"""

from __future__ import annotations

import html
import os
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path

from rush.errors import MachineError
from rush.training.trackers.contract import PROJECT, Ended, TrackedRun

EXIT_CODES = {"finished": 0, "interrupted": 255, "failed": 1}
"""What W&B shows as finished, killed and failed."""


def check() -> None:
    """Without a key the client would stop and ask on the terminal, in the middle of a batch job."""
    if not (_sends_nothing() or _has_login()):
        raise MachineError(
            "run.trackers names wandb, but no login was found; run `wandb login`, or set WANDB_MODE=offline to log to files only."
        )


def where_to_look(folder: Path, project: str | None) -> str:
    if _sends_nothing():
        return f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    return f"https://wandb.ai/home, project {_project(project)}"


class WeightsAndBiases:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.id, self._html = run.id or uuid.uuid4().hex[:12], wandb.Html
        # Only what rush records: no host, user, program, git remote, packages or console output.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
            host="rush",
        )
        self._run = wandb.init(
            project=_project(run.project),
            name=run.name,
            id=self.id,
            resume="allow",
            dir=str(run.folder),
            config=run.recipe.model_dump(mode="json"),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def sample(self, step: int, text: str) -> None:
        self._run.log({"step": step, "sample": self._html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def end(self, ended: Ended) -> None:
        self._run.summary["ended"] = str(ended)
        self._run.finish(exit_code=EXIT_CODES[ended.how])


def open_tracker(run: TrackedRun) -> WeightsAndBiases:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return WeightsAndBiases(run)


def _project(named: str | None) -> str:
    return named or os.environ.get("WANDB_PROJECT") or PROJECT


def _sends_nothing() -> bool:
    return os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")


def _has_login() -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
