"""Read and write safetensors files.

Opening reads only the header (names, shapes, dtypes), so that a file that does not fit is refused before anything is copied;
values are read one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rush.errors import DataError
from rush.files import open_file, parse_json
from rush.records.checkpoint_manifest import FileEntry
from rush.tensor_file import TensorSource, write_tensors

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileEntry:
    """Write tensors, from any device, to a new safetensors file, one at a time through host memory."""
    written = write_tensors(path, {name: _source(name, tensor) for name, tensor in tensors.items()}, metadata)
    return FileEntry(*written)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in safetensors."""
    return _DTYPE_NAMES[dtype]


def describe(shape: torch.Size, dtype: torch.dtype) -> str:
    """`float32[256, 128]`, for messages."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class TensorFile:
    """A safetensors file open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        self.names = frozenset(self._file.keys())
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.tied: dict[str, str] = _tied(path, self.metadata)
        for alias, name in self.tied.items():
            if name not in self.names:
                raise DataError(f"{path}: {alias} is tied to {name}, which is not in the file.")

    def header(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype, without reading the values."""
        piece = self._file.get_slice(name)
        if piece.get_dtype() not in DTYPES:
            raise DataError(
                f"{self.path}: {name} has the dtype {piece.get_dtype()}; allowed: {', '.join(DTYPES)}."
            )
        return torch.Size(piece.get_shape()), DTYPES[piece.get_dtype()]

    def tensor(self, name: str) -> Tensor:
        """The values, which may be mapped from the file: copy to keep them."""
        value = self._file.get_tensor(name)
        assert isinstance(value, Tensor)
        return value

    def piece(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """The values of a box of the tensor; nothing else is read."""
        if not box:
            return self.tensor(name)
        value = self._file.get_slice(name)[box]
        assert isinstance(value, Tensor)
        return value

    def __enter__(self) -> TensorFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)


def _open(path: Path) -> Any:
    try:
        open_file(path).close()  # which refuses a pipe; safe_open would wait for its writer
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}).") from None


def _tied(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        tied = parse_json(metadata.get("tied", "{}"))
    except ValueError:
        tied = None
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise DataError(f"{path}: its header does not say in JSON which names are tied.")
    return tied


def _source(name: str, tensor: Tensor) -> TensorSource:
    # Sharded or quantized tensor subclasses have no plain bytes.
    assert type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer), (
        f"{name} is a {type(tensor).__name__}"
    )
    assert tensor.layout is torch.strided, f"{name} is not dense"

    def read() -> memoryview:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data

    return TensorSource(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), read)
