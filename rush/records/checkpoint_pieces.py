"""The offsets of tensor pieces that several ranks wrote: `pieces.json` in the checkpoint.

    {"format": "rush-pieces", "version": 1,
     "model": {"tied": {"head.weight": "embedding.weight"},
               "tensors": {"embedding.weight": {"dtype": "F32", "shape": [320, 32], "pieces": [
                   {"file": "model-00001-of-00002.safetensors", "offset": [0, 0], "shape": [160, 32]}, …]}}},
     "optimizer": {"tied": {}, "tensors": {…}}}

A piece is a box in the full tensor. The boxes of a tensor must tile it exactly: no gap, no overlap, nothing
outside. That is checked when a checkpoint is sealed and again when it is read, because a checkpoint may be
untrusted: file names must be among the sealed files and are never followed anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rush.errors import DataError
from rush.files import read_file
from rush.records.typed import one_of, wrong_field
from rush.tensor_file import ITEM_BYTES

PIECES = "pieces.json"
Kind = Literal["model", "optimizer"]
KINDS: tuple[Kind, ...] = ("model", "optimizer")

Sizes = tuple[Annotated[int, Field(strict=True, ge=0, lt=2**62)], ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, and the file that holds it, under the tensor's name or another."""

    file: str
    offset: Sizes
    shape: Sizes
    key: str = ""
    """Its name in the file, where a rank wrote several pieces of one tensor."""


@dataclass(frozen=True)
class TensorPieces:
    """A whole tensor: what it is, and the pieces that fill it."""

    dtype: Annotated[str, one_of(*ITEM_BYTES)]
    shape: Sizes
    pieces: Annotated[tuple[TensorPiece, ...], Field(min_length=1)]


def _same_dims(tensor: TensorPieces) -> TensorPieces:
    dims = len(tensor.shape)
    if any(len(piece.offset) != dims or len(piece.shape) != dims for piece in tensor.pieces):
        raise ValueError(f"a piece has another number of dims than {list(tensor.shape)}")
    return tensor


@dataclass(frozen=True)
class PieceTable:
    """The tensors of a kind (model or optimizer), and the other names of tied ones."""

    tied: Mapping[str, str]
    tensors: Mapping[str, Annotated[TensorPieces, AfterValidator(_same_dims)]]


class _PiecesFile(TypedDict):
    format: Literal["rush-pieces"]
    version: Literal[1]
    model: PieceTable
    optimizer: PieceTable


_SCHEMA = TypeAdapter(_PiecesFile)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    begin = tuple(map(max, a[0], b[0]))
    end = [min(o1 + s1, o2 + s2) for o1, s1, o2, s2 in zip(*a, *b, strict=True)]
    shape = tuple(stop - start for start, stop in zip(begin, end, strict=True))
    return (begin, shape) if all(size > 0 for size in shape) else None


def problem_with(tensor: TensorPieces) -> str | None:
    """Why the pieces do not fill the tensor exactly; None if they do.

    Ranks shard a tensor as a grid, so the pieces must be all its cells: along every dim the ranges fill the dim, and
    each combination of them is there once. That takes no comparison of pieces in pairs.
    """
    offsets = [piece.offset for piece in tensor.pieces]
    if len(set(offsets)) != len(offsets):
        return "two of its pieces begin at the same place"
    for dim, size in enumerate(tensor.shape):
        end = 0
        for begin, length in sorted({(piece.offset[dim], piece.shape[dim]) for piece in tensor.pieces}):
            if begin != end:
                return f"its pieces {'overlap' if begin < end else 'leave a gap'} at {min(begin, end)} of dim {dim}"
            end = begin + length
        if end != size:
            return f"its pieces reach to {end} of {size} in dim {dim}"
    cells = math.prod(len({piece.offset[dim] for piece in tensor.pieces}) for dim in range(len(tensor.shape)))
    return None if cells == len(offsets) else f"it has {len(offsets)} pieces, a whole one has {cells}"


def write_pieces(tables: Mapping[Kind, PieceTable]) -> bytes:
    """The content of `pieces.json`."""
    model, optimizer = (replace(tables[k], tensors=dict(sorted(tables[k].tensors.items()))) for k in KINDS)
    body = _PiecesFile(format="rush-pieces", version=1, model=model, optimizer=optimizer)
    return _SCHEMA.dump_json(body, exclude_defaults=True) + b"\n"


def read_pieces(path: Path, files: Iterable[str]) -> dict[Kind, PieceTable]:
    """The tables of a checkpoint, if they are sound and name none but its own files; else a DataError."""
    allowed = set(files)
    try:
        body = _SCHEMA.validate_json(read_file(path))
    except (OSError, ValidationError) as error:
        why = wrong_field(error) if isinstance(error, ValidationError) else error
        raise DataError(f"{path} is not a table of pieces as this rush writes it ({why}).") from None
    tables = {kind: body[kind] for kind in KINDS}
    for kind, table in tables.items():
        for name, tensor in table.tensors.items():
            for piece in tensor.pieces:
                if piece.file not in allowed or not piece.file.endswith(".safetensors"):
                    raise DataError(
                        f"{path}: a piece of {name} is assigned to {piece.file!r}, which is no file of this checkpoint."
                    )
            if problem := problem_with(tensor):
                raise DataError(f"{path}: {name} ({kind}) is not whole: {problem}.")
        for alias, name in table.tied.items():
            if name not in table.tensors or alias in table.tensors:
                raise DataError(f"{path}: {alias} is tied to {name}, which the table does not hold so.")
    return tables


def join_tables(parts: Iterable[PieceTable]) -> PieceTable:
    """One table of the pieces of several ranks. A piece that two of them wrote counts once."""
    tensors: dict[str, TensorPieces] = {}
    tied: dict[str, str] = {}
    for part in parts:
        tied |= part.tied
        for name, tensor in part.tensors.items():
            known = tensors.setdefault(name, TensorPieces(tensor.dtype, tensor.shape, ()))
            assert (known.dtype, known.shape) == (tensor.dtype, tensor.shape), f"{name}: {known} {tensor}"
            tensors[name] = TensorPieces(known.dtype, known.shape, known.pieces + tensor.pieces)
    for name in tied:
        tensors.pop(name, None)  # a rank that holds only the other end of a tie wrote it under that name
    return PieceTable(tied, {name: _once(tensor) for name, tensor in tensors.items()})


def _once(tensor: TensorPieces) -> TensorPieces:
    boxes: dict[Box, TensorPiece] = {}
    for piece in tensor.pieces:
        boxes.setdefault((piece.offset, piece.shape), piece)
    return TensorPieces(tensor.dtype, tensor.shape, tuple(boxes.values()))


def file_name(kind: str, rank: int, world: int) -> str:
    """`model-00001-of-00004.safetensors`: what rank 0 of four writes of the model."""
    return f"{kind}-{rank + 1:05d}-of-{world:05d}.safetensors"


def full_box(shape: tuple[int, ...]) -> Box:
    return (0,) * len(shape), shape
