"""A checkpoint as two ranks would have written it, made by one process; and the same with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from rush.checkpoint.reader import SavedTensors
from rush.checkpoint.tensor_names import dtype_name, save_tensors
from rush.records.checkpoint_pieces import (
    KINDS,
    PIECES,
    PieceTable,
    TensorPiece,
    TensorPieces,
    file_name,
    write_pieces,
)
from rush.records.checkpoint_store import CheckpointStore, verify

Table = dict[str, Any]


def cut_in_two(
    whole: Path, store: CheckpointStore, step: int, change: Callable[[Table], object] = lambda body: None
) -> Path:
    """The checkpoint `whole` in two files of each kind, cut by rows, sealed as `step` after `change` to pieces.json."""
    folder, tables = store.begin(step), {}
    found = verify(whole)
    for kind in KINDS:
        files: list[dict[str, Tensor]] = [{}, {}]
        tensors = {}
        with SavedTensors(found, kind) as saved:
            for name in sorted(saved.names):
                value = saved[name]
                rows = value.shape[0] // 2 if value.dim() else 0
                cuts = [(0, rows), (rows, value.shape[0])] if rows else [(0, 0)]
                pieces = []
                for rank, (begin, end) in enumerate(cuts):
                    part = value[begin:end].contiguous() if rows else value
                    files[rank][name] = part
                    offset = (begin, *[0] * (value.dim() - 1))[: value.dim()]
                    pieces.append(TensorPiece(file_name(kind, rank, 2), offset, tuple(part.shape)))
                tensors[name] = TensorPieces(dtype_name(value.dtype), tuple(value.shape), tuple(pieces))
            tables[kind] = PieceTable(saved.tied, tensors)
        for rank, held in enumerate(files):
            save_tensors(folder / file_name(kind, rank, 2), held, {"format": "pt"})
    body = json.loads(write_pieces(tables))
    change(body)
    (folder / PIECES).write_text(json.dumps(body))
    for name in ("state.json", "random.safetensors"):
        (folder / name).write_bytes((whole / name).read_bytes())
    return store.commit(step, {})
