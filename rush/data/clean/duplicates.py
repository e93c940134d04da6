"""Exact and near deduplication with datatrove's blocks.

Every unit writes sorted signatures of its documents. The signatures of all units are merged to find duplicates, which the next
pass removes; the first document in the order of the input is kept. Memory holds one unit's signatures, or a few of every unit
during the merge; for near duplicates also some 0.5 kB per duplicate while they are clustered.

Exact duplicates have equal 64-bit hashes. Near duplicates have equal MinHash values in at least one bucket: two documents that
share a fraction s of their word n-grams match with probability 1 − (1 − s^hashes)^buckets. Matches are not compared again.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.text import TextNormConfig, ngrams, simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

from rush.data.clean.fields import value_at
from rush.data.clean.filters import StageFilter
from rush.data.clean.removal import Example, Removals, save_array
from rush.data.clean.row_files import FileRow, load_inputs, place_name
from rush.data.clean.stages import ExactDuplicates, NearDuplicates
from rush.data.pipeline import exit_with_parent

SHINGLES_AT_ONCE = 4096
LAST_PRIORITY = 65535


class PickKey(StageFilter):
    """Sets the text to compare; removes a row only where a field is missing."""

    stage: ExactDuplicates

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        fields = self.stage.fields or [self.pipeline_text]
        values = [row.values if field == "*" else value_at(row.values, field) for field in fields]
        compared = _normalized(values, self.stage.ignore_case, self.stage.ignore_space)
        document.text = json.dumps(compared, ensure_ascii=False, sort_keys=True, default=str)
        return None


def _normalized(value: Any, case: bool, space: bool) -> Any:
    """`value` without differences in case or white space, as configured."""
    if isinstance(value, str):
        value = value.casefold() if case else value
        return " ".join(value.split()) if space else value
    if isinstance(value, list):
        return [_normalized(inner, case, space) for inner in value]
    if isinstance(value, dict):
        return {key: _normalized(inner, case, space) for key, inner in value.items()}
    return value


def key_of(document: Document) -> bytes:
    """As bytes, for the hash."""
    return str(document.text).encode()


def earlier_first(document: Document) -> int:
    """datatrove keeps the document with the highest priority, and within a unit the first: earlier units have priority."""
    return max(LAST_PRIORITY - int(document.metadata["unit"]), 1)


def exact_config() -> ExactDedupConfig:
    return ExactDedupConfig(content_getter=key_of, document_priority=earlier_first)


class ExactSignatures(ExactDedupSignature):  # type: ignore[misc]
    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        super().run(_of_unit(data or (), rank), rank, world_size)
        yield from ()


def _of_unit(data: Iterable[Document], unit: int) -> Iterator[Document]:
    for document in data:
        document.metadata["unit"] = unit
        yield document


class FindExact(ExactFindDedups):  # type: ignore[misc]
    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        exit_with_parent()
        open_many_files()
        super().run(data, rank, world_size)
        yield from ()


class ExactRemovals(Removals):
    def explained(self, example: Example, number: int) -> Example:
        return example if example.reason else replace(example, reason="the same as an earlier document")


def exact_filter(found: str, removals: Removals) -> ExactDedupFilter:
    Path(found).mkdir(parents=True, exist_ok=True)
    return ExactDedupFilter(found, exact_config(), exclusion_writer=removals)


class PickText(StageFilter):
    """Sets the text to compare; removes a row only where the field is missing."""

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        document.text = self.text(row)
        return None


class WhitespaceTokenizer(WordTokenizer):  # type: ignore[misc]
    """Words separated by white space: no model to load, the same on every machine."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return text.splitlines()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


def near_config(stage: NearDuplicates) -> MinhashConfig:
    return MinhashConfig(
        n_grams=stage.ngram,
        num_buckets=stage.buckets,
        hashes_per_bucket=stage.hashes_per_bucket,
        seed=stage.seed,
        # datatrove's default maps every number to 0, so that "3 + 4" and "5 + 6" are equal.
        norm_config=TextNormConfig(norm_numbers=stage.ignore_numbers),
    )


