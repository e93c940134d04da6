"""A training state as named tensors and a JSON table; and the states of random generators.

Optimizer tensors are named after their parameter ("blocks.0.mlp.up.weight/exp_avg"), those of a group after its number
("group.0/lr"). Names, not positions, identify a tensor: a list index silently changes its meaning once a layer is
added.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, TypeAdapter
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypedDict

from rush.checkpoint.tensor_names import TensorFile
from rush.errors import DataError
from rush.models.adapters import is_adapted
from rush.models.shape import LARGEST, LARGEST_NUMBER
from rush.records.typed import one_of

# How the update is computed, not what it computes: the build decides these, a checkpoint does not.
_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}


class _Cell(TypedDict, total=False):
    """A value of the optimizer: in its file of tensors, or here."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    tensor: bool
    value: Any


def _not_empty(cell: _Cell) -> _Cell:
    if not cell:
        raise ValueError("neither a tensor nor a value")
    return cell


Cells = dict[str, Annotated[_Cell, AfterValidator(_not_empty)]]


class OptimizerGroup(TypedDict):
    params: list[str]
    hyper: Cells


OptimizerTable = TypedDict(
    "OptimizerTable", {"class": str, "groups": list[OptimizerGroup], "state": dict[str, Cells]}
)
"""The optimizer without its tensors: class, groups, and the state of each parameter by name."""


def _adapter_settings(spec: dict[str, Any]) -> dict[str, Any]:
    rank, alpha, flags = spec.get("rank"), spec.get("alpha"), spec.keys() - {"rank", "alpha"}
    if (
        type(rank) is not int
        or not 0 < rank <= LARGEST["hidden"]
        or not isinstance(alpha, int | float)
        or isinstance(alpha, bool)
        or not 0 < alpha < LARGEST_NUMBER
        or flags - {"dora", "scale_by_root"}
        or any(type(spec[flag]) is not bool for flag in flags)
    ):
        raise ValueError(f"{spec!r:.120} are no settings of an adapter")
    return spec


def _stored_form(form: dict[str, str]) -> dict[str, str]:
    if form.keys() != {"kind", "backend"}:
        raise ValueError(f"{form!r:.120} is no form of quantized weights")
    return form


class BaseDigests(TypedDict):
    """Which base adapters belong to. Old checkpoints have `identity`, of some of its values, in place of `values`."""

    digest: str
    """Digest of its exact values."""
    values: NotRequired[str]
    """Digest of its values rounded to bf16."""
    identity: NotRequired[str]
    adapters: dict[str, Annotated[dict[str, Any], AfterValidator(_adapter_settings)]]
    """The spec of each layer's adapter."""


class BaseRecord(BaseDigests):
    """The frozen base of adapters."""

    dtype: Annotated[str, one_of("float32", "bfloat16", "float16", "float64")]
    form: Annotated[dict[str, str], AfterValidator(_stored_form)] | None
    """How it is quantized."""


class StateRecord(TypedDict):
    """`state.json` of a checkpoint."""

    step: int
    extra: dict[str, Any]
    optimizer: OptimizerTable
    random: dict[str, Any]
    base: NotRequired[BaseRecord]


STATE_SCHEMA = TypeAdapter(StateRecord)


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes that torch.compile puts in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}


def pack_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint (with adapters only the trained ones), and the aliases of tied tensors."""
    if not is_adapted(model):
        return _named_tensors(model)
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}, {}


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of the model's state under its clean name, and the aliases of tied ones."""
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


def pack_optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], OptimizerTable]:
    """The optimizer as tensors "parameter/key" (and "group.0/lr") plus a JSON table of everything else."""
    names = parameter_names(model)
    tensors: dict[str, Tensor] = {}

    def pack(owner: str, values: Mapping[str, Any]) -> Cells:
        table: Cells = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{owner}/{key}"] = value
                table[key] = {"tensor": True}
            else:
                table[key] = {"value": value}
        return table

    groups: list[OptimizerGroup] = []
    for index, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
        groups.append(
            {"params": [names[id(p)] for p in group["params"]], "hyper": pack(f"group.{index}", hyper)}
        )
    state = {names[id(p)]: pack(names[id(p)], values) for p, values in optimizer.state.items()}
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": state}


def join_optimizers(tables: Iterable[OptimizerTable]) -> OptimizerTable:
    """One table of an optimizer of which every stage of a pipeline has its parameters."""
    first, *others = tables
    groups: list[OptimizerGroup] = [
        {"params": list(group["params"]), "hyper": group["hyper"]} for group in first["groups"]
    ]
    state = dict(first["state"])
    for table in others:
        assert len(table["groups"]) == len(groups), "stages group their parameters unlike each other"
        for group, more in zip(groups, table["groups"], strict=True):
            group["params"] += [name for name in more["params"] if name not in set(group["params"])]
        state |= {name: cells for name, cells in table["state"].items() if name not in state}
    return {"class": first["class"], "groups": groups, "state": state}


def pack_random() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The generators of torch, CUDA, numpy and Python."""
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


def read_random(path: Path, saved: Mapping[str, Any]) -> Callable[[], None]:
    """A function that restores the generators; each state is validated on a separate generator first."""
    try:
        with TensorFile(path) as file:
            states = {name: file.tensor(name).clone() for name in file.names}
        numbers, python = saved["numpy"], saved["python"]
        numpy_key = states["numpy"].numpy().astype(np.uint32)
        numpy_state = ("MT19937", numpy_key, numbers["pos"], numbers["has_gauss"], numbers["gauss"])
        python_state = (python["version"], tuple(states["python"].tolist()), python["gauss"])
        # A run may resume with fewer or more devices; those it had before keep their states.
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [index for index in range(found) if f"cuda.{index}" in states]
        torch.Generator().set_state(states["torch"])
        for index in devices:
            torch.Generator(f"cuda:{index}").set_state(states[f"cuda.{index}"])
        np.random.RandomState().set_state(numpy_state)
        random.Random().setstate(python_state)
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        IndexError,
        RuntimeError,
    ) as error:
        raise DataError(
            f"{path} and state.json do not hold the state of random generators ({error!r:.200})."
        ) from None

    def restore() -> None:
        torch.set_rng_state(states["torch"])
        for index in devices:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)
        np.random.set_state(numpy_state)
        random.setstate(python_state)

    return restore
