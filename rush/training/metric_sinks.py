"""Where metrics go besides `metrics.jsonl`: TensorBoard by default, Weights & Biases on request.

Only the recipe and the metrics are sent. Keys and tokens are read by the services' own clients from the environment; nothing
here reads or stores them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rush.errors import MachineError
from rush.files import writing
from rush.recipe import Recipe


class MetricSink(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder; rows after the resumed step are purged.

    Written with tensorboard's own record format. torch's SummaryWriter would put the host's name into the name of the file, and
    run folders are shared.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise MachineError(
                "run.tensorboard is on but the package tensorboard is not installed; install it or set "
                "run.tensorboard=false."
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.rush.{os.getpid()}"
        with writing(self._path):
            self._file = open(self._path, "xb")  # noqa: SIM115 (closed by `close`)
        self._records, self._event, self._summary = RecordWriter(self._file), Event, Summary
        self._add(step=first_step, file_version="brain.Event:2")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            one = self._summary.Value(tag=name, simple_value=value)
            self._add(step=step, summary=self._summary(value=[one]))

    def _add(self, **content: Any) -> None:
        with writing(self._path):
            self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
            self._file.flush()

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


class WeightsAndBiases:
    """A run in a Weights & Biases project; resumed under the same id."""

    def __init__(self, project: str, recipe: Recipe, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise MachineError(
                f"run.wandb is {project!r} but the package wandb is not installed; install the extra `wandb` "
                "or leave run.wandb out."
            ) from None
        # Without a key the client would stop and ask on the terminal, in the middle of a batch job.
        if os.environ.get("WANDB_MODE") not in ("offline", "disabled") and not _has_login():
            raise MachineError(
                "run.wandb is set but no login was found; run `wandb login`, or set WANDB_MODE=offline to log "
                "to files only."
            )
        self._run: Any = wandb.init(
            project=project,
            id=f"{folder.resolve().name}-{recipe.digest[:8]}",
            resume="allow",
            dir=str(folder),
            config=recipe.model_dump(mode="json"),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_login() -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())


def open_sinks(recipe: Recipe, folder: Path, first_step: int) -> list[MetricSink]:
    """The sinks the recipe asks for, besides `metrics.jsonl`."""
    sinks: list[MetricSink] = []
    if recipe.run.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", first_step))
    if recipe.run.wandb:
        sinks.append(WeightsAndBiases(recipe.run.wandb, recipe, folder))
    return sinks
