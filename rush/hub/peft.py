"""Adapters on disk: PEFT folders (adapter_config.json, adapter_model.safetensors), loaded and saved, and those of runs.

Names are translated (`blocks.0.attention.q` is `model.layers.0.self_attn.q_proj` there). A and B are stored alike for both
families: PEFT keeps them as linear layers even for GPT-2's transposed weights. PEFT options that rush does not support
(trained biases, other trained modules, initializations that change the base) are refused. A folder that rush wrote has a
fingerprint of its base: another base is refused. Pickles are never opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rush.checkpoint import restore
from rush.checkpoint.frozen_base import base_identity, partial_identity
from rush.checkpoint.reader import SavedTensors
from rush.checkpoint.tensor_names import TensorFile
from rush.data.hub_client import parse_id
from rush.errors import DataError, RecipeError
from rush.files import replacing
from rush.hub.json_files import read_json, write_json
from rush.hub.weight_names import exported_name, is_joined
from rush.models import Decoder, Shape, build_model
from rush.models.adapters import AdapterSpec, adapt, adapters, is_adapted
from rush.models.families import FAMILIES
from rush.models.numbers import LARGEST_NUMBER
from rush.records.checkpoint_store import Checkpoint

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_IDENTITY, _OLD_IDENTITY = "rush_base_values", "rush_base"
_PARTS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
# PEFT options that change what an adapter computes, and the values that disable them.
_MUST_BE_OFF: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "lora_bias": (None, False),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class StoredAdapter:
    """Adapters read from a file, under our names, not attached to a model yet."""

    path: Path
    specs: Mapping[str, AdapterSpec]
    tensors: Mapping[str, Tensor]
    """By name, as in `blocks.0.attention.q.adapter.a`."""
    identity: str | None = None
    """Fingerprint of the base; None where the file has none."""
    partial: str | None = None
    """The fingerprint of older files: embedding, norms and head only."""
    base: str | None = None
    """Path of the base when the adapter was written."""


# --- writing ----------------------------------------------------------------------------------------------


def save_adapter(folder: Path, model: Decoder, base: str | None) -> list[str]:
    """Write a folder for `PeftModel.from_pretrained(base_model, folder)`. Returns the file names."""
    specs = {name: adapter.spec for name, _, adapter in adapters(model)}
    if not specs:
        raise DataError("this model has no adapters to write; export the whole model instead.")
    if joined := next((name for name in specs if is_joined(model.shape, name)), None):
        raise DataError(
            f"{model.shape.family} stores {joined} in one tensor with others, which PEFT would adapt as one layer, and these "
            "adapters are of single layers; write the merged model instead (rush merge)."
        )
    distinct = set(specs.values())
    assert len(distinct) == 1, "all layers have the same adapter settings"
    (spec,) = distinct
    tensors: dict[str, Tensor] = {}
    names = {value: key for key, value in _PARTS.items()}
    for name, _, adapter in adapters(model):
        path = _hf_module(model.shape, name)
        for part, value in adapter.named_parameters():
            tensors[f"{_PREFIX}{path}.{names[part]}"] = value.detach().cpu().contiguous()
    repo = None if base is None else parse_id(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if repo is None else repo.name,
        "revision": None if repo is None else repo.revision,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "use_rslora": spec.scale_by_root,
        "use_dora": spec.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": FAMILIES[model.shape.family].transposed,
        "target_modules": sorted({_target_module(model.shape, name) for name in specs}),
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", _IDENTITY: base_identity(model)})
    write_json(folder / CONFIG, config)
    return [CONFIG, WEIGHTS]


def _hf_module(shape: Shape, name: str) -> str:
    return exported_name(shape, f"{name}.weight").removesuffix(".weight")


def _target_module(shape: Shape, name: str) -> str:
    """The suffix of a module name that PEFT matches; attn.c_proj and mlp.c_proj must differ."""
    return ".".join(_hf_module(shape, name).split(".")[-2:])


# --- reading ----------------------------------------------------------------------------------------------


def is_peft_folder(folder: Path) -> bool:
    """Whether a folder has any of PEFT's files."""
    return any((folder / name).is_file() for name in (CONFIG, WEIGHTS, PICKLE))


