"""The contents of the watched folders: runs, ladders, searches, scaling studies and races, with their status.

Folders are found by walking; no path is ever built from a request, which names an id of this list. Symbolic links are not
followed, neither to folders nor to files. Listing a run reads only the end of its metrics, and only when the file changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.files import parse_json
from rush.records.gains import judged_again
from rush.records.run_series import finite
from rush.records.run_status import KINDS, holder_is_alive, status_of
from rush.records.tail import open_file
from rush.report.lenient import table, text, whole
from rush.report.run_view import read_toml

DEEPEST = 5
MOST_FOLDERS = 2000
OWN_FOLDERS = {"checkpoints", "tensorboard", "tokenizer", "trials", "wandb"}
SHOWN = ("ladder", "tune", "scale", "race")
FRESH_S = 0.4
"""Seconds for which a list is reused for the next client."""
END_BYTES = 1 << 14
MOST_BYTES = 1 << 25
"""Maximum bytes of a record."""


@dataclass(frozen=True)
class Entry:
    """A folder with a record."""

    id: str
    name: str
    kind: str
    path: Path

    @property
    def record(self) -> Path:
        return self.path / KINDS.get(self.kind, "metrics.jsonl")


class Catalog:
    """The list, refreshed when it is too old; thread-safe."""

    def __init__(self, roots: list[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        self._lock = threading.Lock()
        self._made = -1.0
        self._entries: dict[str, Entry] = {}
        self._rows: list[dict[str, Any]] = []
        self._version = ""
        self._known: dict[tuple[str, str], tuple[tuple[int, ...], Mapping[str, Any]]] = {}
        self.files_read = 0
        """Total count, for tests of the work done."""

    def entry(self, id: str) -> Entry | None:
        self.rows()
        return self._entries.get(id)

    def rows(self) -> tuple[str, list[dict[str, Any]]]:
        """A version that changes with the list, and the list: the newest first."""
        with self._lock:
            if time.monotonic() - self._made > FRESH_S:
                self._entries = {entry.id: entry for entry in self._walk()}
                rows = [self._row(entry) for entry in self._entries.values()]
                rows.sort(key=lambda row: (row["status"] != "running", -row["changed"], row["name"]))
                content = json.dumps(rows, sort_keys=True, default=str)
                self._version = hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16]
                self._rows, self._made = rows, time.monotonic()
            return self._version, self._rows

    def _walk(self) -> Iterator[Entry]:
        left = [MOST_FOLDERS]
        for number, root in enumerate(self.roots):
            yield from self._under(root, root, number, 0, left)

    def _under(self, root: Path, folder: Path, number: int, depth: int, left: list[int]) -> Iterator[Entry]:
        try:
            with os.scandir(folder) as found:
                inside = [one for one in found if not one.name.startswith(".")]
        except OSError:
            return
        files = {one.name for one in inside if one.is_file(follow_symlinks=False)}
        kind = next((kind for kind, file in KINDS.items() if file in files), None)
        if kind is None and ("metrics.jsonl" in files or {"recipe.toml", "machine.json"} <= files):
            kind = "run"
        if kind == "run" or kind in SHOWN:
            left[0] -= 1
            inner = folder.relative_to(root).as_posix()
            shown = root.name if inner == "." else inner
            if len(self.roots) > 1 and inner != ".":
                shown = f"{root.name}/{inner}"
            yield Entry(f"{number}/{inner}", text(shown) or "?", kind, folder)
        if kind == "run" or depth == DEEPEST:
            return
        for one in sorted(inside, key=lambda one: one.name):
            if left[0] > 0 and one.name not in OWN_FOLDERS and one.is_dir(follow_symlinks=False):
                yield from self._under(root, folder / one.name, number, depth + 1, left)

    def _row(self, entry: Entry) -> dict[str, Any]:
        row: dict[str, Any] = {"id": entry.id, "name": entry.name, "kind": entry.kind}
        row |= self._of_run(entry) if entry.kind == "run" else self._of_record(entry)
        return row

    def _of_run(self, entry: Entry) -> dict[str, Any]:
        last = self._cached(entry.path / "metrics.jsonl", _last_row)
        recipe = self._cached(entry.path / "recipe.toml", _recipe_row)
        steps, step = recipe.get("steps"), last.get("step", 0)
        failed = self._changed(entry.path / "failure.json")
        changed = self._changed(entry.path / "metrics.jsonl") or self._changed(entry.path / "machine.json")
        status = status_of(
            done=steps is not None and step >= steps,
            alive=holder_is_alive(entry.path),
            quiet_s=time.time() - changed,
            step_s=last.get("step_s") or 0.0,
            failed=failed > 0 and failed >= changed,
        )
        return {**last, **recipe, "step": step, "status": status, "changed": int(changed)}

    def _of_record(self, entry: Entry) -> dict[str, Any]:
        facts = self._cached(entry.record, RECORD_ROWS[entry.kind])
        changed = self._changed(entry.record)
        alive = holder_is_alive(entry.path) or (
            entry.path.name in VIEWS and holder_is_alive(entry.path.parent)
        )
        # A trial may take long: only the lock's holder shows whether it is still running.
        status = status_of(
            done=bool(facts.get("finished")), alive=alive, quiet_s=0.0 if alive else time.time() - changed
        )
        return {**facts, "status": status, "changed": int(changed)}

    def _cached(self, path: Path, read: Any) -> Mapping[str, Any]:
        """The result of `read`, cached until the file changes."""
        descriptor = open_file(path, follow=False)
        if descriptor is None:
            return {}
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            identity = (found.st_ino, found.st_size, found.st_mtime_ns)
            key = (str(path), read.__name__)
            if key not in self._known or self._known[key][0] != identity:
                self.files_read += 1
                self._known[key] = (identity, read(file))
            return self._known[key][1]

    @staticmethod
    def _changed(path: Path) -> float:
        try:
            return os.lstat(path).st_mtime
        except OSError:
            return 0.0


VIEWS = ("alone", "left_out")
"""Folders of a ladder's other views, which are measured under its lock."""


