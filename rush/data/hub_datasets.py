"""Streamed datasets of the Hugging Face hub.

Each file of a dataset is a unit of work, so that several workers stream at once. A limit is divided among all files, which is
more representative than the first file. Offline, `data.files` with the dataset's name as the source reads downloaded files and
gives the same documents.

A dataset that is a loading script (code, which `datasets` runs no longer) is read in the Parquet form that the hub makes of it, on
the branch `refs/convert/parquet`: CONFIG/SPLIT/0000.parquet and so on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rush.data.hub_client import HubId, Note, hub_api, offline, parse_id, pinned, sentence
from rush.data.readers import Document, Slice, as_document, import_extra, missing_field
from rush.errors import DataError, MachineError, RecipeError, RushError
from rush.files import writing

CONVERTED = "refs/convert/parquet"
ALLOWED = "hub:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]"


@dataclass(frozen=True)
class HubDataset:
    name: str
    config: str | None = None
    split: str = "train"
    columns: tuple[str, ...] = ()  # as published; for a message, and for local copies
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubDataset:
        """From `owner/name[@revision][:config[:split]]`; an empty config is the dataset's default one."""
        named, config, split, *more = [*text.split(":"), "", ""]
        name, _, revision = named.partition("@")
        if not name or any(more) or named.endswith("@"):
            raise RecipeError(f"Cannot read the data.source 'hub:{text}'. Allowed: {ALLOWED}.")
        return cls(name, config or None, split or "train", revision=revision or None)

    @property
    def repository(self) -> HubId:
        return HubId(self.name, self.revision, "dataset")

    @property
    def local(self) -> bool:
        """Whether it is a folder in a dataset's layout on this machine."""
        return os.path.isdir(self.name)

    def __str__(self) -> str:
        return f"{self.repository}:{self.config or ''}:{self.split}"


def dataset_named(source: str) -> HubDataset | None:
    """The dataset of `hub:OWNER/NAME…`, or of a plain `OWNER/NAME…`; None for the name of another source."""
    if source.startswith("hub:"):
        return HubDataset.parse(source.removeprefix("hub:"))
    return HubDataset.parse(source) if parse_id(source.split(":")[0], "dataset") else None


def at_commit(dataset: HubDataset, note: Note = lambda text: None) -> HubDataset:
    """The same at the commit that its revision means now; of a loading script, at that of its Parquet form."""
    if dataset.local or dataset.repository.commit is not None:
        return dataset
    if dataset.revision is None and offline():
        try:  # where it was a script when the hub was last asked, only this reference is known
            return replace(dataset, revision=pinned(replace(dataset.repository, revision=CONVERTED)).revision)
        except MachineError:
            pass
    found = replace(dataset, revision=pinned(dataset.repository, note).revision)
    if offline() or not _is_script(found):
        return found
    converted = replace(dataset, revision=CONVERTED)
    try:
        return replace(dataset, revision=pinned(converted.repository, note).revision)
    except DataError as error:
        raise DataError(
            f"The dataset {dataset.name} is a loading script, which is not executed, and the hub has no Parquet form of it. Download "
            "and convert it to Parquet or JSONL, and give the files as data.files."
        ) from error


def hub_slices(dataset: HubDataset, limit: int | None) -> list[Slice]:
    """One slice per file of the dataset; file `start` of `stop`."""
    with explained(dataset):
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
    with explained(dataset):
        stream = _open_stream(dataset).shard(num_shards=piece.stop, index=piece.start)
        if piece.take is not None:
            stream = stream.take(piece.take)
        for row_number, row in enumerate(stream):
            yield f"{dataset.name}:{piece.start}:row {row_number}", row


