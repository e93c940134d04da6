"""LoRA and DoRA: a frozen linear layer with a trained low-rank update.

The weight W is frozen; B·A is trained, with A [rank, in] and B [out, rank]: rank·(in + out) parameters instead of in·out. B
is initialized to zeros, so an adapted model starts bit-identical to its base. DoRA also trains the norm of each row: the
rows of W + s·B·A are scaled to the norm `magnitude`.

An adapter is a child module of its layer (`blocks.0.attention.q.adapter`), whose forward is replaced. So the base keeps its
parameter names, and any linear layer can be adapted: plain, fp8, quantized. Saved activations: the layer's input (once, since
the frozen matmul saves only its weight) and `rank` values per token. For plain and quantized layers the update is
accumulated in place (`adapted_linears`), for all others by the formula below.

Shapes: n tokens, i inputs, o outputs, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.models.adapted_linears import PLAIN, Frozen, adapted_linears
from rush.models.decoder import Decoder
from rush.models.initial import tensor_seed
from rush.models.layers import FanOut

ROLE_GROUPS: Mapping[str, frozenset[str] | None] = {
    "all": None,
    "attention": frozenset({"q", "k", "v", "qkv", "attention_out"}),
    "mlp": frozenset({"mlp_gate", "mlp_up", "mlp_down"}),
    "qv": frozenset({"q", "v", "qkv"}),
}
"""Linear layers of a block, by group; never the LM head."""

Write = Callable[[Tensor, Tensor], Any]
"""Writes a full value into a parameter, which may be sharded."""
Gather = Callable[[Tensor], Tensor]
"""The full tensor of one that may be sharded."""


@dataclass(frozen=True)
class AdapterSpec:
    """Settings of an adapter; B·A is scaled by `alpha / rank`."""

    rank: int
    alpha: float
    dora: bool = False
    scale_by_root: bool = False
    """Rank-stabilized LoRA: scaled by alpha / sqrt(rank)."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.scale_by_root else self.rank)


