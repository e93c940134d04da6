"""Models larger than the device: the blocks stay in host memory or on disk, and come in one at a time.

Embedding, last norm and head are resident; a block's weights are fetched when the block runs and freed when it
is done, so the device holds one block, and with `disk` the host holds no more either. Every token brings
in the whole model: expect seconds for each one of a large model. The arithmetic is the same, so are the logits,
to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rush.checkpoint.reader import SavedTensors
from rush.checkpoint.tensor_names import DTYPES
from rush.errors import DataError
from rush.hub.weights import locate_hf_tensors
from rush.models import Decoder, Shape, build_model
from rush.models.counts import list_parameters
from rush.records.checkpoint_store import Checkpoint


class FileWeights(Mapping[str, Tensor]):
    """Weights that stay in their files until they are asked for, under our names.

    Read, not mapped: pages of a mapped file count as this process's memory for as long as the system likes.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str, bool]]) -> None:
        self._places = dict(places)
        self._headers = {file: _header(file) for file in {file for file, _, _ in self._places.values()}}

    def __getitem__(self, name: str) -> Tensor:
        file, stored, transposed = self._places[name]
        begin, entries = self._headers[file]
        entry = entries[stored]
        start, stop = entry["data_offsets"]
        content = bytearray(stop - start)
        with file.open("rb") as handle:
            handle.seek(begin + start)
            if handle.readinto(content) != stop - start:
                raise DataError(f"{file} ends before {stored} does: fetch or export it again.")
        value = torch.frombuffer(content, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
        return value.t().contiguous() if transposed else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the values begin, and what is where."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        return 8 + length, json.loads(handle.read(length))


def run_weights(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """The weights of a checkpoint that holds a whole model, left where they are."""
    return SavedTensors(checkpoint, "model", keep_open=False)


def hf_weights(folder: Path) -> tuple[Shape, FileWeights]:
    """The weights of a Hugging Face folder, left where they are."""
    shape, places = locate_hf_tensors(folder)
    return shape, FileWeights(places)


def streamed_model(
    shape: Shape, weights: Mapping[str, Tensor], device: str, dtype: torch.dtype | None
) -> Decoder:
    """A model whose blocks fetch their weights from `weights` whenever they run."""
    with torch.device("meta"):
        model = build_model(shape)
    for spec in list_parameters(shape):
        if not spec.name.startswith("blocks."):
            _place(model, spec.name, weights[spec.name].to(device=device, dtype=dtype))
    model.tie_head()
    model.init_buffers()
    for layer, block in enumerate(model.blocks):
        prefix = f"blocks.{layer}."
        names = [spec.name for spec in list_parameters(shape) if spec.name.startswith(prefix)]
        block.__dict__["incoming"] = _Incoming(weights, prefix, names, device, dtype)
        block.__dict__["forward"] = MethodType(_fetched_forward, block)
    return model.eval()


class _Incoming:
    """Fetches one block's weights."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        prefix: str,
        names: list[str],
        device: str,
        dtype: torch.dtype | None,
    ) -> None:
        self.weights, self.prefix, self.names, self.device, self.dtype = weights, prefix, names, device, dtype

    def fetch(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name.removeprefix(self.prefix), self.weights[name].to(device=self.device, dtype=self.dtype)


def _fetched_forward(self: nn.Module, x_btd: Tensor, **rest: Any) -> Tensor:
    """A block's forward between bringing its weights in and letting go of them."""
    incoming = self.__dict__["incoming"]
    for name, value in incoming.fetch():
        _place(self, name, value)
    try:
        out: Tensor = type(self).forward(self, x_btd, **rest)
    finally:
        for name in incoming.names:
            own = name.removeprefix(incoming.prefix)
            _place(self, own, self.get_parameter(own).detach().to("meta"))
    return out


def _place(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module.get_submodule(owner)._parameters[own] = nn.Parameter(value, requires_grad=False)
