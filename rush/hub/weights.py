"""Load and save Hugging Face folders: `config.json` and safetensors, one file or sharded.

GPT-2's published linear weights are stored as [in, out], the transpose of nn.Linear's. Names vary: with or without the base
model's prefix, with a tied head left out or stored twice, with old mask buffers. A tensor that is missing, unknown or of
another shape is refused by name. Pickle files are refused: opening one can run any code.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rush.errors import DataError, MachineError, RecipeError
from rush.files import replacing
from rush.hub.config import config_from_shape, shape_from_config
from rush.hub.generation_config import FILE as GENERATION
from rush.hub.json_files import read_json, write_json
from rush.hub.weight_names import BASE_PREFIX, exported_name, is_transposed, stored_name
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
    head = stored_name(shape, "head.weight")
    for file in sorted({file for file, _ in where.values()}):
        with _open(file) as tensors:
            for spec in list_parameters(shape):
                home, stored = where[stored_name(shape, spec.name)]
                if home == file:
                    state[spec.name] = _read(tensors, stored, spec, shape, file)
            if shape.tied_head and head in where and where[head][0] == file:
                state["head.weight"] = tensors.get_tensor(where[head][1])
    _check_tied_head(shape, state, folder)
    return shape, state


def locate_hf_tensors(path: str | os.PathLike[str]) -> tuple[Shape, dict[str, tuple[Path, str, bool]]]:
    """The shape, and for each parameter its file, its name there, and whether it is stored transposed."""
    folder = Path(path)
    shape = shape_from_config(read_json(folder / "config.json", NOT_A_FOLDER))
    where = _locate(folder, shape)
    places: dict[str, tuple[Path, str, bool]] = {}
    for spec in list_parameters(shape):
        file, stored = where[stored_name(shape, spec.name)]
        with _open(file) as tensors:
            _check_stored(tensors, stored, spec, shape, file)
        places[spec.name] = (file, stored, is_transposed(shape, spec))
    return shape, places


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
    sizes = {name: _bytes(tensor, dtype) for name, tensor in seen.items()}
    shards = _split(specs, sizes, max_shard_bytes)
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
                exported_name(shape, spec.name): _stored_source(state, seen[spec.name], spec, shape, dtype)
                for spec in shard
            }
            with replacing(folder / name) as temporary:
                write_tensors(temporary, sources, {"format": "pt"})
            weight_map |= dict.fromkeys(sources, name)
        if len(shards) > 1:
            total = sum(sizes[spec.name] for spec in specs)
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
                name = stored.removeprefix(BASE_PREFIX[shape.family])
                if name in where:
                    raise DataError(
                        f"{folder} holds the tensor {name} twice: in {where[name][0].name} and {file.name}."
                    )
                where[name] = (file, stored)
    expected = {stored_name(shape, spec.name) for spec in list_parameters(shape)}
    # A tied head may be stored too; whether it equals the embedding is checked on loading.
    unknown = {name for name in where if not _CONSTANTS.fullmatch(name)} - expected - {"lm_head.weight"}
    if missing := expected - where.keys():
        raise DataError(f"{folder} lacks {_name_some(missing)}, which config.json calls for.")
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
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise DataError(
            f"{file} is not a whole safetensors file ({error}): fetch or export it again."
        ) from error


def _read(tensors: Any, stored: str, spec: ParameterSpec, shape: Shape, file: Path) -> Tensor:
    _check_stored(tensors, stored, spec, shape, file)
    tensor: Tensor = tensors.get_tensor(stored)
    return tensor.t().contiguous() if is_transposed(shape, spec) else tensor


def _check_stored(tensors: Any, stored: str, spec: ParameterSpec, shape: Shape, file: Path) -> None:
    entry = tensors.get_slice(stored)
    if entry.get_dtype() not in _PLAIN_DTYPES:
        raise DataError(
            f"{file}: {stored} is stored as {entry.get_dtype()}; allowed are {', '.join(_PLAIN_DTYPES)}. "
            f"Quantized weights must be converted first."
        )
    expected = spec.dims[::-1] if is_transposed(shape, spec) else spec.dims
    if tuple(entry.get_shape()) != expected:
        raise DataError(
            f"{file}: {stored} has the shape {tuple(entry.get_shape())}; config.json calls for {expected}."
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
    specs: tuple[ParameterSpec, ...], sizes: Mapping[str, int], max_shard_bytes: int
) -> list[list[ParameterSpec]]:
    """Tensors in order, in files up to the limit; a tensor above the limit gets its own."""
    if max_shard_bytes < 1:
        raise RecipeError(f"max_shard_bytes must be at least 1: found {max_shard_bytes}.")
    shards: list[list[ParameterSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + sizes[spec.name] > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += sizes[spec.name]
    return shards


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * (dtype or tensor.dtype).itemsize


def _meta_of(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor for its shape and dtype, without reading its values where the source allows that."""
    meta: Callable[[str], Tensor] | None = getattr(state, "meta", None)
    return state[name] if meta is None else meta(name)


def _stored_source(
    state: Mapping[str, Tensor], seen: Tensor, spec: ParameterSpec, shape: Shape, dtype: torch.dtype | None
) -> TensorSource:
    def read() -> memoryview:
        kept = state[spec.name].detach().to("cpu", dtype or seen.dtype)
        kept = (kept.t() if is_transposed(shape, spec) else kept).contiguous()
        return kept.reshape(-1).view(torch.uint8).numpy().data

    dims = spec.dims[::-1] if is_transposed(shape, spec) else spec.dims
    return TensorSource(_DTYPES[dtype or seen.dtype], tuple(dims), read)