class Adapter(nn.Module):
    """The trained parameters of an adapted layer."""

    squared_norms_o: Tensor

    def __init__(self, in_features: int, out_features: int, spec: AdapterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.active = True
        self.a = nn.Parameter(torch.empty(spec.rank, in_features))
        self.b = nn.Parameter(torch.empty(out_features, spec.rank))
        self.magnitude = nn.Parameter(torch.empty(out_features)) if spec.dora else None
        # The squared norm of each row of W, for DoRA only.
        self.register_buffer(
            "squared_norms_o", torch.empty(out_features if spec.dora else 0), persistent=False
        )

    def forward(self, x: Tensor, base: Tensor, layer: nn.Linear) -> Tensor:
        down_nr = F.linear(x, self.a.to(x.dtype)).flatten(0, -2)
        return self.add(down_nr, base, layer)

    def add(self, down_nr: Tensor, base: Tensor, layer: nn.Linear) -> Tensor:
        """The layer's output plus the adapter's, in one addmm."""
        b_or = self.b.to(down_nr.dtype)
        if self.magnitude is None:
            flat_no = torch.addmm(base.flatten(0, -2), down_nr, b_or.t(), alpha=self.spec.scale)
            return flat_no.view_as(base)
        ratio_o = (self.magnitude / self.row_norms(layer)).to(base.dtype)
        straight = base if layer.bias is None else base - layer.bias.to(base.dtype)
        low_rank = (F.linear(down_nr, b_or) * self.spec.scale).view_as(base)
        # Initially the ratio is exactly 1 and the low-rank update exactly 0, so this is bit-identical to the base.
        return base + (ratio_o - 1) * straight + ratio_o * low_rank

    def row_norms(self, layer: nn.Linear) -> Tensor:
        """The norm of each row of W + s·B·A, in fp32, detached from the gradient (as DoRA's authors advise).

        From |W|² + 2s·W·BA + s²·|BA|² by rows, so that the sum, as large as W, is never materialized.
        """
        with torch.no_grad(), torch.autocast(self.a.device.type, enabled=False):
            a_ri, b_or, scale = self.a.float(), self.b.float(), self.spec.scale
            weight_oi = dense_weight(layer, torch.float32)
            cross_o = (F.linear(weight_oi, a_ri) * b_or).sum(1)
            own_o = (b_or @ (a_ri @ a_ri.t()) * b_or).sum(1)
            return (self.squared_norms_o + 2 * scale * cross_o + scale**2 * own_o).clamp_min(1e-12).sqrt()

    @torch.no_grad()
    def init_weights(
        self,
        seed: int,
        name: str,
        layer: nn.Linear,
        write: Write = Tensor.copy_,
        gather: Gather = Tensor.detach,
    ) -> None:
        """A uniform within 1/sqrt(in), by seed and name; B zero; magnitudes are the row norms of the base."""
        generator = torch.Generator(device="cpu").manual_seed(tensor_seed(seed, f"{name}.adapter.a"))
        # From `_parameters`: with FSDP the attribute may be the local shard.
        a, b = self._parameters["a"], self._parameters["b"]
        assert a is not None
        assert b is not None
        bound = 1 / math.sqrt(a.shape[1])
        drawn = torch.empty(a.shape, dtype=torch.float32, device="cpu")
        write(a, drawn.uniform_(-bound, bound, generator=generator))
        b.zero_()
        self.update_base_norms(layer, gather)
        if self.magnitude is not None:
            write(self.magnitude, self.squared_norms_o.sqrt())

    @torch.no_grad()
    def update_base_norms(self, layer: nn.Linear, gather: Gather = Tensor.detach) -> None:
        """Compute the base's row norms, which DoRA needs, after the base has its weights."""
        if self.magnitude is not None:
            self.squared_norms_o = dense_weight(layer, torch.float32, gather).square().sum(1)

    def delta(self) -> Tensor:
        """s·B·A in fp32, in the shape of the weight."""
        return self.spec.scale * (self.b.float() @ self.a.float())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A checkpoint of the base has no adapters: theirs are unchanged.
        if any(name.startswith(prefix) for name in state):
            super()._load_from_state_dict(state, prefix, *rest)


class FusedDownProjections(FanOut):
    """One matmul with the concatenated A of adapted layers that share an input (queries, keys, values; gate and up).

    Each such matmul reads the whole input for a few columns and is bound by bandwidth, so one for all takes as long as one.
    Backward, the input's gradient is written once instead of once per layer.
    """

    def forward(self, x_btd: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        found = [layer._modules.get("adapter") for layer in layers]
        adapted = [(layer, one) for layer, one in zip(layers, found, strict=True) if isinstance(one, Adapter)]
        if len(adapted) < 2 or not all(adapter.active for _, adapter in adapted):
            return tuple(layer(x_btd) for layer in layers)
        x_btd = autocast_input(x_btd)
        frozen = frozen_tensors(x_btd, *adapted)
        if frozen is not None:
            outs = iter(fused_outputs(x_btd, frozen, *(adapter for _, adapter in adapted)))
        else:
            a_ri = torch.cat([adapter.a for _, adapter in adapted]).to(x_btd.dtype)
            down_nr = F.linear(x_btd, a_ri).flatten(0, -2)
            columns = torch.split(down_nr, [adapter.spec.rank for _, adapter in adapted], dim=-1)
            outs = iter(
                [
                    adapter.add(own_nr, type(layer).forward(layer, x_btd), layer)
                    for own_nr, (layer, adapter) in zip(columns, adapted, strict=True)
                ]
            )
        return tuple(
            next(outs) if isinstance(adapter, Adapter) else layer(x_btd)
            for layer, adapter in zip(layers, found, strict=True)
        )


def dense_weight(
    layer: nn.Linear, dtype: torch.dtype | None = None, gather: Gather = Tensor.detach
) -> Tensor:
    """The full weight of a layer, dequantized if it is quantized."""
    dequantize = getattr(layer, "dense_weight", None)
    weight: Tensor = gather(layer.weight) if dequantize is None else dequantize(dtype, gather)
    return weight if dtype is None else weight.to(dtype)


def adapted_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward of an adapted layer: one function for all, which torch.compile traces once."""
    adapter = self.adapter
    assert isinstance(adapter, Adapter)
    x = autocast_input(x)
    frozen = frozen_tensors(x, (self, adapter)) if adapter.active else None
    if frozen is not None:
        return fused_outputs(x, frozen, adapter)[0]
    base: Tensor = type(self).forward(self, x)
    return adapter(x, base, self) if adapter.active else base


def frozen_tensors(x: Tensor, *adapted: tuple[nn.Linear, Adapter]) -> Frozen | None:
    """The frozen weights and biases for `adapted_linears`; None where it does not apply: layers with their own matmul (fp8,
    sharded, cast weights), trained layers, DoRA."""
    stored = [_stored(layer, x) for layer, _ in adapted]
    dequantizers = {one[0] for one in stored if one is not None}
    biases = [layer.bias for layer, _ in adapted if layer.bias is not None]
    if (
        None in stored
        or len(dequantizers) > 1
        or len(biases) not in (0, len(adapted))
        or not all(_is_frozen(bias) for bias in biases)
        or any(adapter.magnitude is not None for _, adapter in adapted)
    ):
        return None
    return Frozen(
        dequantizers.pop(),
        [one[1] for one in stored if one is not None],
        [bias.to(x.dtype) for bias in biases],
    )


def _stored(layer: nn.Linear, x: Tensor) -> tuple[str, Sequence[Tensor]] | None:
    """The dequantizer and stored parts of a weight that `adapted_linears` supports; None for any other."""
    if type(layer) is nn.Linear:
        usable = _is_frozen(layer.weight) and layer.weight.dtype == x.dtype
        return (PLAIN, [layer.weight]) if usable else None
    parts: Any = getattr(layer, "parts", None)
    return None if parts is None else (str(layer.dequantizer), parts)


def _is_frozen(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.requires_grad


def fused_outputs(x: Tensor, frozen: Frozen, *adapters: Adapter) -> Sequence[Tensor]:
    """Outputs of layers with one input, the adapters' updates accumulated in place."""
    a_ri = adapters[0].a if len(adapters) == 1 else torch.cat([adapter.a for adapter in adapters])
    bs = [adapter.b.to(x.dtype) for adapter in adapters]
    return adapted_linears(x, frozen, a_ri.to(x.dtype), bs, [adapter.spec.scale for adapter in adapters])


def autocast_input(x: Tensor) -> Tensor:
    """Cast once; autocast would cast for each matmul and save every copy."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def attach(layer: nn.Linear, adapter: Adapter) -> None:
    """Attach an adapter to a layer and freeze the layer."""
    assert "adapter" not in layer._modules, "a layer takes one adapter"
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer.adapter = adapter
    layer.__dict__["forward"] = MethodType(adapted_forward, layer)


def detach(layer: nn.Linear) -> None:
    """Remove the adapter; the layer stays frozen."""
    del layer._modules["adapter"], layer.__dict__["forward"]


def chosen_linears(model: Decoder, roles: str) -> list[tuple[str, nn.Linear]]:
    """The layers of a group of roles (`ROLE_GROUPS`)."""
    wanted = ROLE_GROUPS[roles]
    return [
        entry
        for role, entries in model.linears().items()
        if role != "head" and (wanted is None or role in wanted)
        for entry in entries
    ]


def adapt(model: Decoder, specs: Mapping[str, AdapterSpec]) -> None:
    """Freeze the model and attach adapters to the named layers."""
    model.requires_grad_(False)
    layers = {name: layer for entries in model.linears().values() for name, layer in entries}
    for name, spec in specs.items():
        layer = layers[name]
        device = next(iter([*layer.parameters(), *layer.buffers()])).device
        with torch.device(device):
            attach(layer, Adapter(layer.in_features, layer.out_features, spec))
    for module in model.modules():
        if isinstance(module._modules.get("fan_out"), FanOut):
            module.fan_out = FusedDownProjections()


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Linear, Adapter]]:
    """All adapted layers: name, layer, adapter."""
    for name, module in model.named_modules():
        adapter = module._modules.get("adapter")
        if isinstance(adapter, Adapter):
            assert isinstance(module, nn.Linear)
            yield name, module, adapter


def is_adapted(model: nn.Module) -> bool:
    return any(True for _ in adapters(model))


def init_adapters(
    model: nn.Module, seed: int, write: Write = Tensor.copy_, gather: Gather = Tensor.detach
) -> None:
    """Initialize all adapters, after the base has its weights. `write` and `gather` are for sharded models."""
    for name, layer, adapter in adapters(model):
        adapter.init_weights(seed, name, layer, write, gather)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable all adapters within the block: the model is its base."""
    before = [(adapter, adapter.active) for _, _, adapter in adapters(model)]
    set_active(model, active=False)
    try:
        yield
    finally:
        for adapter, was in before:
            adapter.active = was


def set_active(model: nn.Module, active: bool) -> None:
    for _, _, adapter in adapters(model):
        adapter.active = active


@torch.no_grad()
def merged_weight(layer: nn.Linear, adapter: Adapter) -> Tensor:
    """The weight with the adapter merged in, in fp32."""
    weight_oi = dense_weight(layer, torch.float32) + adapter.delta()
    if adapter.magnitude is not None:
        weight_oi *= (adapter.magnitude.float() / adapter.row_norms(layer))[:, None]
    return weight_oi


@torch.no_grad()
def merged_state(model: Decoder, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The state dict of the plain model with all adapters merged; a quantized base is dequantized.

    A merged weight is rounded once, from fp32 to `dtype` (default: the embedding's dtype).
    """
    kept = dtype or model.embedding.weight.dtype
    state = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0].rpartition(".")[2] != "adapter"
    }
    for name, layer in _linears_of(model):
        found = layer._modules.get("adapter")
        if isinstance(found, Adapter):
            state[f"{name}.weight"] = merged_weight(layer, found).to(kept)
        elif hasattr(layer, "dense_weight"):
            state[f"{name}.weight"] = dense_weight(layer, kept)
    return state


def share_weights(model: Decoder, plain_model: Decoder) -> None:
    """Let a plain model, still on meta, share the memory of a model's weights, with its adapters and quantized layers, and
    without the other techniques."""
    state, wanted = model.state_dict(), plain_model.state_dict().keys()
    shared = {name: state[name] for name in wanted & state.keys()}
    plain_model.load_state_dict(shared, strict=False, assign=True)
    for (name, layer), (_, plain) in zip(_linears_of(model), _linears_of(plain_model), strict=True):
        adapter = layer._modules.get("adapter")
        if hasattr(layer, "dense_weight"):
            plain_model.set_submodule(name, layer)
        elif isinstance(adapter, Adapter):
            attach(plain, adapter)
    without = [name for name, parameter in plain_model.named_parameters() if parameter.is_meta]
    assert not without, f"no weights for {without[:3]}"


def _linears_of(model: Decoder) -> Iterable[tuple[str, nn.Linear]]:
    return (entry for role, entries in model.linears().items() if role != "head" for entry in entries)