def read_peft(folder: Path, shape: Shape) -> StoredAdapter:
    """The adapter in a PEFT folder, under our names, checked against the model's shape."""
    if folder.suffix in (".bin", ".pt", ".pth", ".pkl") or not (folder / WEIGHTS).is_file():
        _refuse_missing(folder)
    config = _read_config(folder / CONFIG)
    _refuse_options(folder, config)
    layers = _layers(shape)
    found: dict[_Layer, dict[str, Tensor]] = {}
    with TensorFile(folder / WEIGHTS) as file:
        for name in sorted(file.names):
            layer, part = _parse_name(folder, name, layers)
            found.setdefault(layer, {})[part] = file.tensor(name).clone()
        identity, partial = file.metadata.get(_IDENTITY), file.metadata.get(_OLD_IDENTITY)
    if not found:
        raise DataError(f"{folder} holds no adapter: {WEIGHTS} is empty.")
    specs = {layer.name: _adapter_spec(folder, parts, config, layer) for layer, parts in found.items()}
    tensors = {
        f"{layer.name}.adapter.{part}": t for layer, parts in found.items() for part, t in parts.items()
    }
    base = config.get("base_model_name_or_path")
    return StoredAdapter(folder, specs, tensors, identity, partial, base if isinstance(base, str) else None)


def peft_base(folder: Path) -> str | None:
    """The base that a PEFT folder names."""
    if not (folder / WEIGHTS).is_file():
        _refuse_missing(folder)
    config = _read_config(folder / CONFIG)
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not named:
        return None
    at = f"@{revision}" if isinstance(revision, str) and parse_id(f"{named}@{revision}") else ""
    return f"{named}{at}"


def read_run_adapter(found: Checkpoint, base: str | None) -> StoredAdapter:
    """The adapters in a checkpoint of a run."""
    record = restore.base_record(found)
    if record is None:
        raise DataError(
            f"{found.path} holds a whole model, not adapters; give its folder as the model itself."
        )
    with SavedTensors(found, "model") as file:
        tensors = {name: file[name] for name in file.names}
    specs = {name: AdapterSpec(**spec) for name, spec in record["adapters"].items()}
    return StoredAdapter(found.path, specs, tensors, record.get("values"), record.get("identity"), base)


def _refuse_missing(folder: Path) -> None:
    if folder.suffix == ".bin" or (folder / PICKLE).is_file():
        raise DataError(
            f"{folder} holds its adapter as a pickle ({PICKLE}), which can run code when it is opened, so it is refused; "
            "have its author save it with save_pretrained(..., safe_serialization=True)."
        )
    raise DataError(
        f"{folder} is no adapter folder: it lacks {WEIGHTS}; give a folder that PEFT's save_pretrained or `rush export "
        "--adapter` wrote, or a run folder that was trained with adapters."
    )


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path, f"an adapter needs it beside {WEIGHTS}")
    if config.get("peft_type") != "LORA":
        raise DataError(
            f"{path}: peft_type is {config.get('peft_type')!r:.80}; allowed: 'LORA' (with or without use_dora)."
        )
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST_NUMBER:
            raise DataError(f"{path}: {key} is {value!r:.80}; it must be a number above 0.")
    return config


def _refuse_options(folder: Path, config: Mapping[str, Any]) -> None:
    for key, disabled in _MUST_BE_OFF.items():
        if key in config and config[key] not in disabled:
            raise DataError(
                f"{folder / CONFIG}: {key} is {config[key]!r:.200}, which rush does not support; merge this adapter with PEFT "
                "(merge_and_unload) and use the merged model."
            )


@dataclass(frozen=True)
class _Layer:
    name: str
    out_features: int
    in_features: int


def _layers(shape: Shape) -> dict[str, _Layer]:
    """The linear layers of the blocks, by their Hugging Face names."""
    with torch.device("meta"):
        model = build_model(shape)
    if FAMILIES[shape.family].joined:
        raise DataError(
            f"a PEFT adapter of a {shape.family} model adapts tensors that hold several layers, which rush keeps apart; merge "
            "it with PEFT (merge_and_unload) and use the merged model."
        )
    return {
        _hf_module(shape, name): _Layer(name, layer.out_features, layer.in_features)
        for role, entries in model.linears().items()
        if role != "head"
        for name, layer in entries
    }


def _parse_name(folder: Path, stored: str, layers: Mapping[str, _Layer]) -> tuple[_Layer, str]:
    """The layer and the adapter parameter of a stored tensor."""
    path = stored.removeprefix(_PREFIX).replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    for suffix, part in _PARTS.items():
        layer = layers.get(path.removesuffix(f".{suffix}"))
        if path.endswith(f".{suffix}") and layer is not None:
            return layer, part
    raise DataError(
        f"{folder} is an adapter for another model: it holds {stored}, and this model can have adapters on "
        f"{', '.join(sorted({name.split('.')[-1] for name in layers}))} of {len({name.split('.')[2] for name in layers})} layers."
    )


