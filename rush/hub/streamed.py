"""Inference of models larger than the device: blocks are offloaded to host memory or disk and loaded one at a time.

Embedding, final norm and LM head are resident. A block's weights are loaded before its forward and freed after it, so the
device (with `disk` also the host) holds one block. Every token loads the whole model: seconds each for a large model. The
logits are bit-identical.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rush.checkpoint.reader import SavedTensors
from rush.checkpoint.tensor_names import DTYPES
from rush.errors import DataError
from rush.files import open_file
from rush.hub.weights import FilePlace, locate_hf_tensors, own_part
from rush.models import Decoder, Shape, build_model
from rush.models.counts import list_parameters
from rush.records.checkpoint_store import Checkpoint


class FileWeights(Mapping[str, Tensor]):
    """Weights read from their files on demand, under our names. Not mapped: mapped pages count as resident memory."""

    def __init__(self, places: Mapping[str, FilePlace]) -> None:
        self._places = dict(places)
        self._headers = {file: _header(file) for file in {place.file for place in self._places.values()}}

    def __getitem__(self, name: str) -> Tensor:
        found = self._places[name]
        begin, entries = self._headers[found.file]
        entry = entries[found.stored]
        start, stop = entry["data_offsets"]
        content = bytearray(stop - start)
        with open_file(found.file) as handle:
            handle.seek(begin + start)
            if handle.readinto(content) != stop - start:
                raise DataError(f"{found.file} ends before {found.stored} does: fetch or export it again.")
        value = torch.frombuffer(content, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
        return own_part(value, found.place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Offset of the values, and the entries of the safetensors header."""
    with open_file(file) as handle:
        length = int.from_bytes(handle.read(8), "little")
        return 8 + length, json.loads(handle.read(length))


def run_weights(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """The weights of a whole model's checkpoint, read on demand."""
    return SavedTensors(checkpoint, "model", keep_open=False)


def hf_weights(folder: Path) -> tuple[Shape, FileWeights]:
    """The weights of a Hugging Face folder, read on demand."""
    shape, places = locate_hf_tensors(folder)
    return shape, FileWeights(places)


def streamed_model(
    shape: Shape, weights: Mapping[str, Tensor], device: str, dtype: torch.dtype | None
) -> Decoder:
    """A model whose blocks load their weights from `weights` at each forward."""
    with torch.device("meta"):
        model = build_model(shape)
    for spec in list_parameters(shape):
        if not spec.name.startswith("blocks."):
            _set_parameter(model, spec.name, weights[spec.name].to(device=device, dtype=dtype))
    model.tie_head()
    model.init_buffers()
    for layer, block in enumerate(model.blocks):
        prefix = f"blocks.{layer}."
        names = [spec.name for spec in list_parameters(shape) if spec.name.startswith(prefix)]
        block.__dict__["forward"] = _streamed_forward(block, weights, prefix, names, device, dtype)
    return model.eval()


def _streamed_forward(
    block: nn.Module,
    weights: Mapping[str, Tensor],
    prefix: str,
    names: list[str],
    device: str,
    dtype: torch.dtype | None,
) -> Callable[..., Tensor]:
    """The block's forward, with its weights loaded before and freed after it."""

    def forward(x_btd: Tensor, **rest: Any) -> Tensor:
        for name in names:
            _set_parameter(block, name.removeprefix(prefix), weights[name].to(device=device, dtype=dtype))
        try:
            out: Tensor = type(block).forward(block, x_btd, **rest)
        finally:
            for name in names:
                own = name.removeprefix(prefix)
                _set_parameter(block, own, block.get_parameter(own).detach().to("meta"))
        return out

    return forward


def _set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module.get_submodule(owner)._parameters[own] = nn.Parameter(value, requires_grad=False)
