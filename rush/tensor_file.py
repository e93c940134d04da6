"""Writing a safetensors file one tensor at a time.

The format is simple: eight bytes for the length of a JSON header, the header (for every tensor its dtype, shape and offsets),
then the raw bytes. The library's own writer needs all tensors in host memory at once. Here a tensor is fetched just before it
is written, so saving a model from an accelerator takes host memory for its largest tensor, not for a second model. The library
does the reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rush.files import writing

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: its description now, its bytes (row-major, little-endian) when asked."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(
    path: Path, tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write a new safetensors file, down to the disk; its size and SHA-256, of the bytes passed to the system."""
    # Widest items first, so that every tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        source = tensors[name]
        end = offset + source.size_bytes
        header[name] = {"dtype": source.dtype, "shape": list(source.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(start)
    with writing(path), open(path, "xb") as file:
        file.write(start)
        for name in order:
            data = tensors[name].read()
            assert data.nbytes == tensors[name].size_bytes, (
                f"{name}: {data.nbytes} bytes, not {tensors[name].size_bytes}"
            )
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(start) + offset, digest.hexdigest()
