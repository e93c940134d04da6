"""A whole training state on disk, restored to the last bit.

    model.safetensors      parameters and buffers; a tied tensor once, its other names in the header
    optimizer.safetensors  its tensors by the NAME of their parameter: "blocks.0.mlp.up.weight/exp_avg"
    random.safetensors     the generators of torch, CUDA, numpy and Python
    state.json             the numbers: hyperparameters, loader position, schedule, counters

Names, not positions, tie a tensor to its place: a list index silently means something else once a layer is
added. Everything is compared (names, shapes, dtypes) before the first value is copied, so a checkpoint that
does not fit leaves the model as it was. There is no pickle: reading a stranger's checkpoint runs nothing.

Of a model with adapters only what is trained is saved; state.json says which frozen base it belongs to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.models.adapters import is_adapted
from rush.parallel import Ranks
from rush.parallel.sharded import fill, gather
from rush.records.checkpoints import Checkpoint, CheckpointStore, verify
from rush.train.frozen import check_base, describe_base
from rush.train.tensors import TensorFile, describe, save_tensors

MODEL, OPTIMIZER, RANDOM, STATE = (
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)

_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
# How the update is computed, not what it computes: the build decides these, a checkpoint does not.
_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}
# Optimizer tensors that mirror their parameter; others (quantized blocks, factors) have their own shapes.
_PARAMETER_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


def save(
    store: CheckpointStore,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, Any],
    metrics: Mapping[str, float | None] | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write and seal the checkpoint of `step`; on any failure nothing of it stays and older ones are intact.

    Of several ranks all call this: sharded tensors are gathered, and rank 0 writes them. What lies on the disk is the same
    for every layout, so any other can go on from it.

    `extra` (loader state, schedule, counters) must be JSON without NaN or infinity; `load` returns it.
    `metrics` and `meta` go into the manifest; the store ranks checkpoints by `val_loss` in `metrics`.
    """
    ranks = ranks or Ranks()
    assert ranks.stages is None, "the ranks of a pipeline cannot save yet"
    tensors, aliases = _saved_tensors(model)
    tensors = gather(tensors, keep=ranks.main)
    optimizer_tensors, optimizer_state = _pack_optimizer(model, optimizer)
    optimizer_tensors = gather(optimizer_tensors, keep=ranks.main)
    # Naming a sharded base takes all ranks.
    base = describe_base(model) if is_adapted(model) else None

    def write() -> str:
        return str(
            _write(
                store,
                step,
                (tensors, aliases),
                (optimizer_tensors, optimizer_state),
                base,
                extra,
                metrics,
                meta,
            )
        )

    return Path(ranks.once(write))


def _write(
    store: CheckpointStore,
    step: int,
    weights: tuple[dict[str, Tensor], dict[str, str]],
    moments: tuple[dict[str, Tensor], dict[str, Any]],
    base: dict[str, Any] | None,
    extra: Mapping[str, Any],
    metrics: Mapping[str, float | None] | None,
    meta: Mapping[str, Any] | None,
) -> Path:
    folder = store.begin(step)
    try:
        tensors, aliases = weights
        save_tensors(folder / MODEL, tensors, {"format": "pt", "tied": json.dumps(aliases)})
        optimizer_tensors, optimizer_state = moments
        save_tensors(folder / OPTIMIZER, optimizer_tensors, {})
        random_tensors, random_state = _pack_random()
        save_tensors(folder / RANDOM, random_tensors, {})
        state = {"step": step, "extra": dict(extra), "optimizer": optimizer_state, "random": random_state}
        if base is not None:
            state["base"] = base
        write_json_atomic(folder / STATE, state)
        return store.commit(step, {"metrics": dict(metrics or {}), **(meta or {})})
    finally:
        # Once committed the hidden folder is gone and this does nothing.
        store.discard(step)


