"""What each tracker's own library finds in what a run left there."""

from __future__ import annotations

import html
import json
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Found:
    """One run of a tracker."""

    runs: int = 0
    rows: list[tuple[int, float]] = field(default_factory=list)
    """Steps and losses, in the order of their steps."""
    samples: dict[int, str] = field(default_factory=dict)
    config: str = ""
    ended: list[str] = field(default_factory=list)
    """The last is how it stands now."""


def read_tensorboard(folder: Path, project: str) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    seen.Reload()

    def texts(tag: str) -> list[tuple[int, str]]:
        return [(one.step, one.tensor_proto.string_val[0].decode()) for one in seen.Tensors(tag)]

    return Found(
        runs=1,
        rows=[(one.step, one.value) for one in seen.Scalars("loss")],
        samples={step: re.sub("^    ", "", text, flags=re.MULTILINE) for step, text in texts("sample")},
        config=texts("recipe")[-1][1],
        ended=[text for _, text in texts("ended")],
    )


def read_wandb(folder: Path, project: str) -> Found:
    """An offline run is a log of records; wandb has their definition, and reads the log only in its compiled part."""
    found, ids = Found(), set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda one: one.stat().st_mtime):
        for record in _whole(path):
            if record.HasField("run"):
                assert record.run.project == project
                ids.add(record.run.run_id)
                found.config = str({one.key: json.loads(one.value_json) for one in record.run.config.update})
            if record.HasField("history"):
                row = {
                    ".".join(one.nested_key) or one.key: json.loads(one.value_json)
                    for one in record.history.item
                }
                if "loss" in row:
                    found.rows.append((row["step"], row["loss"]))
                if "sample.path" in row:
                    page = (path.parent / "files" / row["sample.path"]).read_text()
                    found.samples[row["step"]] = (
                        html.unescape(page).removeprefix("<pre>").removesuffix("</pre>")
                    )
            if record.HasField("summary"):
                found.ended += [
                    json.loads(one.value_json) for one in record.summary.update if one.key == "ended"
                ]
            if record.HasField("exit"):
                codes = {"finished": 0, "interrupted": 255, "failed": 1}
                assert record.exit.exit_code == codes[found.ended[-1].partition(":")[0]]
    found.runs = len(ids)
    return found


def _whole(path: Path) -> list[Any]:
    """The records of a run that ended. wandb's own process writes the last of them a moment after `finish` returned."""
    for _ in range(100):
        records = list(_records(path))
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} does not end")


def _records(path: Path) -> Iterator[Any]:
    """LevelDB's log format: blocks of 32 KiB, records in one or several pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read_mlflow(folder: Path, project: str) -> Found:
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    client = MlflowClient()
    experiment = client.get_experiment_by_name(project)
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    history = client.get_metric_history(run.info.run_id, "loss")
    place = Path(download_artifacts(run_id=run.info.run_id))
    state = {"FINISHED": "finished", "KILLED": "interrupted", "FAILED": "failed", "RUNNING": "running"}[
        run.info.status
    ]
    told = run.data.tags.get("ended", "")
    assert state == "running" or told.startswith(state)
    return Found(
        runs=len(runs),
        rows=[(one.step, one.value) for one in history],
        samples={int(path.stem[5:]): path.read_text() for path in place.glob("samples/step-*.txt")},
        config=str(run.data.params) + (place / "recipe.toml").read_text(),
        ended=[told],
    )


def read_trackio(folder: Path, project: str) -> Found:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs(project))
    logs = SQLiteStorage.get_logs(project, runs[0].name)
    alerts = sorted(runs[0].alerts(), key=lambda one: one["timestamp"])
    return Found(
        runs=len(runs),
        rows=[(row["step"], row["loss"]) for row in logs if "loss" in row],
        samples={row["step"]: row["sample"]["_value"][4:-4] for row in logs if "sample" in row},
        config=str(runs[0].config),
        ended=[": ".join(filter(None, (one["title"], one["text"]))) for one in alerts],
    )


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}
