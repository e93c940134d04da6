"""Low-rank adapters: a frozen linear layer and a small trained product beside it.

The weight W stays as it is; what is trained is B·A, with A [rank, in] and B [out, rank], so a layer has
rank·(in + out) trained values instead of in·out. B starts as zeros: an adapted model begins as its base, to
the bit. DoRA also trains the length of each row: W + s·B·A is brought to the length `magnitude`.

An adapter is a child of the layer it belongs to (`blocks.0.attention.q.adapter`), and the layer gets a
forward of its own. So the base keeps its names, and any kind of layer can be adapted: plain, with 8-bit
products, with a quantized weight. What the forward keeps for the backward pass is the layer's input (once:
the frozen product keeps nothing but its weight) and `rank` values for each token. Plain and quantized layers get
their adapter's part added in place (`adapted_linears`), all others by the formula below.

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
"""Which linear layers of a block; the head is never among them."""

Put = Callable[[Tensor, Tensor], Any]
"""Writes a value into a parameter of which this process may hold a part."""
See = Callable[[Tensor], Tensor]
"""Gives all of a tensor of which this process may hold a part."""


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter is made of: `alpha / rank` is the factor its product is multiplied with."""

    rank: int
    alpha: float
    dora: bool = False
    scale_by_root: bool = False
    """alpha / sqrt(rank) instead ("rank-stabilized"): the factor shrinks less at high ranks."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.scale_by_root else self.rank)


class Adapter(nn.Module):
    """The trained part of an adapted layer."""

    squares_o: Tensor

    def __init__(self, in_features: int, out_features: int, spec: AdapterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.active = True
        self.a = nn.Parameter(torch.empty(spec.rank, in_features))
        self.b = nn.Parameter(torch.empty(out_features, spec.rank))
        self.magnitude = nn.Parameter(torch.empty(out_features)) if spec.dora else None
        # The squared length of each row of W, once: only DoRA asks for it.
        self.register_buffer("squares_o", torch.empty(out_features if spec.dora else 0), persistent=False)

    def forward(self, x: Tensor, base: Tensor, layer: nn.Linear) -> Tensor:
        down_nr = F.linear(x, self.a.to(x.dtype)).flatten(0, -2)
        return self.add(down_nr, base, layer)

    def add(self, down_nr: Tensor, base: Tensor, layer: nn.Linear) -> Tensor:
        """The layer's own output and, on top, the adapter's: one product that adds as it writes."""
        b_or = self.b.to(down_nr.dtype)
        if self.magnitude is None:
            flat_no = torch.addmm(base.flatten(0, -2), down_nr, b_or.t(), alpha=self.spec.scale)
            return flat_no.view_as(base)
        ratio_o = (self.magnitude / self.row_lengths(layer)).to(base.dtype)
        straight = base if layer.bias is None else base - layer.bias.to(base.dtype)
        low_rank = (F.linear(down_nr, b_or) * self.spec.scale).view_as(base)
        # At the start the ratio is exactly 1 and the low-rank part exactly 0, so this is the base, to the bit.
        return base + (ratio_o - 1) * straight + ratio_o * low_rank

    def row_lengths(self, layer: nn.Linear) -> Tensor:
        """The length of each row of W + s·B·A, in fp32, a constant for the gradient (as DoRA's authors advise).

        From |W|² + 2s·W·BA + s²·|BA|², row by row: the sum itself, as large as W, never exists.
        """
        with torch.no_grad(), torch.autocast(self.a.device.type, enabled=False):
            a_ri, b_or, scale = self.a.float(), self.b.float(), self.spec.scale
            weight_oi = dense_weight(layer, torch.float32)
            cross_o = (F.linear(weight_oi, a_ri) * b_or).sum(1)
            own_o = (b_or @ (a_ri @ a_ri.t()) * b_or).sum(1)
            return (self.squares_o + 2 * scale * cross_o + scale**2 * own_o).clamp_min(1e-12).sqrt()

    @torch.no_grad()
    def fill(
        self, seed: int, name: str, layer: nn.Linear, put: Put = Tensor.copy_, see: See = Tensor.detach
    ) -> None:
        """The start: A uniform within 1/sqrt(in), a function of seed and name; B zero; lengths as they are."""
        generator = torch.Generator(device="cpu").manual_seed(tensor_seed(seed, f"{name}.adapter.a"))
        # By its name: an attribute may give the part that this process has.
        a, b = self._parameters["a"], self._parameters["b"]
        assert a is not None
        assert b is not None
        bound = 1 / math.sqrt(a.shape[1])
        drawn = torch.empty(a.shape, dtype=torch.float32, device="cpu")
        put(a, drawn.uniform_(-bound, bound, generator=generator))
        b.zero_()
        self.measure(layer, see)
        if self.magnitude is not None:
            put(self.magnitude, self.squares_o.sqrt())

    @torch.no_grad()
    def measure(self, layer: nn.Linear, see: See = Tensor.detach) -> None:
        """Take the row lengths of the base, which DoRA compares with; after the base has got its weights."""
        if self.magnitude is not None:
            self.squares_o = dense_weight(layer, torch.float32, see).square().sum(1)

    def delta(self) -> Tensor:
        """s·B·A in fp32, as large as the weight."""
        return self.spec.scale * (self.b.float() @ self.a.float())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A base knows nothing of adapters: they keep the values they have.
        if any(name.startswith(prefix) for name in state):
            super()._load_from_state_dict(state, prefix, *rest)


class SharedDown(FanOut):
    """The products with A of adapted layers that have one input (queries, keys, values; gate and up) as one product.

    Each is a pass over the whole input for a few columns: bound by reading, so one pass for all costs as much as one.
    The same holds backward, where the input's gradient is written once instead of once for each layer.
    """

    def forward(self, x_btd: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        found = [layer._modules.get("adapter") for layer in layers]
        both = [(layer, one) for layer, one in zip(layers, found, strict=True) if isinstance(one, Adapter)]
        if len(both) < 2 or not all(adapter.active for _, adapter in both):
            return tuple(layer(x_btd) for layer in layers)
        x_btd = autocast_input(x_btd)
        frozen = frozen_parts(x_btd, *both)
        if frozen is not None:
            made = iter(together(x_btd, frozen, *(adapter for _, adapter in both)))
            return tuple(
                next(made) if isinstance(adapter, Adapter) else layer(x_btd)
                for layer, adapter in zip(layers, found, strict=True)
            )
        a_ri = torch.cat([adapter.a for _, adapter in both]).to(x_btd.dtype)
        down_nr = F.linear(x_btd, a_ri).flatten(0, -2)
        parts = iter(torch.split(down_nr, [adapter.spec.rank for _, adapter in both], dim=-1))
        return tuple(
            adapter.add(next(parts), type(layer).forward(layer, x_btd), layer)
            if isinstance(adapter, Adapter)
            else layer(x_btd)
            for layer, adapter in zip(layers, found, strict=True)
        )


def dense_weight(layer: nn.Linear, dtype: torch.dtype | None = None, see: See = Tensor.detach) -> Tensor:
    """The weight of a layer as a matrix, whatever form it is stored in."""
    dequantize = getattr(layer, "dense_weight", None)
    weight: Tensor = see(layer.weight) if dequantize is None else dequantize(dtype, see)
    return weight if dtype is None else weight.to(dtype)


def adapted_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward of an adapted layer. One function for all, so that a compiler that saw one has seen them all."""
    adapter = self.adapter
    assert isinstance(adapter, Adapter)
    x = autocast_input(x)
    frozen = frozen_parts(x, (self, adapter)) if adapter.active else None
    if frozen is not None:
        return together(x, frozen, adapter)[0]
    base: Tensor = type(self).forward(self, x)
    return adapter(x, base, self) if adapter.active else base


def frozen_parts(x: Tensor, *adapted: tuple[nn.Linear, Adapter]) -> Frozen | None:
    """What the operator that adds in place is told of layers with this input; None for layers that multiply in a way of
    their own (fp8 operands, a shard on each rank, a cast of the weight), are trained, or have DoRA's lengths."""
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


def together(x: Tensor, frozen: Frozen, *adapters: Adapter) -> Sequence[Tensor]:
    """Layers of one input and their adapters, which are added in place."""
    a_ri = adapters[0].a if len(adapters) == 1 else torch.cat([adapter.a for adapter in adapters])
    bs = [adapter.b.to(x.dtype) for adapter in adapters]
    return adapted_linears(x, frozen, a_ri.to(x.dtype), bs, [adapter.spec.scale for adapter in adapters])


def autocast_input(x: Tensor) -> Tensor:
    """Cast once, where autocast would cast for each product (and the backward pass keep each copy)."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def attach(layer: nn.Linear, adapter: Adapter) -> None:
    """Give a layer its adapter; the layer's own weight and bias are frozen."""
    assert "adapter" not in layer._modules, "a layer takes one adapter"
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer.adapter = adapter
    layer.__dict__["forward"] = MethodType(adapted_forward, layer)


def detach(layer: nn.Linear) -> None:
    """Take the adapter out again: the layer is what it was, still frozen."""
    del layer._modules["adapter"], layer.__dict__["forward"]


def chosen_linears(model: Decoder, roles: str) -> list[tuple[str, nn.Linear]]:
    """The layers a group of roles names, block by block."""
    wanted = ROLE_GROUPS[roles]
    return [
        entry
        for role, entries in model.linears().items()
        if role != "head" and (wanted is None or role in wanted)
        for entry in entries
    ]


def adapt(model: Decoder, specs: Mapping[str, AdapterSpec]) -> None:
    """Freeze the whole model and put adapters on the layers named."""
    model.requires_grad_(False)
    layers = {name: layer for entries in model.linears().values() for name, layer in entries}
    for name, spec in specs.items():
        layer = layers[name]
        device = next(iter([*layer.parameters(), *layer.buffers()])).device
        with torch.device(device):
            attach(layer, Adapter(layer.in_features, layer.out_features, spec))
    for module in model.modules():
        if isinstance(module._modules.get("fan_out"), FanOut):
            module.fan_out = SharedDown()


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Linear, Adapter]]:
    """Every adapted layer: its name, the layer, its adapter."""
    for name, module in model.named_modules():
        adapter = module._modules.get("adapter")
        if isinstance(adapter, Adapter):
            assert isinstance(module, nn.Linear)
            yield name, module, adapter