class NearSignatures(MinhashDedupSignature):  # type: ignore[misc]
    """datatrove's MinHash signatures, computed in chunks, and the position of each document."""

    def __init__(self, signatures: str, places: str, stage: NearDuplicates) -> None:
        super().__init__(signatures, near_config(stage), language=WhitespaceTokenizer())
        self.places = places

    def get_signature(self, shingles: npt.NDArray[np.uint64]) -> list[list[int]]:
        """The minimum over all shingles, in chunks: a long document would take a kilobyte per word."""
        starts = range(0, len(shingles), SHINGLES_AT_ONCE)
        pieces: list[list[list[int]]] = [
            super(NearSignatures, self).get_signature(shingles[at : at + SHINGLES_AT_ONCE]) for at in starts
        ]
        if len(pieces) == 1:
            return pieces[0]
        return [np.min(bucket, axis=0).tolist() for bucket in zip(*pieces, strict=True)]

    def get_shingles(self, text: str) -> npt.NDArray[np.uint64]:
        # Removing diacritics goes letter by letter, a quarter of the time; ASCII has none.
        norm = self.config.norm_config
        norm = replace(norm, norm_unicode_diacritics=False) if text.isascii() else norm
        words = self.word_tokenizer.word_tokenize(simplify_text(text, norm))
        hashes = (self._hash_func(" ".join(gram).encode()) for gram in ngrams(words, self.config.n_grams))
        return np.fromiter(hashes, dtype=np.uint64).reshape((-1, 1))

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        places: list[tuple[int, int]] = []
        super().run(_record_places(data or (), places), rank, world_size)
        save_array(Path(self.places) / f"{rank:05d}.npy", np.array(places, dtype=np.int64).reshape(-1, 2))
        yield from ()


def _record_places(data: Iterable[Document], places: list[tuple[int, int]]) -> Iterator[Document]:
    for document in data:
        places.append(document.metadata["row"].place)
        yield document


class NearBuckets(MinhashDedupBuckets):  # type: ignore[misc]
    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        exit_with_parent()
        open_many_files()
        super().run(data, rank, world_size)
        yield from ()


def cluster(pairs: str, clusters: str, stage: NearDuplicates) -> MinhashDedupCluster:
    return MinhashDedupCluster(pairs, clusters, near_config(stage), save_cluster_id=True)


class KeepFirst(PipelineStep):  # type: ignore[misc]
    """Keeps the first document of each cluster and removes the others; datatrove itself would keep an arbitrary one."""

    name = "first of each cluster"
    type = "rush dedup"

    def __init__(self, clusters: str, remove: str, num_units: int) -> None:
        super().__init__()
        self.clusters = clusters
        self.remove = remove
        self.num_units = num_units

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        first: dict[int, tuple[int, int]] = {}
        folder = Path(self.remove)
        folder.mkdir(parents=True, exist_ok=True)
        for unit in range(self.num_units):
            path = Path(self.clusters) / f"{unit:06d}.clusters"
            if not path.is_file():
                continue
            duplicates = []
            for document, number in np.fromfile(path, dtype="<u4").reshape(-1, 2).tolist():
                kept = first.setdefault(number, (unit, document))
                if kept != (unit, document):
                    duplicates.append((document, *kept))
            table = np.array(duplicates, dtype=np.int64).reshape(-1, 3)
            save_array(folder / f"{unit:06d}.npy", table)
            table[:, 0].astype("<u4").tofile(folder / f"{unit:06d}.remove")
            self.stat_update("removed", value=len(duplicates))
        yield from ()


class NearRemovals(Removals):
    """Adds the document that was kept to the reason of each example."""

    def __init__(self, folder: str, examples: int, remove: str, places: str, inputs_file: str) -> None:
        super().__init__(folder, examples)
        self.remove = remove
        self.places = places
        self.inputs_file = inputs_file

    def explained(self, example: Example, number: int) -> Example:
        if example.reason:
            return example
        table = np.load(Path(self.remove) / f"{self.unit:06d}.npy", mmap_mode="r", allow_pickle=False)
        _, unit, document = table[number].tolist()
        places = np.load(Path(self.places) / f"{unit:05d}.npy", mmap_mode="r", allow_pickle=False)
        piece, at = places[document].tolist()
        inputs = load_inputs(self.inputs_file)
        return replace(
            example, reason=f"much like {place_name(inputs.units[unit][piece], inputs.labels, at)}"
        )


def near_filter(remove: str, removals: Removals) -> MinhashDedupFilter:
    return MinhashDedupFilter(remove, exclusion_writer=removals)


def open_many_files() -> None:
    """Raise the limit of open files: the merge reads the signatures of all units at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
