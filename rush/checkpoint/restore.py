"""Save and restore a training state bit for bit, into any layout.

    model.safetensors      parameters and buffers; a tied tensor once, its other names in the header
    optimizer.safetensors  its tensors by the NAME of their parameter: "blocks.0.mlp.up.weight/exp_avg"
    random.safetensors     the generators of torch, CUDA, numpy and Python
    state.json             the numbers: hyperparameters, loader position, schedule, counters

That is what one rank writes. Several write pieces, `model-00001-of-00004.safetensors` and so on, and `pieces.json` has their
offsets. Either is read by any layout: each rank reads its own shards.

Names, shapes and dtypes are compared before the first value is copied, so a checkpoint that does not fit leaves the model
unchanged. There is no pickle: reading an untrusted checkpoint runs no code. For a model with adapters only the trained
tensors are saved; state.json records the frozen base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from rush.checkpoint.frozen_base import check_base
from rush.checkpoint.reader import SavedTensors
from rush.checkpoint.saver import Saver
from rush.checkpoint.state import (
    STATE_SCHEMA,
    BaseRecord,
    Cells,
    OptimizerTable,
    StateRecord,
    pack_model,
    parameter_names,
    read_random,
)
from rush.checkpoint.tensor_names import describe
from rush.checkpoint.writer import RANDOM, STATE
from rush.errors import DataError
from rush.files import read_file
from rush.models.adapters import is_adapted
from rush.models.shape import LARGEST_NUMBER
from rush.parallel import Ranks
from rush.parallel.placement import table_like
from rush.parallel.sharded import is_sharded, sharded_dims
from rush.records.checkpoint_store import Checkpoint, CheckpointStore, verify
from rush.records.typed import wrong_field

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"

_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
# Optimizer tensors that mirror their parameter; others (quantized blocks, scales) have their own shapes.
_PARAMETER_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"}


def save(
    store: CheckpointStore,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, Any],
    metrics: Mapping[str, float | None] | None = None,
    *,
    ranks: Ranks | None = None,
) -> Path:
    """Write and commit the checkpoint of `step`, synchronously; on failure nothing of it stays and older ones are intact.

    All ranks call this. A run saves with a `Saver`, in the background.
    """
    saver = Saver(store, ranks or Ranks(), background=False)
    saver.save(step, model, optimizer, extra, metrics)
    return store.path(step)


def load(
    checkpoint: Checkpoint | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Restore model, optimizer and the random generators in place, and return what was saved as `extra`.

    A path is verified first; a Checkpoint already was. Without an optimizer only the weights are restored. A pipeline stage
    (`ranks`) reads only its own tensors.
    """
    checkpoint, part = _verified(checkpoint), ranks is not None and ranks.size("pp") > 1
    state = _read_state(checkpoint.path / STATE)
    _check_kind(checkpoint.path, state, model, ranks)
    restore_random = (
        read_random(checkpoint.path / RANDOM, state["random"]) if optimizer is not None else lambda: None
    )
    tensors, aliases = pack_model(model)
    with SavedTensors(checkpoint, "model") as weights:
        if weights.tied != aliases and not part:
            raise DataError(
                f"{weights.path} ties {weights.tied or 'nothing'}, the model ties {aliases or 'nothing'}."
            )
        weights.expect({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, part=part)
        for name, tensor in tensors.items():
            weights.check(tensor, name)
        if optimizer is not None:
            with SavedTensors(checkpoint, "optimizer") as moments:
                _restore_optimizer(moments, state["optimizer"], model, optimizer, part)
        for name, tensor in tensors.items():
            weights.fill(tensor, name)
    restore_random()
    return state["extra"]


def load_weights(checkpoint: Checkpoint | Path) -> dict[str, Tensor]:
    """The weights, verified, on the CPU; tied names share one tensor. For generation."""
    with open_weights(checkpoint) as weights:
        found = {name: weights[name] for name in weights.names}
        found.update({alias: found[name] for alias, name in weights.tied.items()})
    return found


def open_weights(checkpoint: Checkpoint | Path) -> SavedTensors:
    """The weights, verified, read lazily. For export."""
    checkpoint = _verified(checkpoint)
    assert base_record(checkpoint) is None, "adapters alone are no model"
    return SavedTensors(checkpoint, "model")


def base_record(checkpoint: Checkpoint) -> BaseRecord | None:
    """The base's record in a checkpoint of adapters; None for a full model."""
    return _read_state(checkpoint.path / STATE).get("base")


def _verified(checkpoint: Checkpoint | Path) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    if checkpoint.suffix in _PICKLES:
        raise DataError(
            f"{checkpoint} is a pickle file, which can run code when read; rush reads only safetensors "
            "checkpoint folders such as RUN/checkpoints/step-000100."
        )
    return verify(checkpoint)


def _read_state(path: Path) -> StateRecord:
    try:
        return STATE_SCHEMA.validate_json(read_file(path) if path.is_file() else b"")
    except ValidationError as error:
        raise DataError(
            f"{path} is not the state of a training run ({wrong_field(error)}); a run cannot resume from this checkpoint."
        ) from None


def _check_kind(path: Path, state: StateRecord, model: nn.Module, ranks: Ranks | None) -> None:
    saved = state.get("base")
    if (saved is not None) != is_adapted(model):
        holds, has = ("adapters", "none") if saved is not None else ("a whole model", "adapters")
        raise DataError(
            f"{path} holds {holds}, this run has {has}; the techniques are not those it was saved with."
        )
    if saved is not None:
        check_base(path, saved, model, ranks)


def _restore_optimizer(
    file: SavedTensors, saved: OptimizerTable, model: nn.Module, optimizer: Optimizer, part: bool
) -> None:
    names = parameter_names(model)
    groups = optimizer.param_groups
    # A pipeline stage has some of the parameters.
    parameters = {names[id(p)]: (p, group) for group in groups for p in group["params"]}
    theirs = {
        name: table
        for name, table in _check_optimizer(file, saved, names, optimizer, part).items()
        if name in parameters
    }
    # Check everything first, so that a checkpoint that does not fit changes nothing.
    wanted = {
        f"{name}/{key}" for name, table in theirs.items() for key, cell in table.items() if "tensor" in cell
    }
    for index, group in enumerate(groups):
        hyper = saved["groups"][index]["hyper"]
        wanted |= {f"group.{index}/{key}" for key, cell in hyper.items() if "tensor" in cell}
        for key in hyper.keys() - group.keys():
            raise DataError(f"{file.path} sets {key!r}, which this {type(optimizer).__name__} does not know.")
        for key, cell in hyper.items():
            if "tensor" not in cell and not _fits(key, cell.get("value"), group[key]):
                raise DataError(
                    f"{file.path}: {key} of the optimizer is {cell.get('value')!r:.80}, this run has {group[key]!r:.80}."
                )
    file.expect_names(wanted, part=part)
    for name, table in theirs.items():
        for key, cell in table.items():
            if "tensor" in cell:
                _check_state_tensor(file, name, key, parameters[name][0], optimizer)
    for index, group in enumerate(groups):
        for key, cell in saved["groups"][index]["hyper"].items():
            value = file[f"group.{index}/{key}"] if "tensor" in cell else cell["value"]
            # JSON may hold a float as an integer, of any size.
            kind = type(group[key]) if isinstance(group[key], float | tuple) else None
            group[key] = kind(value) if kind is not None and not isinstance(value, Tensor) else value
    for name, table in theirs.items():
        parameter, group = parameters[name]
        restored: dict[str, Any] = {}
        for key, cell in table.items():
            if "tensor" not in cell:
                restored[key] = cell["value"]
                continue
            # Fused and capturable updates read their step count on the device, the others on the CPU.
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            device = parameter.device if on_device else torch.device("cpu")
            restored[key] = _like(file, f"{name}/{key}", parameter, device)
            file.fill(restored[key], f"{name}/{key}", by_rows=True)
        optimizer.state[parameter] = restored


def _fits(key: str, saved: Any, ours: Any) -> bool:
    """Whether a saved hyperparameter can take the place of ours. A beta of 1 or more would make moments of no meaning."""
    return _alike(saved, ours) and (key != "betas" or all(0 <= beta < 1 for beta in saved))


def _alike(saved: Any, ours: Any) -> bool:
    """Whether a saved hyperparameter is of the kind of ours: a finite number, the same flag, or as many numbers."""
    if isinstance(ours, tuple):
        return isinstance(saved, list) and len(saved) == len(ours) and all(map(_alike, saved, ours))
    if isinstance(ours, bool) or ours is None:
        # Flags (such as amsgrad) select the state or the update: the recipe sets them, not the checkpoint.
        return (isinstance(saved, bool) or saved is None) and bool(saved) == bool(ours)
    if isinstance(ours, int | float | Tensor):
        number = isinstance(saved, int | float) and not isinstance(saved, bool)
        return number and abs(saved) < LARGEST_NUMBER
    return type(saved) is type(ours)


def _check_optimizer(
    file: SavedTensors, saved: OptimizerTable, names: Mapping[int, str], optimizer: Optimizer, part: bool
) -> Mapping[str, Cells]:
    """The table of parameters; refuses the state of another optimizer or other groups."""
    kind, state = saved["class"], saved["state"]
    theirs = [set(group["params"]) for group in saved["groups"]]
    if kind != type(optimizer).__name__:
        raise DataError(f"{file.path} was saved by {kind}, this run uses {type(optimizer).__name__}.")
    ours = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    alike = len(ours) == len(theirs) and all(
        a <= b if part else a == b for a, b in zip(ours, theirs, strict=True)
    )
    if not alike or not state.keys() <= set().union(*theirs):
        raise DataError(f"{file.path} groups the parameters differently than this run does.")
    return state


def _like(file: SavedTensors, name: str, parameter: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor of the optimizer's state."""
    shape, dtype = file.header(name)
    if shape == parameter.shape:
        # With the parameter's strides (and shards), which fused kernels rely on.
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if is_sharded(parameter) and shape.numel() > 1:
        table = _by_rows(shape, parameter)
        assert table is not None, "blocks that the layout splits were refused"
        return table_like(parameter, table, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _by_rows(shape: torch.Size, parameter: Tensor) -> tuple[int, ...] | None:
    """The 2-d shape of a value per block of a parameter (a scale); None where a block is not within a row, or not within a rank's
    shard of it."""
    rows, count = parameter.shape[0], shape.numel()
    if parameter.dim() != 2 or count % rows or parameter.numel() % count:
        return None
    width, block = parameter.shape[1], parameter.numel() // count
    pieces = math.prod(sharded.ranks for sharded in sharded_dims(parameter) if sharded.dim == 1)
    return None if width % block or (width // pieces) % block else (rows, count // rows)


def _check_state_tensor(
    file: SavedTensors, name: str, key: str, parameter: Tensor, optimizer: Optimizer
) -> None:
    existing = optimizer.state.get(parameter, {}).get(key)
    shape, dtype = file.header(f"{name}/{key}")
    if isinstance(existing, Tensor):
        # Block scales are flat on one rank, and 2-d where rows are sharded.
        alike = key not in _PARAMETER_SHAPED and shape.numel() == existing.numel()
        fits = dtype == existing.dtype and (shape == existing.shape or alike)
    elif key in _PARAMETER_SHAPED:
        fits = shape == parameter.shape and dtype.is_floating_point
    else:
        fits = key != "step" or shape.numel() == 1
    if not fits:
        raise DataError(
            f"{file.path}: {name}/{key} is {describe(shape, dtype)}, which does not fit its parameter "
            f"({describe(parameter.shape, parameter.dtype)})."
        )
    if (
        is_sharded(parameter)
        and shape.numel() > 1
        and shape != parameter.shape
        and _by_rows(shape, parameter) is None
    ):
        raise DataError(
            f"{file.path}: {name}/{key} is {describe(shape, dtype)}, one number for each of its parameter's blocks, which "
            "this layout would split; resume with the layout that the run was saved with."
        )
    # A meta tensor: only the offsets matter here.
    file.check(parameter if shape == parameter.shape else file.meta(f"{name}/{key}"), f"{name}/{key}")
