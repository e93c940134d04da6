"""TensorBoard: event files in the run folder.

Written with tensorboard's own record format. torch's SummaryWriter would put the host's name into the name of the file, and run
folders are shared. Rows after the step that a run resumes at are purged.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rush.files import writing
from rush.recipe_io import write_toml
from rush.training.trackers.contract import Ended, TrackedRun


def check() -> None:
    """It needs no login."""


def where_to_look(folder: Path, project: str | None) -> str:
    return f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"


class TensorBoard:
    id = "tensorboard"  # its runs are folders

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run.folder / "tensorboard"
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.rush.{os.getpid()}"
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "xb")  # noqa: SIM115 (closed by `end`)
        self._records, self._event, self._summary = RecordWriter(self._file), Event, Summary
        self._step = run.first_step
        self._add(step=run.first_step, file_version="brain.Event:2")
        self._add(step=run.first_step, session_log=SessionLog(status=SessionLog.START))
        self._text("recipe", run.first_step, "```toml\n" + write_toml(run.recipe) + "```")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._add(step=step, summary=self._values(values))

    def sample(self, step: int, text: str) -> None:
        self._text("sample", step, "    " + text.replace("\n", "\n    "))  # as it is, not as Markdown

    def end(self, ended: Ended) -> None:
        self._text("ended", self._step, str(ended))
        with writing(self._path):
            self._file.close()

    def _values(self, values: Mapping[str, float]) -> Any:
        return self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )

    def _text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = self._summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))
        self._add(step=step, summary=self._summary(value=[value]))

    def _add(self, **content: Any) -> None:
        with writing(self._path):
            self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
            self._file.flush()


def open_tracker(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)
