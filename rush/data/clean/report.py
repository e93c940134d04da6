"""The report of a cleaning run: how many documents each stage removed, with examples.

It has no times and no absolute paths, so that equal runs give equal bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rush.data.clean.plan import CleaningLayout
from rush.data.clean.removal import Removed, clipped, gather
from rush.data.clean.row_files import Inputs
from rush.data.clean.stages import CleaningPipeline, Identity
from rush.files import write_atomic, write_json_atomic

REPORT = "report.json"
IN_REPORT = 5
CLIP_IN_REPORT = 400


def write_report(
    folder: Path,
    pipeline: CleaningPipeline,
    inputs: Inputs,
    layout: CleaningLayout,
    output: str,
    examples: int,
) -> dict[str, Any]:
    """Write the samples of every stage and the report into `folder`; return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    read = sum(json.loads(path.read_bytes())["rows"] for path in Path(layout.counts).glob("*.json"))
    unreadable = gather([layout.unreadable], examples)
    _write_samples(folder / "00-unreadable.jsonl", unreadable)
    left = read - unreadable.removed
    stages = []
    for number, (stage, name) in enumerate(zip(pipeline.stage, pipeline.names(), strict=True)):
        found = gather([layout.removed(number), layout.removed(number, late=True)], examples)
        file = f"{number + 1:02d}-{re.sub('[^A-Za-z0-9_]+', '-', name).strip('-')}.jsonl"
        _write_samples(folder / file, found)
        row = {"name": name, "kind": stage.kind, "documents_in": left, "removed": found.removed}
        left -= found.removed
        row |= {"kept": left, "missing_field": found.missing, "examples": _short(found)}
        if isinstance(stage, Identity) and stage.drop == "turn":
            edited = gather([layout.edited(number)], examples)
            _write_samples(folder / file.replace(".jsonl", "-edited.jsonl"), edited)
            row |= {"edited": edited.removed, "edited_examples": _short(edited)}
        stages.append(row)
    kept = sum(int(path.read_text()) for path in Path(layout.parts).glob("*.count"))
    assert kept == left, f"{kept} documents were written and {left} should be left"
    report = {
        "pipeline": pipeline.model_dump(exclude_none=True),
        "inputs": [
            {"name": inputs.labels[path], "bytes": Path(path).stat().st_size} for path in inputs.paths
        ],
        "output": output,
        "documents": {"read": read, "unreadable": unreadable.removed, "kept": kept},
        "unreadable_examples": _short(unreadable),
        "stages": stages,
    }
    write_json_atomic(folder / REPORT, report)
    return report


def _short(found: Removed) -> list[dict[str, Any]]:
    return [
        {"document": one.document, "reason": one.reason, "row": clipped(one.row, CLIP_IN_REPORT)}
        for one in found.examples[:IN_REPORT]
    ]


def _write_samples(path: Path, found: Removed) -> None:
    if found.examples:
        rows = [
            {key: value for key, value in asdict(one).items() if key != "place"} for one in found.examples
        ]
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
