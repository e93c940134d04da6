"""Tensor parallelism: torch's `ParallelStyle`, for modules that compute on plain tensors.

Parameters are DTensors, sharded over one mesh axis, for the optimizer, the gradient norm and checkpoints. But a module reads
them as local tensors, and takes and returns plain tensors, so an attention core or a fused kernel works as on one rank, with
fewer heads or a narrower layer. The residual stream between modules is replicated, or sharded along the sequence. There are
two collectives: `all_gather` where a layer begins, `reduce` where it ends.

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
    """The residual stream on the ranks of an axis: replicated, or `sharded` along the sequence."""

    mesh: DeviceMesh
    sharded: bool

    @property
    def placement(self) -> Placement:
        return Shard(1) if self.sharded else Replicate()

    def all_gather(self, x_btd: Tensor) -> Tensor:
        """The full stream, for a sharded layer; its gradient is reduced over ranks."""
        x = DTensor.from_local(_autocast(x_btd), self.mesh, [self.placement], run_check=False)
        full: Tensor = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return full

    def reduce(self, partial_btd: Tensor) -> Tensor:
        """All-reduce, or reduce-scatter, a layer's partial output onto the stream."""
        partial = DTensor.from_local(partial_btd, self.mesh, [Partial()], run_check=False)
        out: Tensor = partial.redistribute(placements=[self.placement]).to_local()
        return out

    def local(self, x_bt: Tensor) -> Tensor:
        """This rank's positions of a full sequence."""
        if not self.sharded:
            return x_bt
        return x_bt.chunk(self.mesh.size(), dim=1)[self.mesh.get_local_rank()]


def _autocast(x_btd: Tensor) -> Tensor:
    """Cast as autocast would in the next layer, so that half as much is sent."""
    kind = x_btd.device.type
    return x_btd.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x_btd


def _is_tp_sharded(parameter: Any) -> bool:
    """Whether it is sharded by tensor parallelism alone; between passes fsdp may shard it further."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1


def _local(parameter: DTensor, reduce_grad: bool) -> Tensor:
    """The local tensor; with `reduce_grad` its gradient, from this rank's tokens, is reduced over ranks."""
    if not reduce_grad:
        return parameter.to_local()
    # A redistribution to the same placements reduces the gradient.
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])


class LocalParams:
    """Mixin of a module: weight and bias read as local tensors."""

    _parameters: dict[str, Any]
    reduce_grads: bool

    @property
    def weight(self) -> Any:
        return self._read("weight")

    @property
    def bias(self) -> Any:
        return self._read("bias")

    def _read(self, name: str) -> Any:
        parameter = self._parameters.get(name)
        return _local(parameter, self.reduce_grads) if _is_tp_sharded(parameter) else parameter  # type: ignore[arg-type]


class LocalRowwiseParams(LocalParams):
    """The same for a row-wise layer, whose bias is added after the reduction."""

    @property
    def bias(self) -> Any:
        parameter = self._parameters.get("bias")
        return None if _is_tp_sharded(parameter) else parameter


class LocalAdapterParams:
    """Mixin of an adapter: A and B read as local tensors. One of them is replicated and serves this rank's shard of the layer,
    so its gradients are reduced."""

    _parameters: dict[str, Any]

    @property
    def a(self) -> Any:
        return self._read("a")

    @property
    def b(self) -> Any:
        return self._read("b")

    def _read(self, name: str) -> Any:
        parameter = self._parameters[name]
        if not _is_tp_sharded(parameter):
            return parameter
        return _local(parameter, reduce_grad=parameter.placements[0].is_replicate())


@cache
def _with_mixin(mixin: Any, kind: Any) -> Any:
    """One class for all modules of a kind, so that compiled blocks share one graph."""
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})