def _adapter_spec(
    folder: Path, parts: Mapping[str, Tensor], config: Mapping[str, Any], layer: _Layer
) -> AdapterSpec:
    dora = bool(config.get("use_dora"))
    rank = parts["a"].shape[0] if "a" in parts else 0
    wanted: dict[str, tuple[int, ...]] = {"a": (rank, layer.in_features), "b": (layer.out_features, rank)}
    wanted |= {"magnitude": (layer.out_features,)} if dora else {}
    shapes = {part: tuple(value.shape) for part, value in parts.items()}
    if shapes != wanted:
        unlike = next(part for part in [*wanted, *shapes] if shapes.get(part) != wanted.get(part))
        raise DataError(
            f"{folder} is an adapter for another model: {layer.name} has {unlike} of shape "
            f"{shapes.get(unlike, 'nothing')}, this model's layer needs {wanted.get(unlike, 'none')}."
        )
    return AdapterSpec(rank, float(config["lora_alpha"]), dora, bool(config.get("use_rslora")))


# --- attaching ----------------------------------------------------------------------------------------------


@torch.no_grad()
def attach_adapter(
    model: Decoder,
    stored: StoredAdapter,
    weights: Mapping[str, Tensor] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Attach stored adapters to a model; refuse those of another model or base.

    `weights` are those of a model with offloaded blocks; its adapters are on the device of the embedding.
    """
    if is_adapted(model):
        raise RecipeError(
            "the model has adapters already; merge them first, or give its base and one adapter."
        )
    layers = {name: layer for entries in model.linears().values() for name, layer in entries}
    for name, spec in stored.specs.items():
        layer, down = layers.get(name), stored.tensors.get(f"{name}.adapter.a")
        if layer is None or down is None or down.shape != (spec.rank, layer.in_features):
            raise DataError(
                f"{stored.path} is an adapter for another model: it adapts {name} with "
                f"{tuple(down.shape) if down is not None else 'nothing'}, this model has "
                f"{f'{layer.in_features} inputs there' if layer is not None else 'no such layer'}."
            )
    _check_base(stored, model if weights is None else weights, note)
    if weights is not None and any(spec.dora for spec in stored.specs.values()):
        raise RecipeError(
            f"{stored.path} is a DoRA adapter, which has to see whole weights; merge it first (rush merge) to use it with "
            "--offload."
        )
    for name, spec in stored.specs.items():
        layer = layers[name]
        wanted: list[tuple[str, tuple[int, ...]]] = [
            ("a", (spec.rank, layer.in_features)),
            ("b", (layer.out_features, spec.rank)),
            *([("magnitude", (layer.out_features,))] if spec.dora else []),
        ]
        for part, dims in wanted:
            value = stored.tensors.get(f"{name}.adapter.{part}")
            if value is None or tuple(value.shape) != dims or not value.is_floating_point():
                found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise DataError(f"{stored.path}: {name} needs {part} of shape {dims}, found {found}.")
    adapt(model, stored.specs)
    device = model.embedding.weight.device
    for name, layer, adapter in adapters(model):
        for part in dict(adapter.named_parameters()):
            value = stored.tensors[f"{name}.adapter.{part}"].to(device)
            setattr(adapter, part, nn.Parameter(value, requires_grad=False))
        adapter.update_base_norms(layer)


def _check_base(
    stored: StoredAdapter, base: Decoder | Mapping[str, Tensor], note: Callable[[str], None]
) -> None:
    """Refuse another base of the same shape, by its fingerprint. PEFT's own files have none."""
    if stored.identity is not None:
        same = stored.identity == base_identity(base)
    elif stored.partial is not None:
        same = stored.partial == partial_identity(
            dict(base.named_parameters()) if isinstance(base, Decoder) else base
        )
        note(
            f"{stored.path} was written by an older rush, with a fingerprint of the base's embedding, norms and head only: the linear "
            "layers were not compared; export it again to have them checked."
        )
    else:
        return
    if not same:
        raise DataError(
            f"{stored.path} was trained on another base of the same shape"
            f"{f' ({stored.base})' if stored.base else ''}: the weights differ; give the base it was trained on."
        )
