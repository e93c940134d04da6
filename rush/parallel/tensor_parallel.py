"""Layers of which every rank computes a part: torch's `ParallelStyle`, for modules that compute on plain tensors.

Parameters are DTensors, cut over the ranks of one axis of the mesh; the optimizer, the gradient's norm and checkpoints
know them as such. But a module reads them as the plain tensors that this rank holds, and gets and gives plain tensors,
so whatever is in its slots (an attention core, a fused kernel) works as on one rank, on fewer heads or a narrower layer.
Between modules lies the residual stream: whole on every rank, or cut along the sequence. Two exchanges are all there is:
`gathered` where a layer begins, `summed` where it ends.

Shapes: b batch, t position, d hidden, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class ResidualStream:
    """How the residual stream lies on the ranks of an axis: whole on each, or a piece of the sequence on each."""

    mesh: DeviceMesh
    sharded: bool

    @property
    def placement(self) -> Placement:
        return Shard(1) if self.sharded else Replicate()

    def all_gather(self, x_btd: Tensor) -> Tensor:
        """All of the stream, for a layer of which this rank has a part; backward the gradients of all parts are summed."""
        lying = DTensor.from_local(_as_multiplied(x_btd), self.mesh, [self.placement], run_check=False)
        whole: Tensor = lying.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole

    def reduce(self, part_btd: Tensor) -> Tensor:
        """What the parts of a layer add up to, as it lies on the stream."""
        lying = DTensor.from_local(part_btd, self.mesh, [Partial()], run_check=False)
        out: Tensor = lying.redistribute(placements=[self.placement]).to_local()
        return out

    def own(self, x_bt: Tensor) -> Tensor:
        """This rank's piece of something that is there for every position."""
        if not self.sharded:
            return x_bt
        return x_bt.chunk(self.mesh.size(), dim=1)[self.mesh.get_local_rank()]


def _as_multiplied(x_btd: Tensor) -> Tensor:
    """What autocast would make of it in the layer that follows anyway: so half as much is sent."""
    kind = x_btd.device.type
    return x_btd.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x_btd


def _is_cut_once(parameter: Any) -> bool:
    """Whether it is as tensor parallelism made it; between passes another axis (fsdp) may hold it in smaller parts."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1


def _own(parameter: DTensor, of_own_tokens: bool) -> Tensor:
    """The plain tensor that this rank holds. Its gradient may come from the rank's own tokens: then it is summed."""
    if not of_own_tokens:
        return parameter.to_local()
    # Asking for what is already so gives a place to sum them.
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])


class LocalParams:
    """Before a module's class: its weight and bias read as the plain tensors that this rank holds."""

    _parameters: dict[str, Any]
    sees_own_tokens: bool

    @property
    def weight(self) -> Any:
        return self._read("weight")

    @property
    def bias(self) -> Any:
        return self._read("bias")

    def _read(self, name: str) -> Any:
        parameter = self._parameters.get(name)
        return _own(parameter, self.sees_own_tokens) if _is_cut_once(parameter) else parameter  # type: ignore[arg-type]


class LocalRowwiseParams(LocalParams):
    """The same for a layer whose outputs are summed over ranks: its bias is added once, after that."""

    @property
    def bias(self) -> Any:
        parameter = self._parameters.get("bias")
        return None if _is_cut_once(parameter) else parameter


class LocalAdapterParams:
    """Before an adapter's class: its two thin matrices read as the plain tensors that this rank holds. One of them is whole
    on every rank and works for this rank's part of the layer only, so its gradients are summed."""

    _parameters: dict[str, Any]

    @property
    def a(self) -> Any:
        return self._read("a")

    @property
    def b(self) -> Any:
        return self._read("b")

    def _read(self, name: str) -> Any:
        parameter = self._parameters[name]
        if not _is_cut_once(parameter):
            return parameter
        return _own(parameter, of_own_tokens=parameter.placements[0].is_replicate())


@cache
def _in_front(reading: Any, kind: Any) -> Any:
    """One class for all modules of a kind, so that a compiler that has seen one block has seen them all."""
    return type(f"{reading.__name__}{kind.__name__}", (reading, kind), {})


