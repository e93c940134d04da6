"""Load and save Hugging Face folders: `config.json` and safetensors, one file or sharded.

Where each parameter lies is in `weight_names.py`. Names vary: with or without the base model's prefix, with a tied head left
out or stored twice, with old mask buffers. A tensor that is missing, unknown or of another shape is refused by name. Pickle files are refused: opening one can run any code.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rush.errors import DataError, MachineError, RecipeError
from rush.files import open_file, replacing
from rush.hub.config import config_from_shape, shape_from_config
from rush.hub.generation_config import FILE as GENERATION
from rush.hub.json_files import read_json, write_json
from rush.hub.weight_names import (
    HEAD,
    Place,
    exported_name,
    is_ignored,
    places,
    stored_dims,
    without_prefix,
)
from rush.models.counts import ParameterSpec, list_parameters
from rush.models.shape import Shape
from rush.tensor_file import TensorSource, write_tensors

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DEFAULT_SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
NOT_A_FOLDER = "a Hugging Face model folder has one"

# Buffers that old versions stored with the weights: causal masks and RoPE frequencies.
_CONSTANTS = re.compile(r"(h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq)")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PLAIN_DTYPES = tuple(_DTYPES.values())


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the files, and the parameters that it holds: one, or several as its rows."""

    name: str
    """Without the base model's prefix."""
    members: Sequence[ParameterSpec]
    transposed: bool
    dims: tuple[int, ...]


@dataclass(frozen=True)
class FilePlace:
    """Where a parameter lies on disk."""

    file: Path
    stored: str
    """With its prefix, as the file has it."""
    place: Place


def load_hf_folder(path: str | os.PathLike[str]) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the weights under our names, in the dtype of the file, on the CPU.

    Load them into a model on meta with `load_state_dict(state, assign=True)` and `init_buffers()`, without a copy.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        if folder.suffix in PICKLE_SUFFIXES:
            raise pickle_refusal(folder.parent, folder.name)
        raise DataError(f"There is no Hugging Face folder at {folder}: give a folder with config.json in it.")
    shape = shape_from_config(read_json(folder / "config.json", NOT_A_FOLDER))
    where = _locate(folder, shape)
    state: dict[str, Tensor] = {}
    lying = places(shape)
    for tensor in stored_tensors(shape):
        file, stored = where[tensor.name]
        with _open(file) as tensors:
            _check_stored(tensors, stored, tensor, file)
            value: Tensor = tensors.get_tensor(stored)
        for spec in tensor.members:
            state[spec.name] = own_part(value, lying[spec.name])
    if shape.tied_head and HEAD in where:
        file, stored = where[HEAD]
        with _open(file) as tensors:
            state["head.weight"] = tensors.get_tensor(stored)
    _check_tied_head(shape, state, folder)
    return shape, state


def locate_hf_tensors(path: str | os.PathLike[str]) -> tuple[Shape, dict[str, FilePlace]]:
    """The shape, and for each parameter where it lies."""
    folder = Path(path)
    shape = shape_from_config(read_json(folder / "config.json", NOT_A_FOLDER))
    where = _locate(folder, shape)
    for tensor in stored_tensors(shape):
        file, stored = where[tensor.name]
        with _open(file) as tensors:
            _check_stored(tensors, stored, tensor, file)
    return shape, {name: FilePlace(*where[place.stored], place) for name, place in places(shape).items()}


def stored_tensors(shape: Shape) -> list[StoredTensor]:
    """The tensors of the files, in the order of the model."""
    lying = places(shape)
    members: dict[str, list[ParameterSpec]] = {}
    for spec in list_parameters(shape):
        members.setdefault(lying[spec.name].stored, []).append(spec)
    found = []
    for name, specs in members.items():
        transposed = lying[specs[0].name].transposed
        found.append(StoredTensor(name, specs, transposed, stored_dims(shape, specs, transposed)))
    return found


def own_part(value: Tensor, place: Place) -> Tensor:
    """The parameter in a stored tensor."""
    if place.rows is not None:
        return value[slice(*place.rows)].contiguous().clone()
    return value.t().contiguous() if place.transposed else value


