"""Preparation as datatrove blocks: read units, tokenize, write shards, merge.

Blocks pass datatrove's documents, so that its filters can be inserted. This module imports datatrove, whose classes it
subclasses: import it only with the `corpus` extra (`rush.data.pipeline` does).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from datatrove.data import Document as TroveDocument
from datatrove.pipeline.base import PipelineStep

from rush.data.preparation_unit import UnitJob, encoded_documents, write_unit
from rush.data.prepare import Workspace, finish
from rush.data.readers import Document
from rush.data.sources import read_unit
from rush.data.storage import folder_lock
from rush.data.tokenizer import Tokenizer


def jobs_of(jobs: tuple[UnitJob, ...], rank: int, world_size: int) -> list[UnitJob]:
    """The unfinished units of a rank; units are assigned round-robin."""
    return [job for job in jobs[rank::world_size] if not job.done]


class ReadUnits(PipelineStep):  # type: ignore[misc]
    name = "units of the source"
    type = "rush reader"

    def __init__(self, jobs: tuple[UnitJob, ...]) -> None:
        super().__init__()
        self.jobs = jobs

    def run(
        self, data: Iterable[TroveDocument] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[TroveDocument]:
        for job in jobs_of(self.jobs, rank, world_size):
            for document in read_unit(job.unit, job.text_field):
                self.stat_update("documents")
                yield TroveDocument(document.text, document.id, metadata={"unit": job.unit.index})


class TokenizeDocuments(PipelineStep):  # type: ignore[misc]
    name = "tokenize"
    type = "rush tokenizer"

    def __init__(self, tokenizer_folder: str) -> None:
        super().__init__()
        self.tokenizer_folder = tokenizer_folder

    def run(
        self, data: Iterable[TroveDocument] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[TroveDocument]:
        tokenizer = Tokenizer.load(self.tokenizer_folder)
        incoming, copy = itertools.tee(data or ())
        documents = (Document(document.text, document.id) for document in copy)
        pairs = encoded_documents(documents, tokenizer)
        for document, (_, ids) in zip(incoming, pairs, strict=True):
            document.metadata["ids"] = ids
            self.stat_update("tokens", value=len(ids))
            yield document


class WriteShards(PipelineStep):  # type: ignore[misc]
    name = "token shards"
    type = "rush writer"

    def __init__(self, jobs: tuple[UnitJob, ...], eos_id: int) -> None:
        super().__init__()
        self.jobs = jobs
        self.eos_id = eos_id

    def run(
        self, data: Iterable[TroveDocument] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[TroveDocument]:
        pending = jobs_of(self.jobs, rank, world_size)
        groups = itertools.groupby(data or (), key=lambda document: document.metadata["unit"])
        for index, group in groups:
            while pending[0].unit.index != index:  # a unit without documents
                self._write(pending.pop(0), ())
            self._write(pending.pop(0), group)
        for job in pending:
            self._write(job, ())
        yield from ()

    def _write(self, job: UnitJob, group: Iterable[TroveDocument]) -> None:
        pairs = ((Document(document.text, document.id), document.metadata["ids"]) for document in group)
        for shard in write_unit(job, self.eos_id, pairs):
            self.stat_update("shards")
            self.stat_update("documents", value=shard.documents)


class MergeManifest(PipelineStep):  # type: ignore[misc]
    """The last job on a cluster, after all ranks."""

    name = "manifest"
    type = "rush merger"

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.workspace = workspace

    def run(
        self, data: Iterable[TroveDocument] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[TroveDocument]:
        with folder_lock(self.workspace.folder, wait=True):
            finish(self.workspace)
        yield from ()