def _divide(
    module: Any, mesh: DeviceMesh, reading: type, *, own_tokens: bool = False, **placements: Placement
) -> None:
    """Cut a module's parameters, and let it read this rank's part of them."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    module.sees_own_tokens = own_tokens
    kind: Any = type(module)
    module.__class__ = _in_front(reading, kind)


@dataclass
class ColwiseLinear(ParallelStyle):
    """A linear layer of which each rank makes some of the outputs; of several equal parts side by side, some of each. So
    does an adapter on it, whose first matrix (few rows) every rank has whole."""

    parts: int = 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows: Any = Shard(0) if self.parts == 1 else _StridedShard(0, split_factor=self.parts)
        _divide(module, device_mesh, LocalParams, weight=rows, bias=rows)
        if "adapter" in module._modules:
            _divide(module.adapter, device_mesh, LocalAdapterParams, a=Replicate(), b=rows)
        return module


@dataclass
class RowwiseLinear(ParallelStyle):
    """A linear layer of which each rank reads some of the inputs; the sum over ranks goes to the stream."""

    stream: ResidualStream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, device_mesh, LocalRowwiseParams, weight=Shard(1), bias=Replicate())
        if "adapter" in module._modules:
            # What its first matrix makes of a rank's inputs is a part of a sum, and so is then the layer's output anyway.
            _divide(module.adapter, device_mesh, LocalAdapterParams, a=Shard(1), b=Replicate())
        module.register_forward_hook(self._end)
        return module

    def _end(self, module: Any, _: Any, part_btd: Tensor) -> Tensor:
        out_btd, bias = self.stream.reduce(part_btd), module._parameters.get("bias")
        return out_btd if bias is None else out_btd + _own(bias, self.stream.sharded).to(out_btd.dtype)


@dataclass
class ReplicatedOnStream(ParallelStyle):
    """A module that every rank has whole, and uses for the tokens it has of the stream."""

    stream: ResidualStream
    takes_positions: bool = False
    """Its input is of every position, whatever the rank has of the stream."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole, cut = Replicate(), self.stream.sharded
        _divide(module, device_mesh, LocalParams, weight=whole, bias=whole, own_tokens=cut)
        if self.takes_positions:
            module.register_forward_pre_hook(lambda _, given: (self.stream.own(given[0]),))
        return module


@dataclass
class GatherInput(ParallelStyle):
    """A module whose layers all read the whole stream."""

    stream: ResidualStream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, given: (self.stream.all_gather(given[0]), *given[1:]))
        return module


def vocab_shard(stream: ResidualStream, vocabulary: int) -> tuple[int, int]:
    """The first word that this rank has of a vocabulary, and how many: the last one has fewer where they do not divide."""
    most = -(-vocabulary // stream.mesh.size())
    first = stream.mesh.get_local_rank() * most
    return first, min(most, vocabulary - first)


class LocalVocabLookup:
    """Before an embedding's class: it looks up the words that this rank has; the others' are zero until ranks are summed.

    (torch's own style would make the gradient of all words on every rank.)
    """

    _parameters: dict[str, Any]
    stream: ResidualStream

    def forward(self, tokens_bt: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        own_vd = weight.to_local()
        words_bt = tokens_bt - vocab_shard(self.stream, weight.shape[0])[0]
        elsewhere_bt = (words_bt < 0) | (words_bt >= own_vd.shape[0])
        found_btd = F.embedding(words_bt.masked_fill(elsewhere_bt, 0), own_vd)
        return self.stream.reduce(found_btd.masked_fill(elsewhere_bt[..., None], 0.0))


@dataclass
class VocabParallelEmbedding(ParallelStyle):
    """An embedding of which each rank has some of the words."""

    stream: ResidualStream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, device_mesh, LocalVocabLookup, weight=Shard(0))
        module.stream = self.stream  # type: ignore[assignment]
        return module


class VocabShardLossHead(nn.Module):
    """Around a loss head that computes on plain tensors and settles with the other ranks what they must know of each other:
    it gets all of the stream and the words of this rank."""

    def __init__(self, stream: ResidualStream, head: nn.Module) -> None:
        super().__init__()
        self.stream = stream
        self.head = head

    def forward(self, hidden_btd: Tensor, head_weight_vd: Any, labels_bt: Tensor) -> Tensor:
        loss: Tensor = self.head(self.stream.all_gather(hidden_btd), head_weight_vd.to_local(), labels_bt)
        return loss


class VocabParallelLossHead(nn.Module):
    """Around a loss head of plain torch: its logits are cut by words, and torch's `loss_parallel` does the rest.

    Forward and backward belong inside that context.
    """

    def __init__(self, stream: ResidualStream, head: nn.Module) -> None:
        super().__init__()
        self.stream = stream
        self.head = head

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        stream = self.stream
        lying = DTensor.from_local(
            _as_multiplied(hidden_btd), stream.mesh, [stream.placement], run_check=False
        )
        loss = self.head(lying.redistribute(placements=[Replicate()]), head_weight_vd, labels_bt)
        out: Tensor = loss.to_local().clone()  # fully_shard wants a tensor of its own to hang its hook on
        return out
