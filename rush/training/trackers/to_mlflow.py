"""MLflow: a run of an experiment in the store that MLFLOW_TRACKING_URI names; without it `mlflow.db` in the current folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rush.recipe_io import write_toml
from rush.training.trackers.contract import PROJECT, Ended, TrackedRun

STATES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
LONGEST_PARAM = 500


def check() -> None:
    """A server's own client reads its login."""


def where_to_look(folder: Path, project: str | None) -> str:
    remote = os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://", "databricks"))
    # Not the address: it may hold a password.
    return f"MLflow's server, experiment {_experiment(project)}" if remote else "mlflow ui"


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # how it makes its tables
        self._client, self._metric = MlflowClient(), Metric
        if run.id is None:
            experiment = self._experiment_id(_experiment(run.project))
            made = self._client.create_run(experiment, run_name=run.name)
            self.id: str = made.info.run_id
            params = [Param(key, value) for key, value in _params(run.recipe.model_dump(mode="json"))]
            self._client.log_batch(self.id, params=params)
            self._client.log_text(self.id, write_toml(run.recipe), "recipe.toml")
        else:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.id, [self._metric(name, value, now, step) for name, value in values.items()]
        )

    def sample(self, step: int, text: str) -> None:
        self._client.log_text(self.id, text, f"samples/step-{step:06d}.txt")

    def end(self, ended: Ended) -> None:
        self._client.set_tag(self.id, "ended", str(ended))
        self._client.set_terminated(self.id, STATES[ended.how])

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))


def open_tracker(run: TrackedRun) -> MLflow:
    # Send no system metrics, and detect an unreachable server before the first step, not after minutes.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    return MLflow(run)


def _experiment(named: str | None) -> str:
    return named or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT


def _params(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The recipe's keys with dots; an empty value is no parameter."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _params(value, f"{prefix}{key}.")
        elif value not in (None, "", []):
            yield prefix + key, str(value)[:LONGEST_PARAM]
