"""Streamed datasets of the Hugging Face hub.

Each file of a dataset is a unit of work, so that several workers stream at once. A limit is divided among all files, which is
more representative than the first file. Offline, `data.files` with the dataset's name as the source reads downloaded files and
gives the same documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rush.data.readers import Document, Slice, as_document, import_extra, missing_field
from rush.errors import DataError, MachineError, RecipeError


@dataclass(frozen=True)
class HubDataset:
    name: str
    config: str | None = None
    split: str = "train"
    columns: tuple[str, ...] = ()  # as published; for a message, and for local copies

    @classmethod
    def parse(cls, text: str) -> HubDataset:
        """From `owner/name[:config[:split]]`; an empty config is the dataset's default one."""
        name, config, split, *more = [*text.split(":"), "", ""]
        if not name or any(more):
            raise RecipeError(
                f"Cannot read the data.source 'hub:{text}'. Allowed: hub:OWNER/NAME[:CONFIG[:SPLIT]]."
            )
        return cls(name, config or None, split or "train")

    def __str__(self) -> str:
        return f"{self.name}:{self.config or ''}:{self.split}"


def hub_slices(dataset: HubDataset, limit: int | None) -> list[Slice]:
    """One slice per file of the dataset; file `start` of `stop`."""
    shards = max(int(_open_stream(dataset).num_shards), 1)
    if limit is None:
        return [Slice("hub", str(dataset), index, shards) for index in range(shards)]
    shares = [limit // shards + (index < limit % shards) for index in range(shards)]
    return [Slice("hub", str(dataset), index, shards, take=take) for index, take in enumerate(shares) if take]


def read_hub_slice(piece: Slice, text_field: str) -> Iterator[Document]:
    for name, row in read_hub_rows(piece):
        if text_field not in row:
            raise DataError(missing_field(name, text_field, list(row)))
        yield from as_document(row[text_field], name)


def read_hub_rows(piece: Slice) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one shard of a stream, with their names."""
    dataset = HubDataset.parse(piece.path)
    stream = _open_stream(dataset).shard(num_shards=piece.stop, index=piece.start)
    if piece.take is not None:
        stream = stream.take(piece.take)
    for row_number, row in enumerate(stream):
        yield f"{dataset.name}:{piece.start}:row {row_number}", row


def _open_stream(dataset: HubDataset) -> Any:
    datasets = import_extra("datasets", "hub", f"Streaming {dataset.name}")
    if os.environ.get("HF_HUB_OFFLINE") == "1" and not os.path.isdir(dataset.name):
        raise MachineError(_advice(dataset, "HF_HUB_OFFLINE is set"))
    try:
        return datasets.load_dataset(dataset.name, dataset.config, split=dataset.split, streaming=True)
    except (OSError, ValueError) as error:
        # Connection failures are OSErrors; unknown names, configs and splits are OSErrors or ValueErrors.
        raise MachineError(_advice(dataset, str(error).strip().splitlines()[0])) from error


def _advice(dataset: HubDataset, reason: str) -> str:
    columns = f" (columns {', '.join(dataset.columns)})" if dataset.columns else ""
    return (
        f"Cannot open the dataset {dataset} on the Hugging Face hub: {reason}. "
        f"Check the name and the connection, or download its files{columns} elsewhere "
        "and give them here as data.files."
    )