def is_adapted(model: nn.Module) -> bool:
    return any(True for _ in adapters(model))


def fill_adapters(model: nn.Module, seed: int, put: Put = Tensor.copy_, see: See = Tensor.detach) -> None:
    """Initial values for every adapter of a model that has its weights; `put` and `see` know how it is held."""
    for name, layer, adapter in adapters(model):
        adapter.fill(seed, name, layer, put, see)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: for a reference, a comparison, a switch while chatting."""
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
    """The one matrix that does what layer and adapter do together, in fp32."""
    weight_oi = dense_weight(layer, torch.float32) + adapter.delta()
    if adapter.magnitude is not None:
        weight_oi *= (adapter.magnitude.float() / adapter.row_lengths(layer))[:, None]
    return weight_oi


@torch.no_grad()
def merged_state(model: Decoder, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The plain model's weights with every adapter merged in; a quantized base is dequantized.

    A merged matrix is rounded once, from fp32 to `dtype` (or the dtype that the embedding has).
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


def share_weights(model: Decoder, twin: Decoder) -> None:
    """Give a plain twin, still on meta, the weights of a model: the same memory, adapters and quantized layers
    included, without what else was done to the model's layers."""
    state, wanted = model.state_dict(), twin.state_dict().keys()
    twin.load_state_dict({name: state[name] for name in wanted & state.keys()}, strict=False, assign=True)
    for (name, layer), (_, plain) in zip(_linears_of(model), _linears_of(twin), strict=True):
        adapter = layer._modules.get("adapter")
        if hasattr(layer, "dense_weight"):
            parent, _, own = name.rpartition(".")
            setattr(twin.get_submodule(parent), own, layer)
        elif isinstance(adapter, Adapter):
            attach(plain, adapter)
    without = [name for name, parameter in twin.named_parameters() if parameter.is_meta]
    assert not without, f"no weights for {without[:3]}"


def trained_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _linears_of(model: Decoder) -> Iterable[tuple[str, nn.Linear]]:
    return (entry for role, entries in model.linears().items() if role != "head" for entry in entries)
