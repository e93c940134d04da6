"""The files of a checkpoint: one rank writes full tensors, several write their shards, and rank 0 commits.

Rank 0 makes the hidden folder, each rank reports through the store what it has written, and when all have, rank 0 adds the
small files and commits: manifest last, then one rename. So a checkpoint appears whole or not at all, whoever is killed. The
thread that writes uses no collective. A single rank writes one file per kind; several write pieces, and a table of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from rush.checkpoint.state import OptimizerTable, StateRecord, join_optimizers
from rush.checkpoint.tensor_names import dtype_name, save_tensors
from rush.files import write_atomic, write_json_atomic
from rush.parallel import Ranks
from rush.parallel.placement import TensorShard
from rush.parallel.store_channel import StoreChannel
from rush.records.checkpoint_manifest import FileEntry
from rush.records.checkpoint_pieces import (
    KINDS,
    PIECES,
    Kind,
    PieceTable,
    TensorPiece,
    TensorPieces,
    file_name,
    join_tables,
    problem_with,
    write_pieces,
)
from rush.records.checkpoint_store import CheckpointStore

RANDOM, STATE = "random.safetensors", "state.json"
NTH = "#"
"""Separates a tensor's name and the number of a piece, where a rank writes several pieces of one tensor."""
TORCH_KEY = "DCP_SHARDING_INFO"
"""Key of the file's header under which torch's safetensors checkpoints keep the offsets of pieces."""
OnCommit = Callable[[Path], None]
"""Called with the checkpoint's path once it is committed, before rank 0 reports it to the others."""


@dataclass(frozen=True)
class CheckpointContent:
    """What one save writes."""

    step: int
    number: int
    """Identifies this save in the store."""
    shards: dict[str, dict[str, TensorShard]]
    """This rank's shards of model and optimizer, by kind and name in the file."""
    tied: dict[str, str]
    optimizer: OptimizerTable
    state: StateRecord
    random: dict[str, Tensor]
    metrics: dict[str, float | None]

    @property
    def num_bytes(self) -> int:
        return sum(shard.values.nbytes for kind in self.shards.values() for shard in kind.values())


@dataclass(frozen=True)
class RankPart:
    """What one rank has written."""

    files: dict[str, FileEntry]
    tables: dict[Kind, PieceTable]
    optimizer: OptimizerTable | None
    """The optimizer's table, by the first rank of a pipeline stage."""


_PART = TypeAdapter(RankPart)


@dataclass(frozen=True)
class Writer:
    """Writes this rank's part of checkpoints; rank 0 also the files of all."""

    checkpoints: CheckpointStore
    ranks: Ranks
    check_abandoned: Callable[[], None]
    """Called between files; raises when the save is abandoned."""

    def write(self, content: CheckpointContent, on_commit: OnCommit) -> None:
        if self.ranks.alone:
            self._write_alone(content, on_commit)
        else:
            self._write_together(content, on_commit)

    # --- one rank ------------------------------------------------------------------------------------

    def _write_alone(self, content: CheckpointContent, on_commit: OnCommit) -> None:
        folder = self.checkpoints.begin(content.step)
        try:
            known: dict[str, FileEntry] = {}
            metadata = {"model": {"format": "pt", "tied": json.dumps(content.tied)}, "optimizer": {}}
            for kind in KINDS:
                self.check_abandoned()
                tensors = {name: shard.values for name, shard in content.shards[kind].items()}
                name = f"{kind}.safetensors"
                known[name] = save_tensors(folder / name, tensors, metadata[kind])
            on_commit(self._commit(content, folder, content.state, known))
        finally:
            # Once committed the hidden folder is gone and this does nothing.
            self.checkpoints.discard(content.step)

    def _commit(
        self, content: CheckpointContent, folder: Path, state: StateRecord, known: dict[str, FileEntry]
    ) -> Path:
        known[RANDOM] = save_tensors(folder / RANDOM, content.random, {})
        write_json_atomic(folder / STATE, state)
        self.check_abandoned()
        return self.checkpoints.commit(content.step, {"metrics": content.metrics}, known)

    # --- several ranks -------------------------------------------------------------------------------

    def _write_together(self, content: CheckpointContent, on_commit: OnCommit) -> None:
        """Rank 0 begins, all write, rank 0 commits; if one rank fails, all do."""
        assert self.ranks.store is not None
        channel = StoreChannel(self.ranks.store, f"save/{content.number}", self.check_abandoned)
        if not self.ranks.main:
            folder, part = Path(channel.receive("begun", acknowledge=True)), f"part/{self.ranks.rank}"
            try:
                channel.send(part, _PART.dump_python(self._write_part(content, folder), mode="json"))
            except BaseException as error:
                channel.send_error(part, error)
                channel.receive("committed", acknowledge=True)  # rank 0 reports this error to all
                raise
            on_commit(Path(channel.receive("committed", acknowledge=True)))
            return

        def commit() -> str:
            path = self._gather(content, Path(begun), channel)
            on_commit(path)
            return str(path)

        others = self.ranks.world - 1
        try:
            begun = channel.publish(
                "begun",
                lambda: str(self.checkpoints.begin(content.step)),
                receivers=others,
                wait_for_errors_only=True,
            )
            channel.publish("committed", commit, receivers=others)
        finally:
            self.checkpoints.discard(content.step)

    def _write_part(self, content: CheckpointContent, folder: Path) -> RankPart:
        """Write this rank's files; return their entries and piece tables."""
        files: dict[str, FileEntry] = {}
        tables: dict[Kind, PieceTable] = {}
        for kind in KINDS:
            self.check_abandoned()
            shards = content.shards[kind]
            name = file_name(kind, self.ranks.rank, self.ranks.world)
            offsets = {own: {"saved_offsets": list(shard.offset)} for own, shard in shards.items()}
            if shards:
                tensors = {own: shard.values for own, shard in shards.items()}
                metadata = {"format": "pt", TORCH_KEY: json.dumps(offsets)}
                files[name] = save_tensors(folder / name, tensors, metadata)
            joined = join_tables(_table_entry(key, shard, name) for key, shard in shards.items())
            tables[kind] = PieceTable(content.tied if kind == "model" else {}, joined.tensors)
        return RankPart(files, tables, content.optimizer if self.ranks.first_of_stage else None)

    def _gather(self, content: CheckpointContent, folder: Path, channel: StoreChannel) -> Path:
        """Write rank 0's part, wait for the others, and commit."""
        parts = [self._write_part(content, folder)]
        for rank in range(1, self.ranks.world):
            parts.append(_PART.validate_python(channel.receive(f"part/{rank}", sender=f"rank {rank}: ")))
            channel.delete(f"part/{rank}")
        known = {name: entry for part in parts for name, entry in part.files.items()}
        tables = {kind: join_tables(part.tables[kind] for part in parts) for kind in KINDS}
        for table in tables.values():
            for name, tensor in table.tensors.items():
                assert (problem := problem_with(tensor)) is None, f"{name}: {problem}"
        write_atomic(folder / PIECES, write_pieces(tables))
        optimizer = join_optimizers(part.optimizer for part in parts if part.optimizer is not None)
        return self._commit(content, folder, {**content.state, "optimizer": optimizer}, known)


def _table_entry(key: str, shard: TensorShard, file: str) -> PieceTable:
    name, nth, _ = key.partition(NTH)
    piece = TensorPiece(file, shard.offset, tuple(shard.values.shape), key if nth else "")
    return PieceTable({}, {name: TensorPieces(dtype_name(shard.values.dtype), shard.full_shape, (piece,))})