def _last_row(file: Any) -> dict[str, Any]:
    """The newest row, and the newest validation near it."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - END_BYTES))
    *lines, _ = file.read(END_BYTES).split(b"\n")
    row: dict[str, Any] = {}
    for line in reversed(lines):
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if not isinstance(found, dict) or whole(found.get("step")) is None:
            continue
        if not row:
            row = {"step": whole(found["step"])}
            row |= {key: finite(found.get(key)) for key in ("loss", "tokens_per_s", "tokens", "step_s")}
        if (loss := finite(found.get("val_loss"))) is not None:
            return {**row, "val_loss": loss}
    return row


def _recipe_row(file: Any) -> dict[str, Any]:
    tree = read_toml(file.read(MOST_BYTES).decode("utf-8", "replace"))
    model, schedule = tree.get("model"), tree.get("schedule")
    return {
        "model": text(model.get("name")) if isinstance(model, dict) else None,
        "steps": whole(schedule.get("steps")) if isinstance(schedule, dict) else None,
    }


def _tree(file: Any) -> dict[str, Any]:
    try:
        found = parse_json(file.read(MOST_BYTES))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _rows_of(tree: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = tree.get(key)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _speed(row: Mapping[str, Any]) -> float | None:
    measured = row.get("tokens_per_s")
    return finite(measured.get("median")) if isinstance(measured, dict) else finite(measured)


def _ratio(value: Any) -> float | None:
    return finite(value.get("ratio")) if isinstance(value, dict) else finite(value)


def _listed(
    tree: Mapping[str, Any], what: str, columns: tuple[str, ...], rows: list[list[Any]]
) -> dict[str, Any]:
    table = {"columns": list(columns), "rows": rows}
    return {"finished": text(tree.get("finished")), "what": f"{len(rows)} {what}", "table": table}


def _ladder_row(file: Any) -> dict[str, Any]:
    tree = _tree(file)
    rungs = [
        [text(rung.get("title")) or text(rung.get("name")), _speed(rung), _ratio(rung.get("total_gain")),
         finite(rung.get("peak_memory_bytes")), judged_again(text(rung.get("verdict")) or "", table(rung.get("gain")))]
        for rung in _rows_of(tree, "rungs")
    ]  # fmt: skip
    return _listed(tree, "rungs", ("rung", "tokens/s", "cumulative", "memory", "verdict"), rungs)


def _tune_row(file: Any) -> dict[str, Any]:
    tree = _tree(file)
    tried = [
        [text(row.get("key")), _speed(row), _ratio(row.get("ratio")), finite(row.get("peak_memory_bytes")), text(row.get("state"))]
        for row in _rows_of(tree, "candidates")
        if row.get("tokens_per_s")
    ]  # fmt: skip
    return _listed(tree, "measured", ("candidate", "tokens/s", "over the lead", "memory", "state"), tried)


def _scale_row(file: Any) -> dict[str, Any]:
    tree = _tree(file)
    points = [
        [f"{text(row.get('layout')) or text(row.get('title')) or text(row.get('name')) or '?'}", _speed(row), None,
         finite(row.get("peak_memory_bytes")), text(row.get("status"))]
        for row in _rows_of(tree, "points")
    ]  # fmt: skip
    return _listed(tree, "points", ("layout", "tokens/s", "", "memory", "status"), points)


def _race_row(file: Any) -> dict[str, Any]:
    tree = _tree(file)
    found = {text(one.get("contender")): one for one in _rows_of(tree, "findings")}
    rows = []
    for one in _rows_of(tree, "contenders"):
        letter = text(one.get("letter")) or "?"
        runs = [run for run in _rows_of(tree, "runs") if run.get("contender") == one.get("letter")]
        losses = [finite(held[-1].get("loss")) for run in runs if (held := _rows_of(run, "validations"))]
        lowest = min((loss for loss in losses if loss is not None), default=None)
        against = table(found.get(letter))
        states = ", ".join(dict.fromkeys(text(run.get("status")) or "?" for run in runs))
        gross = _ratio(against.get("gross"))
        if gross is not None:
            states += f"; gross ×{gross:.3g}"
        rows.append(
            [f"{letter} {text(one.get('name')) or ''}", lowest, _ratio(against.get("net")), None, states]
        )
    return _listed(tree, "recipes", ("recipe", "validation loss", "net", "", "status"), rows)


RECORD_ROWS = {"ladder": _ladder_row, "tune": _tune_row, "scale": _scale_row, "race": _race_row}
