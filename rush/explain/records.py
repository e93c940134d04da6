"""Explanations: measured now or read from a record, and everything that is shown of one, made from the record alone."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rush.errors import DataError, RecipeError
from rush.explain import find
from rush.explain.topic import ExplainSettings, Topic, TopicTable
from rush.files import parse_json, read_file
from rush.hardware.conditions import load_now
from rush.records.explain import EXPLAIN, FORMAT, ExplainRecord
from rush.report.panels import Panel

MOST_BYTES = 2**25
BUSY = 0.75
"""Load average per core above which the processor was not ours alone when the measuring began."""


@dataclass(frozen=True)
class Explanation:
    """A record and everything shown of it."""

    record: ExplainRecord
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
        load = self.record.get("load")
        if load is not None and load > BUSY:
            return "Other programs were computing when this was measured; times may be too long and intervals too narrow."
        return None


def make(topic: Topic, settings: ExplainSettings) -> ExplainRecord:
    """Measure a topic now."""
    machine, load = settings.machine, load_now(settings.machine)
    began, clock = datetime.now(UTC), time.perf_counter()
    data = topic.measure(settings)
    record: ExplainRecord = {
        "format": FORMAT,
        "version": 1,
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
    plain: ExplainRecord = json.loads(json.dumps(record, allow_nan=False))
    return plain


def explain(record: ExplainRecord) -> Explanation:
    """Words, charts and numbers of a record; a DataError where it is not one."""
    EXPLAIN.check(record, "the record")
    topic, data = find(record["topic"]), record["data"]
    import numpy as np

    try:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            return Explanation(record, topic, topic.words(data), topic.picture(data), topic.table(data))
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        StopIteration,
    ) as error:
        kind = type(error).__name__
        raise DataError(
            f"the record's data do not fit the topic {topic.name} ({kind}: {error}); measure again with `rush explain {topic.name}`."
        ) from None


def read(path: Path) -> ExplainRecord:
    """A record from a file, checked."""
    try:
        found = parse_json(read_file(path, MOST_BYTES))
    except FileNotFoundError:
        raise RecipeError(
            f"no record at {path}; give the explain.json that `rush explain TOPIC` wrote."
        ) from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder; give the explain.json in it.") from None
    except PermissionError:
        raise RecipeError(f"{path} may not be read by this user; change its permissions.") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}); give an explain.json.") from None
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON ({error}); give the explain.json that `rush explain TOPIC` wrote."
        ) from None
    EXPLAIN.check(found, str(path))
    record: ExplainRecord = found
    return record
