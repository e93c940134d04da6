"""Sources of rows: files, datasets on the hub, or the standard library's docstrings and sources.

Units are those of corpus preparation and depend on the files alone, so the result does not depend on the number of workers. A
few datasets have short names; with `data.files`, local copies in the same schema are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rush.data.conversations.docstrings import VERSION, docstring_pairs, docstring_questions
from rush.data.conversations.readings import reading_pairs, readings
from rush.data.hub_client import Note
from rush.data.hub_datasets import ALLOWED, read_hub_rows
from rush.data.readers import Slice, read_rows, read_slice
from rush.data.sources import (
    HUB_SOURCES,
    LOCAL_SOURCES,
    Unit,
    describe_source,
    find_dataset,
    pinned_source,
    plan_units,
)
from rush.errors import RecipeError, nearest

# Known datasets: name, config and split on the hub.
HUB_CONVERSATIONS = {
    "ultrachat": "hub:HuggingFaceH4/ultrachat_200k::train_sft",
    "ultrafeedback": "hub:HuggingFaceH4/ultrafeedback_binarized::train_prefs",
}
DOCSTRINGS = {
    "python-docstrings": docstring_questions,
    "python-docstring-pairs": docstring_pairs,
    "python-readings": readings,
    "python-reading-pairs": reading_pairs,
}


@dataclass(frozen=True)
class Row:
    name: str
    """File and line, or another identifier."""
    values: dict[str, Any]
    group: str | None = None
    """Rows of one group are in the same split; None: by the sample."""


def describe_rows(source: str, files: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Identifies a source without reading it."""
    described = describe_source(*_origin(source, files), limit=limit)
    return described | {
        "source": source.split("@")[0],
        "generator": VERSION if source in DOCSTRINGS else None,
    }


def plan_rows(source: str, files: Sequence[str], limit: int | None) -> list[tuple[Unit, int | None]]:
    """The units of a source, each with its number of rows to read (None: all)."""
    origin, origin_files = _origin(source, files)
    if not origin_files and find_dataset(origin) is not None:
        return [(unit, None) for unit in plan_units(origin, origin_files, limit=limit)]
    units = plan_units(origin, origin_files)
    if limit is None:
        return [(unit, None) for unit in units]
    taken: list[tuple[Unit, int | None]] = []
    left = limit
    for unit in units:
        count = sum(1 for _ in read_unit_rows(source, unit, left))
        taken.append((unit, count))
        left -= count
        if left == 0:
            break
    return taken


def read_unit_rows(source: str, unit: Unit, take: int | None = None) -> Iterator[Row]:
    """The rows of a unit in order, at most `take`."""
    count = 0
    for piece in unit.slices:
        for row in _rows(source, piece):
            if take is not None and count >= take:
                return
            yield row
            count += 1


def _rows(source: str, piece: Slice) -> Iterator[Row]:
    if source in DOCSTRINGS:
        yield from (Row(name, values, group) for name, values, group in DOCSTRINGS[source](piece.path))
    elif piece.kind == "hub":
        yield from (Row(name, values) for name, values in read_hub_rows(piece))
    elif piece.kind in ("text", "python"):
        yield from (Row(document.id, {"text": document.text}) for document in read_slice(piece, "text"))
    else:
        yield from (Row(name, values) for name, values in read_rows(piece))


def _origin(source: str, files: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The source for corpus preparation."""
    if source in DOCSTRINGS:
        if files:
            raise RecipeError(f"data.source is {source!r} but data.files is given; set data.source='files'.")
        return "python-stdlib", ()
    name, _, revision = source.partition("@")
    if name in HUB_CONVERSATIONS:
        dataset, *rest = HUB_CONVERSATIONS[name].removeprefix("hub:").split(":")
        whole = ":".join([f"hub:{dataset}" + (f"@{revision}" if revision else ""), *rest])
        return ("files", files) if files else (whole, ())
    if source not in LOCAL_SOURCES and find_dataset(source) is None:
        allowed = [*LOCAL_SOURCES, *HUB_SOURCES, *DOCSTRINGS, *HUB_CONVERSATIONS, ALLOWED]
        raise RecipeError(f"Unknown data.source {source!r}: {nearest(source, allowed)}")
    return source, files


def pinned_rows(source: str, files: Sequence[str], note: Note) -> str:
    """A source with the commit of its dataset on the hub, as `pinned_source`."""
    if files or source in DOCSTRINGS:
        return source
    name = source.split("@")[0]
    if name not in HUB_CONVERSATIONS:
        return pinned_source(source, files, note)
    return f"{name}@{pinned_source(_origin(source, ())[0], (), note).split('@')[1].split(':')[0]}"
