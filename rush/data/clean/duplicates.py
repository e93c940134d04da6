"""Duplicates, exact and near, by datatrove's own blocks.

Both work in the same moves: every unit writes signatures of its documents, sorted; the signatures of all
units are merged and those that meet are noted; on the next reading the noted documents go. What stays is the
first document, in the order of the input. Memory holds one unit's signatures, or a few of every unit while they are
merged; for near duplicates also some 0.5 kB for each document that has one, while they are clustered.

Exact means equal 64-bit hashes. Near means equal MinHash values in at least one bucket: two documents that
share a fraction s of their word n-grams meet with probability 1 − (1 − s^hashes)^buckets, and are not compared again.
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
from rush.data.clean.removal import Example, Removals
from rush.data.clean.row_files import FileRow, load_inputs, place_name
from rush.data.clean.stages import ExactDuplicates, NearDuplicates
from rush.data.pipeline import leave_with_parent
from rush.files import replacing

SHINGLES_AT_ONCE = 4096
LAST_PRIORITY = 65535


class PickKey(StageFilter):
    """Puts what is compared exactly into the document; drops only where a field is missing."""

    stage: ExactDuplicates

    def judge(self, row: FileRow, document: Document) -> str | None:
        fields = self.stage.fields or [self.pipeline_text]
        values = [row.values if field == "*" else value_at(row.values, field) for field in fields]
        compared = _alike(values, self.stage.ignore_case, self.stage.ignore_space)
        document.text = json.dumps(compared, ensure_ascii=False, sort_keys=True, default=str)
        return None


def _alike(value: Any, case: bool, space: bool) -> Any:
    """`value` without what two equal documents may differ in."""
    if isinstance(value, str):
        value = value.casefold() if case else value
        return " ".join(value.split()) if space else value
    if isinstance(value, list):
        return [_alike(inner, case, space) for inner in value]
    if isinstance(value, dict):
        return {key: _alike(inner, case, space) for key, inner in value.items()}
    return value


def key_of(document: Document) -> bytes:
    """As bytes, because the hash takes nothing else."""
    return str(document.text).encode()


def earlier_first(document: Document) -> int:
    """datatrove keeps the highest priority, and within a unit the first; so earlier units go before later ones."""
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
        leave_with_parent()
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
    """Puts the text to compare into the document; drops only where the field is missing."""

    def judge(self, row: FileRow, document: Document) -> str | None:
        document.text = self.text(row)
        return None


class Spaces(WordTokenizer):  # type: ignore[misc]
    """Words are what stands between spaces: no model to load, the same on every machine."""

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
        # datatrove reads every number as 0; "3 + 4" and "5 + 6" are then the same question.
        norm_config=TextNormConfig(norm_numbers=stage.ignore_numbers),
    )


class NearSignatures(MinhashDedupSignature):  # type: ignore[misc]
    """datatrove's signatures, with long documents taken in pieces, and a note of where each document stood."""

    def __init__(self, signatures: str, places: str, stage: NearDuplicates) -> None:
        super().__init__(signatures, near_config(stage), language=Spaces())
        self.places = places

    def get_signature(self, shingles: npt.NDArray[np.uint64]) -> list[list[int]]:
        """The minimum over all shingles; piece by piece, or a book would take a kilobyte for every word of it."""
        starts = range(0, len(shingles), SHINGLES_AT_ONCE)
        pieces: list[list[list[int]]] = [
            super(NearSignatures, self).get_signature(shingles[at : at + SHINGLES_AT_ONCE]) for at in starts
        ]
        if len(pieces) == 1:
            return pieces[0]
        return [np.min(bucket, axis=0).tolist() for bucket in zip(*pieces, strict=True)]

    def get_shingles(self, text: str) -> npt.NDArray[np.uint64]:
        # Taking accents off goes letter by letter; where there are none to take off, it is a quarter of the work.
        norm = self.config.norm_config
        norm = replace(norm, norm_unicode_diacritics=False) if text.isascii() else norm
        words = self.word_tokenizer.word_tokenize(simplify_text(text, norm))
        hashes = (self._hash_func(" ".join(gram).encode()) for gram in ngrams(words, self.config.n_grams))
        return np.fromiter(hashes, dtype=np.uint64).reshape((-1, 1))

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        places: list[tuple[int, int]] = []
        super().run(_noting(data or (), places), rank, world_size)
        _save(Path(self.places) / f"{rank:05d}.npy", np.array(places, dtype=np.int64).reshape(-1, 2))
        yield from ()


def _noting(data: Iterable[Document], places: list[tuple[int, int]]) -> Iterator[Document]:
    for document in data:
        places.append(document.metadata["row"].place)
        yield document


class NearBuckets(MinhashDedupBuckets):  # type: ignore[misc]
    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        leave_with_parent()
        open_many_files()
        super().run(data, rank, world_size)
        yield from ()


def cluster(pairs: str, clusters: str, stage: NearDuplicates) -> MinhashDedupCluster:
    return MinhashDedupCluster(pairs, clusters, near_config(stage), save_cluster_id=True)


class KeepFirst(PipelineStep):  # type: ignore[misc]
    """From clusters to what goes: all but the first of each. datatrove itself keeps whichever grew fastest."""

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
            gone = []
            for document, number in np.fromfile(path, dtype="<u4").reshape(-1, 2).tolist():
                kept = first.setdefault(number, (unit, document))
                if kept != (unit, document):
                    gone.append((document, *kept))
            table = np.array(gone, dtype=np.int64).reshape(-1, 3)
            _save(folder / f"{unit:06d}.npy", table)
            table[:, 0].astype("<u4").tofile(folder / f"{unit:06d}.remove")
            self.stat_update("removed", value=len(gone))
        yield from ()


class NearRemovals(Removals):
    """Names the document that stays for each example of one that goes."""

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
    """Merging reads the signatures of all units at once; the usual limit of open files is for interactive work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _save(path: Path, content: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, content)
