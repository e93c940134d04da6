"""Read the tensors of a checkpoint: one file with full tensors, or many with pieces.

Opening reads only headers. A box of a tensor is read from the pieces that overlap it, so a rank reads only its own shard,
whatever layout the checkpoint was saved in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rush.checkpoint.tensor_names import DTYPES, TensorFile, describe, dtype_name
from rush.errors import DataError
from rush.parallel.placement import local_shards
from rush.records.checkpoint_pieces import (
    PIECES,
    Box,
    Kind,
    PieceTable,
    TensorPiece,
    TensorPieces,
    full_box,
    overlap,
    read_pieces,
)
from rush.records.checkpoint_store import Checkpoint

OPEN_FILES = 64
"""Kept open while tensors are read; a file is opened again if it was closed for others."""


class SavedTensors(Mapping[str, Tensor]):
    """The model's or the optimizer's tensors (`kind`) of a checkpoint, by name; tied ones under all their names."""

    def __init__(self, checkpoint: Checkpoint, kind: Kind, *, keep_open: bool = True) -> None:
        self._folder, self._keep_open = checkpoint.path, keep_open
        self._open: dict[str, TensorFile] = {}
        if PIECES in checkpoint.manifest.files:
            self.path = checkpoint.path / PIECES
            self._table = read_pieces(self.path, checkpoint.manifest.files)[kind]
        else:
            self.path = checkpoint.path / f"{kind}.safetensors"
            self._table = _whole(self._file(self.path.name))
        self.names = frozenset(self._table.tensors)
        self.tied = dict(self._table.tied)

    def header(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Full shape and dtype, without reading the values."""
        tensor = self._pieces(name)
        return torch.Size(tensor.shape), DTYPES[tensor.dtype]

    def meta(self, name: str) -> Tensor:
        """A tensor without values."""
        shape, dtype = self.header(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def __getitem__(self, name: str) -> Tensor:
        """The full tensor, copied to the host."""
        shape, dtype = self.header(name)
        found = torch.empty(shape, dtype=dtype)
        self._read(name, full_box(tuple(shape)), found)
        if not self._keep_open:  # pages of mapped files may count as this process's memory
            self.close()
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._table.tensors
        yield from self._table.tied

    def __len__(self) -> int:
        return len(self._table.tensors) + len(self._table.tied)

    @torch.no_grad()
    def fill(self, tensor: Tensor, name: str, *, by_rows: bool = False) -> None:
        """Copy the values in; a sharded tensor gets this rank's shard. With `by_rows` a table may have been saved flat."""
        shape = self._pieces(name).shape
        if by_rows and len(shape) == 1 and tensor.dim() == 2 and tensor.numel() == shape[0]:
            width = tensor.shape[1]
            for part in local_shards(tensor):
                rows, columns = part.values.shape
                flat = torch.empty(rows * width, dtype=tensor.dtype)
                self._read(name, ((part.offset[0] * width,), (flat.numel(),)), flat)
                part.values.copy_(flat.view(rows, width).narrow(1, part.offset[1], columns))
            return
        assert tuple(tensor.shape) == shape, name
        for part in local_shards(tensor):
            self._read(name, (part.offset, tuple(part.values.shape)), part.values)

    def check(self, tensor: Tensor, name: str) -> None:
        """Check the pieces that `fill` would read against the table, before anything is copied."""
        for part in local_shards(tensor):
            for piece, _ in self._overlapping(name, (part.offset, tuple(part.values.shape))):
                self._piece(name, piece)

    def _read(self, name: str, box: Box, into: Tensor) -> None:
        for piece, (begin, shape) in self._overlapping(name, box):
            file, key = self._piece(name, piece), piece.key or self._stored(name)
            values = file.piece(key, _slices(begin, shape, piece.offset))
            into[_slices(begin, shape, box[0])] = values.to(into.device)

    def _overlapping(self, name: str, box: Box) -> Iterator[tuple[TensorPiece, Box]]:
        for piece in self._pieces(name).pieces:
            if (shared := overlap(box, (piece.offset, piece.shape))) is not None:
                yield piece, shared

    def _stored(self, name: str) -> str:
        return self._table.tied.get(name, name)

    def _pieces(self, name: str) -> TensorPieces:
        return self._table.tensors[self._stored(name)]

    def _piece(self, name: str, piece: TensorPiece) -> TensorFile:
        """The open file of a piece, checked against the table."""
        file, stored = self._file(piece.file), piece.key or self._stored(name)
        expected = torch.Size(piece.shape), DTYPES[self._pieces(name).dtype]
        found = file.header(stored) if stored in file.names else None
        if found != expected:
            raise DataError(
                f"{file.path}: the piece of {stored} at {list(piece.offset)} is "
                f"{describe(*found) if found else 'not there'}, {PIECES} says {describe(*expected)}."
            )
        return file

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._close(next(iter(self._open)))
            self._open[name] = TensorFile(self._folder / name).__enter__()
        return self._open[name]

    def _close(self, name: str) -> None:
        self._open.pop(name).__exit__(None, None, None)

    def close(self) -> None:
        for name in list(self._open):
            self._close(name)

    def expect_names(self, wanted: Iterable[str], *, part: bool = False) -> None:
        """Refuse a checkpoint that lacks one of these tensors or has others (`part`: others belong to other ranks)."""
        wanted = set(wanted)
        missing, extra = sorted(wanted - self.names), sorted(self.names - wanted)
        if missing or (extra and not part):
            parts = [f"lacks {_few(missing)}"] * bool(missing)
            parts += [f"has the unknown {_few(extra)}"] * bool(extra)
            raise DataError(f"{self.path} does not fit this model: it {' and '.join(parts)}.")

    def expect(self, wanted: Mapping[str, tuple[torch.Size, torch.dtype]], *, part: bool = False) -> None:
        """Refuse a checkpoint whose tensors are not exactly these, by name, shape and dtype."""
        self.expect_names(wanted, part=part)
        for name, (shape, dtype) in wanted.items():
            found = self.header(name)
            if found != (shape, dtype):
                raise DataError(
                    f"{self.path}: {name} is {describe(*found)}, the model has {describe(shape, dtype)}."
                )

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _whole(file: TensorFile) -> PieceTable:
    """A file of full tensors, as a table with one piece each."""
    tensors = {}
    for name in sorted(file.names):
        shape, dtype = file.header(name)
        offset, size = full_box(tuple(shape))
        tensors[name] = TensorPieces(dtype_name(dtype), size, (TensorPiece(file.path.name, offset, size),))
    return PieceTable(file.tied, tensors)


def _slices(begin: tuple[int, ...], shape: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """A box of the full tensor as slices of a piece at `origin`."""
    return tuple(slice(b - o, b - o + s) for b, s, o in zip(begin, shape, origin, strict=True))


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