def _open_stream(dataset: HubDataset) -> Any:
    datasets = import_extra("datasets", "hub", f"Streaming {dataset.name}")
    if offline() and not dataset.local:
        raise MachineError(_advice(dataset, "HF_HUB_OFFLINE is set"))
    options: dict[str, Any] = {"split": dataset.split, "streaming": True}
    if dataset.local:
        return datasets.load_dataset(dataset.name, dataset.config, **options)
    files = _files(dataset.repository)
    if _is_converted(files):
        chosen = _converted_files(dataset, files)
        urls = [f"hf://datasets/{dataset.repository}/{path}" for path in chosen]
        return datasets.load_dataset("parquet", data_files={dataset.split: urls}, **options)
    return datasets.load_dataset(dataset.name, dataset.config, revision=dataset.revision, **options)


@cache
def _files(repo: HubId) -> tuple[str, ...]:
    """The paths of all files of a dataset."""
    return tuple(hub_api().list_repo_files(repo.name, repo_type="dataset", revision=repo.revision))


def _is_script(dataset: HubDataset) -> bool:
    with explained(dataset):
        files = _files(dataset.repository)
    return f"{dataset.name.split('/')[-1]}.py" in files


def _is_converted(files: tuple[str, ...]) -> bool:
    """Whether these are the files of a Parquet form: CONFIG/SPLIT/0000.parquet."""
    seen = [path for path in files if not path.startswith(".")]
    return bool(seen) and all(path.endswith(".parquet") and path.count("/") == 2 for path in seen)


def _converted_files(dataset: HubDataset, files: tuple[str, ...]) -> list[str]:
    """The Parquet files of a config and a split. For a very large dataset the hub converts only a part."""
    parts = {path: path.split("/") for path in sorted(files) if path.endswith(".parquet")}
    configs = sorted({config for config, _, _ in parts.values()})
    config = dataset.config or ("default" if "default" in configs else configs[0])
    if config not in configs or (dataset.config is None and len(configs) > 1 and "default" not in configs):
        raise DataError(
            f"The dataset {dataset.name} has the configs {', '.join(configs)}; found {dataset.config!r}. Name one: "
            f"hub:{dataset.repository}:CONFIG."
        )
    splits = {split.removeprefix("partial-") for one, split, _ in parts.values() if one == config}
    if dataset.split not in splits:
        raise DataError(
            f"The dataset {dataset.name} has the splits {', '.join(sorted(splits))} in {config}; found {dataset.split!r}. Name one: "
            f"hub:{dataset.repository}:{config}:SPLIT."
        )
    return [
        path
        for path, (one, split, _) in parts.items()
        if one == config and split.removeprefix("partial-") == dataset.split
    ]


@contextmanager
def explained(dataset: HubDataset) -> Iterator[None]:
    """Errors of the hub's libraries as one sentence: 4 where this machine or the hub cannot, 3 where the data is wrong."""
    try:
        with writing(_cache(), "the cache of datasets in ", "Free space, or set HF_HOME to another disk."):
            yield
    except RushError:
        raise
    except Exception as error:
        raise _problem(dataset, error) from error


def _cache() -> Any:
    from rush.data.hub_client import cache_dir

    return cache_dir().parent


def _problem(dataset: HubDataset, error: Exception) -> Exception:
    known = None if dataset.local else sentence(error, dataset.repository)
    if known is not None:
        return known
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if type(error).__module__.split(".")[0] == "pyarrow" or "Arrow" in type(error).__name__:
        return DataError(
            f"The dataset {dataset}: a Parquet file is damaged ({reason}). Try another revision."
        )
    if isinstance(error, OSError | ValueError | RuntimeError):
        # Unknown configs and splits, no data files, files that are not what their names say.
        return DataError(_advice(dataset, reason))
    return error


def _advice(dataset: HubDataset, reason: str) -> str:
    columns = f" (columns {', '.join(dataset.columns)})" if dataset.columns else ""
    return (
        f"Cannot open the dataset {dataset} on the Hugging Face hub: {reason}. "
        f"Check the name and the connection, or download its files{columns} elsewhere "
        "and give them here as data.files."
    )