def load(
    checkpoint: Checkpoint | Path, model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Restore model, optimizer and the random generators in place, and return what was saved as `extra`.

    A plain path is verified first; a Checkpoint already was. Without an optimizer only the weights are
    restored, and the generators are left alone.
    """
    checkpoint = _verified(checkpoint)
    state = _read_state(checkpoint.path / STATE)
    _check_kind(checkpoint.path, state, model)
    tensors, aliases = _saved_tensors(model)
    with TensorFile(checkpoint.path / MODEL) as weights:
        if weights.tied != aliases:
            raise DataError(
                f"{weights.path} ties {weights.tied or 'nothing'}, the model ties {aliases or 'nothing'}."
            )
        weights.expect({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        if optimizer is not None:
            with TensorFile(checkpoint.path / OPTIMIZER) as moments:
                _restore_optimizer(moments, state["optimizer"], model, optimizer)
        with torch.no_grad():
            for name, tensor in tensors.items():
                fill(tensor, weights.tensor(name))
    if optimizer is not None:
        _restore_random(checkpoint.path / RANDOM, state["random"])
    extra: dict[str, Any] = state["extra"]
    return extra


def load_weights(checkpoint: Checkpoint | Path) -> dict[str, Tensor]:
    """The weights alone, verified, on the CPU; tied names share one tensor. For generation and export."""
    checkpoint = _verified(checkpoint)
    assert base_record(checkpoint) is None, "adapters alone are no model"
    with TensorFile(checkpoint.path / MODEL) as weights:
        # A copy, because what the library returns may still lie on the file.
        found = {name: weights.tensor(name).clone() for name in weights.names}
        found.update({alias: found[name] for alias, name in weights.tied.items()})
    return found


def base_record(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What a checkpoint of adapters says about its base; None for one that holds the whole model."""
    base: dict[str, Any] | None = _read_state(checkpoint.path / STATE).get("base")
    return base


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes that torch.compile puts in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _verified(checkpoint: Checkpoint | Path) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    if checkpoint.suffix in _PICKLES:
        raise DataError(
            f"{checkpoint} is a pickle file, which can run code when read; rush reads only safetensors "
            "checkpoint folders such as RUN/checkpoints/step-000100."
        )
    return verify(checkpoint)


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads(path.read_bytes()) if path.is_file() else None
    if not isinstance(state, dict) or not state.keys() >= {"step", "extra", "optimizer", "random"}:
        raise DataError(
            f"{path} is not the state of a training run; a run cannot go on from this checkpoint."
        )
    return state


def _check_kind(path: Path, state: Mapping[str, Any], model: nn.Module) -> None:
    saved = state.get("base")
    if (saved is not None) != is_adapted(model):
        holds, has = ("adapters", "none") if saved is not None else ("a whole model", "adapters")
        raise DataError(
            f"{path} holds {holds}, this run has {has}; the techniques are not those it was saved with."
        )
    if saved is not None:
        check_base(path, saved, model)


def _saved_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a checkpoint holds: all of the model, or of one with adapters what is trained."""
    if not is_adapted(model):
        return _named_tensors(model)
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}, {}


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of the model's state under its clean name, and the other names of tied ones."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}
    for raw_name, tensor in model.state_dict(keep_vars=True).items():
        name = clean_name(raw_name)
        assert isinstance(tensor, Tensor), f"{name} is extra state, not a tensor"
        if id(tensor) in names:
            aliases[name] = names[id(tensor)]
        else:
            names[id(tensor)] = name
            tensors[name] = tensor
    return tensors, aliases


def _pack_optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer as tensors "parameter/key" (and "group.0/lr") plus a JSON table of everything else."""
    names = _parameter_names(model)
    tensors: dict[str, Tensor] = {}

    def pack(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{owner}/{key}"] = value
                table[key] = {"tensor": True}
            else:
                table[key] = {"value": value}
        return table

    groups = []
    for index, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
        groups.append(
            {"params": [names[id(p)] for p in group["params"]], "hyper": pack(f"group.{index}", hyper)}
        )
    state = {names[id(p)]: pack(names[id(p)], values) for p, values in optimizer.state.items()}
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": state}


def _restore_optimizer(
    file: TensorFile, saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> None:
    if saved["class"] != type(optimizer).__name__:
        raise DataError(
            f"{file.path} was saved by {saved['class']}, this run uses {type(optimizer).__name__}."
        )
    names = _parameter_names(model)
    groups = optimizer.param_groups
    ours, theirs = (
        [[names[id(p)] for p in g["params"]] for g in groups],
        [g["params"] for g in saved["groups"]],
    )
    if ours != theirs:
        raise DataError(f"{file.path} groups the parameters differently than this run does.")
    # Compare everything first, so that a checkpoint that does not fit changes nothing.
    parameters = {names[id(p)]: (p, group) for group in groups for p in group["params"]}
    wanted = {
        f"{name}/{key}"
        for name, table in saved["state"].items()
        for key, cell in table.items()
        if "tensor" in cell
    }
    for index, group in enumerate(groups):
        hyper = saved["groups"][index]["hyper"]
        wanted |= {f"group.{index}/{key}" for key, cell in hyper.items() if "tensor" in cell}
        for key in hyper.keys() - group.keys():
            raise DataError(f"{file.path} sets {key!r}, which this {type(optimizer).__name__} does not know.")
    file.expect_names(wanted)
    for name, table in saved["state"].items():
        for key, cell in table.items():
            if "tensor" in cell:
                _check_state_tensor(file, name, key, parameters[name][0], optimizer)
    for index, group in enumerate(groups):
        for key, cell in saved["groups"][index]["hyper"].items():
            value = file.tensor(f"group.{index}/{key}").clone() if "tensor" in cell else cell["value"]
            group[key] = tuple(value) if isinstance(group[key], tuple) else value
    for name, table in saved["state"].items():
        parameter, group = parameters[name]
        restored: dict[str, Any] = {}
        for key, cell in table.items():
            if "tensor" not in cell:
                restored[key] = cell["value"]
                continue
            value = file.tensor(f"{name}/{key}")
            # Fused and capturable updates read their step count on the device, the others on the CPU.
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            device = parameter.device if on_device else torch.device("cpu")
            # The parameter's own strides, too: fused kernels walk both through memory side by side.
            like = parameter if value.shape == parameter.shape else value
            restored[key] = torch.empty_like(like, dtype=value.dtype, device=device)
            fill(restored[key], value)
        optimizer.state[parameter] = restored


def _check_state_tensor(
    file: TensorFile, name: str, key: str, parameter: Tensor, optimizer: Optimizer
) -> None:
    existing = optimizer.state.get(parameter, {}).get(key)
    shape, dtype = file.header(f"{name}/{key}")
    if isinstance(existing, Tensor):
        fits = shape == existing.shape and dtype == existing.dtype
    elif key in _PARAMETER_SHAPED:
        fits = shape == parameter.shape and dtype.is_floating_point
    else:
        fits = key != "step" or shape.numel() == 1
    if not fits:
        raise DataError(
            f"{file.path}: {name}/{key} is {describe(shape, dtype)}, which does not fit its parameter "
            f"({describe(parameter.shape, parameter.dtype)})."
        )


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}


def _pack_random() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    numbers = np.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    tensors["numpy"] = torch.from_numpy(numbers["state"]["key"].astype(np.int64))
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    numpy_state = {"pos": int(numbers["state"]["pos"]), "has_gauss": int(numbers["has_gauss"])}
    return tensors, {
        "numpy": numpy_state | {"gauss": float(numbers["gauss"])},
        "python": {"version": version, "gauss": gauss},
    }


def _restore_random(path: Path, saved: Mapping[str, Any]) -> None:
    with TensorFile(path) as file:
        torch.set_rng_state(file.tensor("torch").clone())
        if torch.cuda.is_available():
            # A run may go on with fewer or more devices; those it had before go on where they were.
            for index in range(torch.cuda.device_count()):
                if f"cuda.{index}" in file.names:
                    torch.cuda.set_rng_state(file.tensor(f"cuda.{index}").clone(), index)
        numpy_key = file.tensor("numpy").numpy().astype(np.uint32)
        python_words = tuple(file.tensor("python").tolist())
    numbers = saved["numpy"]
    np.random.set_state(("MT19937", numpy_key, numbers["pos"], numbers["has_gauss"], numbers["gauss"]))
    random.setstate((saved["python"]["version"], python_words, saved["python"]["gauss"]))