def _shard(
    module: Any, mesh: DeviceMesh, mixin: type, *, reduce_grads: bool = False, **placements: Placement
) -> None:
    """Shard a module's parameters, and let it read local tensors."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    module.reduce_grads = reduce_grads
    kind: Any = type(module)
    module.__class__ = _with_mixin(mixin, kind)


@dataclass
class ColwiseLinear(ParallelStyle):
    """Column-wise parallel linear layer: each rank computes some outputs; of several fused `parts`, some of each. The A matrix of
    an adapter on it is replicated."""

    parts: int = 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows: Any = Shard(0) if self.parts == 1 else _StridedShard(0, split_factor=self.parts)
        _shard(module, device_mesh, LocalParams, weight=rows, bias=rows)
        if "adapter" in module._modules:
            _shard(module.adapter, device_mesh, LocalAdapterParams, a=Replicate(), b=rows)
        return module


@dataclass
class RowwiseLinear(ParallelStyle):
    """Row-wise parallel linear layer: each rank reads some inputs; the sum over ranks goes to the stream."""

    stream: ResidualStream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, device_mesh, LocalRowwiseParams, weight=Shard(1), bias=Replicate())
        if "adapter" in module._modules:
            # The output of A is partial, as is the layer's.
            _shard(module.adapter, device_mesh, LocalAdapterParams, a=Shard(1), b=Replicate())
        module.register_forward_hook(self._reduce)
        return module

    def _reduce(self, module: Any, _: Any, partial_btd: Tensor) -> Tensor:
        out_btd, bias = self.stream.reduce(partial_btd), module._parameters.get("bias")
        return out_btd if bias is None else out_btd + _local(bias, self.stream.sharded).to(out_btd.dtype)


@dataclass
class ReplicatedOnStream(ParallelStyle):
    """A replicated module, applied to this rank's tokens of the stream."""

    stream: ResidualStream
    takes_positions: bool = False
    """Whether its input has all positions of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicated, sharded = Replicate(), self.stream.sharded
        _shard(module, device_mesh, LocalParams, weight=replicated, bias=replicated, reduce_grads=sharded)
        if self.takes_positions:
            module.register_forward_pre_hook(lambda _, given: (self.stream.local(given[0]),))
        return module


@dataclass
class ReplicatedOnHeads(ParallelStyle):
    """A replicated module, applied to this rank's heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, device_mesh, LocalParams, weight=Replicate(), reduce_grads=True)
        return module


@dataclass
class GatheredHeads(ParallelStyle):
    """A replicated module that needs all heads of a token: they are gathered, and this rank keeps its own of the result.

    (Sums of squares would be fewer bytes to send, but each kernel of the norm would need a form of its own.)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            heads = DTensor.from_local(given[0], device_mesh, [Shard(2)], run_check=False)
            return (
                heads.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),
                *given[1:],
            )

        def keep(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            return out.chunk(device_mesh.size(), dim=2)[device_mesh.get_local_rank()]

        _shard(module, device_mesh, LocalParams, weight=Replicate(), reduce_grads=True)
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(keep)
        return module


@dataclass
class GatherInput(ParallelStyle):
    """A module whose layers read the full stream."""

    stream: ResidualStream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, given: (self.stream.all_gather(given[0]), *given[1:]))
        return module


def vocab_shard(stream: ResidualStream, vocab_size: int) -> tuple[int, int]:
    """The first token of this rank's vocab shard, and its size; the last one is smaller where they do not divide."""
    most = -(-vocab_size // stream.mesh.size())
    first = stream.mesh.get_local_rank() * most
    return first, min(most, vocab_size - first)


class LocalVocabLookup:
    """Mixin of an embedding: looks up this rank's vocab shard; other tokens are zero until the reduction.

    (torch's own style would compute the gradient of all tokens on every rank.)
    """

    _parameters: dict[str, Any]
    stream: ResidualStream

    def forward(self, tokens_bt: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        own_vd = weight.to_local()
        local_bt = tokens_bt - vocab_shard(self.stream, weight.shape[0])[0]
        elsewhere_bt = (local_bt < 0) | (local_bt >= own_vd.shape[0])
        found_btd = F.embedding(local_bt.masked_fill(elsewhere_bt, 0), own_vd)
        return self.stream.reduce(found_btd.masked_fill(elsewhere_bt[..., None], 0.0))


@dataclass
class VocabParallelEmbedding(ParallelStyle):
    """Embedding sharded over the vocabulary."""

    stream: ResidualStream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, device_mesh, LocalVocabLookup, weight=Shard(0))
        module.stream = self.stream  # type: ignore[assignment]
        return module


class VocabShardLossHead(nn.Module):
    """Wraps a loss head with its own collectives: it gets the full stream and this rank's vocab shard."""

    def __init__(self, stream: ResidualStream, head: nn.Module) -> None:
        super().__init__()
        self.stream = stream
        self.head = head

    def forward(self, hidden_btd: Tensor, head_weight_vd: Any, labels_bt: Tensor) -> Tensor:
        loss: Tensor = self.head(self.stream.all_gather(hidden_btd), head_weight_vd.to_local(), labels_bt)
        return loss


class VocabParallelLossHead(nn.Module):
    """Wraps a loss head of plain torch: its logits are sharded over the vocabulary, for torch's `loss_parallel`.

    Forward and backward run inside that context.
    """

    def __init__(self, stream: ResidualStream, head: nn.Module) -> None:
        super().__init__()
        self.stream = stream
        self.head = head

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        stream = self.stream
        hidden = DTensor.from_local(_autocast(hidden_btd), stream.mesh, [stream.placement], run_check=False)
        loss = self.head(hidden.redistribute(placements=[Replicate()]), head_weight_vd, labels_bt)
        out: Tensor = loss.to_local().clone()  # fully_shard needs a separate tensor for its hook
        return out