def save_hf_folder(
    path: str | os.PathLike[str],
    source: nn.Module | Mapping[str, Tensor],
    shape: Shape,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    dtype: torch.dtype | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that transformers reads. Tensors keep their dtype unless one is given.

    `generation` becomes its generation_config.json.

    Weights are converted and written one at a time. From a source that reads lazily (with a method `meta` for shape and
    dtype), only one is in memory.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else source
    specs = list_parameters(shape)
    seen = {spec.name: _meta_of(state, spec.name) for spec in specs if spec.name in state}
    _check_complete(seen, specs)
    folder = Path(path)
    whole = stored_tensors(shape)
    sizes = {tensor.name: sum(_bytes(seen[spec.name], dtype) for spec in tensor.members) for tensor in whole}
    shards = _split(whole, sizes, max_shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(file.name for file in folder.glob("model*.safetensors*")):
            raise DataError(
                f"{folder} already holds weights ({present[0]}): choose another folder or empty it."
            )
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            suffix = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
            name = f"model{suffix}.safetensors"
            sources = {
                exported_name(shape, tensor.members[0].name): _stored_source(state, seen, tensor, dtype)
                for tensor in shard
            }
            with replacing(folder / name) as temporary:
                write_tensors(temporary, sources, {"format": "pt"})
            weight_map |= dict.fromkeys(sources, name)
        if len(shards) > 1:
            total = sum(sizes.values())
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        stored = str(dtype or seen["embedding.weight"].dtype).removeprefix("torch.")
        write_json(
            folder / "config.json", config_from_shape(shape, dtype=stored, bos_id=bos_id, eos_id=eos_id)
        )
        if generation:
            write_json(folder / GENERATION, generation)
    except (OSError, SafetensorError) as error:
        raise MachineError(f"The model could not be written to {folder}: {error}.") from error


# --- reading -----------------------------------------------------------------------------------------


def _locate(folder: Path, shape: Shape) -> dict[str, tuple[Path, str]]:
    """For each tensor, by its name without prefix, its file and its name there; DataError if one is missing or unknown."""
    where: dict[str, tuple[Path, str]] = {}
    for file in _weight_files(folder):
        with _open(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (not a mapping)
                name = without_prefix(shape, stored)
                if is_ignored(shape, name):
                    continue
                if name in where:
                    raise DataError(
                        f"{folder} holds the tensor {name} twice: in {where[name][0].name} and {file.name}."
                    )
                where[name] = (file, stored)
    expected = {place.stored for place in places(shape).values()}
    # A tied head may be stored too; whether it equals the embedding is checked on loading.
    unknown = {name for name in where if not _CONSTANTS.fullmatch(name)} - expected - {HEAD}
    if missing := expected - where.keys():
        raise DataError(
            f"{folder} lacks {_name_some(missing)}, which config.json calls for. Take "
            "config.json and weights from one place."
        )
    if unknown:
        raise DataError(f"{folder} holds {_name_some(unknown)}, which a {shape.family} model does not have.")
    return where


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        listed = read_json(folder / INDEX).get("weight_map", {})
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise DataError(f"{folder / INDEX}: weight_map must give a file name for each tensor.")
        names = sorted(set(listed.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise DataError(
                    f"{folder / INDEX} points to {name!r}: allowed are .safetensors files beside it."
                )
            if not os.path.isfile(folder / name):
                raise DataError(f"{folder} lacks {name}, which {INDEX} lists: fetch the missing file.")
        if names:
            return [folder / name for name in names]
        raise DataError(f"{folder / INDEX} lists no weights: it needs a weight_map.")
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLE_SUFFIXES:
            raise pickle_refusal(folder, file.name)
    raise DataError(f"{folder} holds no weights: expected model.safetensors or {INDEX}.")


def _open(file: Path) -> Any:
    try:
        open_file(file).close()  # which refuses a pipe; safe_open would wait for its writer
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{file} is not a whole safetensors file ({error}): fetch or export it again."
        ) from error


def _check_stored(tensors: Any, stored: str, tensor: StoredTensor, file: Path) -> None:
    entry = tensors.get_slice(stored)
    if entry.get_dtype() not in _PLAIN_DTYPES:
        raise DataError(
            f"{file}: {stored} is stored as {entry.get_dtype()}; allowed are {', '.join(_PLAIN_DTYPES)}. "
            f"Quantized weights must be converted first."
        )
    if tuple(entry.get_shape()) != tensor.dims:
        raise DataError(
            f"{file}: {stored} has the shape {tuple(entry.get_shape())}; config.json calls for {tensor.dims}. "
            "Take config.json and weights from one place."
        )


def _check_tied_head(shape: Shape, state: dict[str, Tensor], folder: Path) -> None:
    head = state.pop("head.weight", None) if shape.tied_head else None
    if head is not None and not torch.equal(head, state["embedding.weight"]):
        raise DataError(
            f"{folder} has a head of its own, but config.json ties it to the embedding: set "
            f"tie_word_embeddings to false if the head is meant."
        )


def pickle_refusal(folder: Path, name: str) -> DataError:
    return DataError(
        f"{folder / name} is a pickle file, and opening one can run any code: rush reads safetensors only. "
        f"If you trust it, convert it once with transformers: "
        f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
    )


def _name_some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return f"the tensor{'s' if len(ordered) > 1 else ''} {', '.join(ordered[:5])}{more}"


# --- writing -----------------------------------------------------------------------------------------


def _check_complete(state: Mapping[str, Tensor], specs: tuple[ParameterSpec, ...]) -> None:
    for spec in specs:
        found = tuple(state[spec.name].shape) if spec.name in state else "nothing"
        if found != spec.dims:
            raise DataError(
                f"The model cannot be exported: {spec.name} should be {spec.dims}, found {found}."
            )


def _split(
    tensors: Sequence[StoredTensor], sizes: Mapping[str, int], max_shard_bytes: int
) -> list[list[StoredTensor]]:
    """Tensors in order, in files up to the limit; a tensor above the limit gets its own."""
    if max_shard_bytes < 1:
        raise RecipeError(f"max_shard_bytes must be at least 1: found {max_shard_bytes}.")
    shards: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + sizes[tensor.name] > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += sizes[tensor.name]
    return shards


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * (dtype or tensor.dtype).itemsize


def _meta_of(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor for its shape and dtype, without reading its values where the source allows that."""
    meta: Callable[[str], Tensor] | None = getattr(state, "meta", None)
    return state[name] if meta is None else meta(name)


def _stored_source(
    state: Mapping[str, Tensor], seen: Mapping[str, Tensor], tensor: StoredTensor, dtype: torch.dtype | None
) -> TensorSource:
    kind = dtype or seen[tensor.members[0].name].dtype

    def read() -> memoryview:
        parts = [state[spec.name].detach().to("cpu", kind) for spec in tensor.members]
        kept = parts[0] if len(parts) == 1 else torch.cat(parts)
        kept = (kept.t() if tensor.transposed else kept).contiguous()
        return kept.reshape(-1).view(torch.uint8).numpy().data

    return TensorSource(_DTYPES[kind], tensor.dims, read)
