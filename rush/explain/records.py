"""The record of an explanation: what was measured, where and when, as JSON that can be drawn again.

A record may come from anywhere (a classmate, an issue), so it is checked when read: the format, the topic,
numbers that are finite and of a size a picture can hold. What is written is made from the record alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rush.errors import DataError, RecipeError
from rush.explain import find
from rush.explain.chart import Panel
from rush.explain.topic import Data, ExplainSettings, Topic, TopicTable
from rush.hardware.conditions import load_now

FORMAT, VERSION = "rush explain", 1
LARGEST = 1e60
MOST_BYTES = 2**25
BUSY = 0.75
"""Load average per core above which the processor was not ours alone when the measuring began."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Explanation:
    """A record and everything shown of it."""

    record: Record
    topic: Topic
    words: list[str]
    panels: list[Panel]
    table: TopicTable

    @property
    def where(self) -> str:
        """The machine in one line, and whether the numbers are coarse."""
        text = str(self.record["machine"]["summary"])
        return f"{text}; a quick, coarse look" if self.record["quick"] else text

    @property
    def warning(self) -> str | None:
        load = self.record["load"]
        if load is not None and load > BUSY:
            return "Other programs were computing when this was measured; times may be too long and intervals too narrow."
        return None


def make(topic: Topic, settings: ExplainSettings) -> Record:
    """Measure a topic now."""
    machine, load = settings.machine, load_now(settings.machine)
    began, clock = datetime.now(UTC), time.perf_counter()
    data = topic.measure(settings)
    record: Record = {
        "format": FORMAT,
        "version": VERSION,
        "topic": topic.name,
        "device": settings.device,
        "quick": settings.quick,
        "options": dict(settings.options),
        "machine": {
            "summary": machine.summary(),
            "cores": machine.cpu.num_threads,
            "os": machine.os,
            "python": machine.python,
            "torch": machine.torch,
            "cuda": machine.cuda,
            "driver": machine.driver,
        },
        "measured": began.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - clock, 1),
        "load": round(load, 2),
        "data": data,
    }
    # What is shown now must be what a reader of the file will see: go through JSON at once.
    plain: Record = json.loads(json.dumps(record, allow_nan=False))
    return plain


def explain(record: Mapping[str, Any]) -> Explanation:
    """Words, pictures and numbers of a record; a DataError where it is not one."""
    _check(record)
    topic = find(str(record["topic"]))
    data: Data = record["data"]
    try:
        return Explanation(dict(record), topic, topic.words(data), topic.picture(data), topic.table(data))
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        AssertionError,
    ) as error:
        kind = type(error).__name__
        raise DataError(
            f"the record's data do not fit the topic {topic.name} ({kind}: {error}); measure again with `rush explain {topic.name}`."
        ) from None


def read(path: Path) -> Record:
    """A record from a file, checked."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{path} is larger than any record of rush explain; give the explain.json it wrote."
            )
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecipeError(
            f"no record at {path}; give the explain.json that `rush explain TOPIC` wrote."
        ) from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder; give the explain.json in it.") from None
    except PermissionError:
        raise RecipeError(f"{path} may not be read by this user; change its permissions.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({error}); give the explain.json that `rush explain TOPIC` wrote."
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a record of rush explain; give the explain.json it wrote.")
    _check(found)
    return found


def _check(record: Mapping[str, Any]) -> None:
    shape: dict[str, type | tuple[type, ...]] = {
        "topic": str,
        "device": str,
        "quick": bool,
        "machine": dict,
        "data": dict,
        "measured": str,
        "seconds": (int, float),
    }
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        raise DataError(
            f"this is no record of rush explain of version {VERSION}; measure again, or use the rush that wrote it."
        )
    wrong = [key for key, kind in shape.items() if not isinstance(record.get(key), kind)]
    if not wrong and not isinstance(record["machine"].get("summary"), str):
        wrong.append("machine")
    if record.get("load") is not None and not isinstance(record["load"], int | float):
        wrong.append("load")
    if wrong:
        raise DataError(f"the record lacks {wrong[0]!r} or has it in another form; measure again.")
    _check_numbers(dict(record), "record", 0)


def _check_numbers(value: Any, where: str, depth: int) -> None:
    if depth > 12:
        raise DataError(f"{where} is nested too deeply for a record of rush explain.")
    if isinstance(value, dict):
        for key, part in value.items():
            _check_numbers(part, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _check_numbers(part, f"{where}[{index}]", depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= LARGEST:
        raise DataError(f"{where} is no number that can be drawn; measure again.")
