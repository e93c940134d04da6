"""The files of a checkpoint: one rank writes whole tensors, several write their pieces, and rank 0 seals the whole.

Rank 0 makes the hidden folder, each rank says through the store what it has written, and when all have, rank 0 adds the small
files and seals: manifest last, then one rename. So a checkpoint appears whole or not at all, whoever is killed. A rank that
is alone writes whole tensors in one file for each kind; several write pieces, and a table of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rush.checkpoint.agreement import Meeting, failure
from rush.checkpoint.state import join_optimizers
from rush.checkpoint.tensor_names import dtype_name, save_tensors
from rush.files import write_atomic, write_json_atomic
from rush.parallel import Ranks
from rush.parallel.placement import TensorShard
from rush.records.checkpoint_manifest import FileEntry
from rush.records.checkpoint_pieces import (
    KINDS,
    PIECES,
    PieceTable,
    TensorPiece,
    TensorPieces,
    file_name,
    join_tables,
    problem_with,
    table_from_json,
    table_to_json,
    write_pieces,
)
from rush.records.checkpoint_store import CheckpointStore

RANDOM, STATE = "random.safetensors", "state.json"
NTH = "#"
"""Before the number of a piece, where a rank writes several of one tensor."""
TORCH_KEY = "DCP_SHARDING_INFO"
"""Where torch's own safetensors checkpoints say, in a file's header, at which offsets its pieces lie."""
OnCommit = Callable[[Path], None]
"""Told the checkpoint's path once it is sealed, before rank 0 tells the others."""


@dataclass(frozen=True)
class CheckpointContent:
    """What one save has to write."""

    step: int
    number: int
    """Of this save among all things that ranks tell each other."""
    parts: dict[str, dict[str, TensorShard]]
    """What this rank writes of model and optimizer, by kind and name in the file."""
    tied: dict[str, str]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    random: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(part.values.nbytes for kind in self.parts.values() for part in kind.values())


@dataclass(frozen=True)
class Writer:
    """Writes this rank's part of checkpoints; rank 0 also what is of all."""

    checkpoints: CheckpointStore
    ranks: Ranks
    go_on: Callable[[], None]
    """Called between files; raises when there is no time left for them."""

    def write(self, content: CheckpointContent, sealed: OnCommit) -> None:
        if self.ranks.alone:
            self._write_alone(content, sealed)
        else:
            self._write_together(content, sealed)

    # --- one rank ------------------------------------------------------------------------------------

    def _write_alone(self, content: CheckpointContent, sealed: OnCommit) -> None:
        folder = self.checkpoints.begin(content.step)
        try:
            known: dict[str, FileEntry] = {}
            metadata = {"model": {"format": "pt", "tied": json.dumps(content.tied)}, "optimizer": {}}
            for kind in KINDS:
                self.go_on()
                tensors = {name: part.values for name, part in content.parts[kind].items()}
                name = f"{kind}.safetensors"
                known[name] = save_tensors(folder / name, tensors, metadata[kind])
            sealed(self._seal(content, folder, content.state, known))
        finally:
            # Once committed the hidden folder is gone and this does nothing.
            self.checkpoints.discard(content.step)

    def _seal(
        self, content: CheckpointContent, folder: Path, state: Mapping[str, Any], known: dict[str, FileEntry]
    ) -> Path:
        known[RANDOM] = save_tensors(folder / RANDOM, content.random, {})
        write_json_atomic(folder / STATE, state)
        self.go_on()
        return self.checkpoints.commit(content.step, content.meta, known)

    # --- several ranks -------------------------------------------------------------------------------

    def _write_together(self, content: CheckpointContent, sealed: OnCommit) -> None:
        """Rank 0 begins, all write, rank 0 seals; what one cannot do, none has done."""
        meeting = Meeting(self.ranks, content.number, self.go_on)
        if not self.ranks.main:
            folder = Path(meeting.hear("begun"))
            try:
                part = self._write_part(content, folder)
            except BaseException as error:
                meeting.say_part(failure(error))
                meeting.hear("sealed")  # rank 0 says the same to all
                raise
            meeting.say_part(part)
            sealed(Path(meeting.hear("sealed")))
            return

        def seal() -> str:
            path = self._gather(content, Path(begun), meeting)
            sealed(path)
            return str(path)

        try:
            begun = meeting.say("begun", lambda: str(self.checkpoints.begin(content.step)))
            meeting.say("sealed", seal)
        finally:
            self.checkpoints.discard(content.step)

    def _write_part(self, content: CheckpointContent, folder: Path) -> dict[str, Any]:
        """Write this rank's pieces; what the others need to know of them."""
        files: dict[str, FileEntry] = {}
        tables: dict[str, PieceTable] = {}
        for kind in KINDS:
            self.go_on()
            parts = content.parts[kind]
            name = file_name(kind, self.ranks.rank, self.ranks.world)
            offsets = {own: {"saved_offsets": list(part.offset)} for own, part in parts.items()}
            if parts:
                tensors = {own: part.values for own, part in parts.items()}
                metadata = {"format": "pt", TORCH_KEY: json.dumps(offsets)}
                files[name] = save_tensors(folder / name, tensors, metadata)
            tables[kind] = join_tables(_described(key, part, name) for key, part in parts.items())
            tables[kind] = PieceTable(tables[kind].tensors, content.tied if kind == "model" else {})
        told: dict[str, Any] = {
            "files": {name: asdict(entry) for name, entry in files.items()},
            "tables": {kind: table_to_json(table) for kind, table in tables.items()},
        }
        if self.ranks.first_of_stage:
            told["optimizer"] = content.optimizer
        return told

    def _gather(self, content: CheckpointContent, folder: Path, meeting: Meeting) -> Path:
        """Write rank 0's part, wait for those of the others, and seal the whole."""
        parts = [self._write_part(content, folder), *meeting.hear_parts()]
        known = {name: FileEntry(**entry) for part in parts for name, entry in part["files"].items()}
        tables = {
            kind: join_tables(table_from_json(part["tables"][kind]) for part in parts) for kind in KINDS
        }
        for table in tables.values():
            for name, tensor in table.tensors.items():
                assert (problem := problem_with(tensor)) is None, f"{name}: {problem}"
        write_atomic(folder / PIECES, write_pieces(tables))
        optimizer = join_optimizers(part["optimizer"] for part in parts if "optimizer" in part)
        return self._seal(content, folder, {**content.state, "optimizer": optimizer}, known)


def _described(key: str, part: TensorShard, file: str) -> PieceTable:
    name, nth, _ = key.partition(NTH)
    piece = TensorPiece(file, part.offset, tuple(part.values.shape), key if nth else "")
    return PieceTable({name: TensorPieces(dtype_name(part.values.dtype), part.whole, (piece,))})
