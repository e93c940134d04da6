"""The layers of a decoder, written as the papers write them.

Plain on purpose: attention scores are a full [query, key] matrix, logits a full fp32 [token, vocabulary] matrix. This is the
baseline that techniques are measured against and the reference they must agree with. Each layer is a module in a named
slot: a technique replaces it from outside, and the model does not know.

Shapes: b batch, t query position, s key position, h query heads, k key/value heads, d width of a
head or of the residual stream, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rush.errors import DataError
from rush.models.shape import LinearRopeScaling, RopeScaling, Shape

IGNORED_LABEL = -100


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias; statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_btd: Tensor) -> Tensor:
        return F.layer_norm(x_btd, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """RMSNorm with a weight; normalized in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_btd: Tensor) -> Tensor:
        wide = x_btd.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x_btd.dtype)


class DocumentIds(nn.Module):
    """Describes packed documents to the attention core: here by the document id of each token.

    Other cores need another form (cumulative lengths, a block mask). Their technique fills this slot with a module that
    computes it once for all layers, from the ids and the document starts in the flattened batch.
    """

    def forward(self, documents_bt: Tensor, starts_n: Tensor | None) -> Tensor:
        return documents_bt


class PlainAttention(nn.Module):
    """Softmax attention with the full score matrix in memory: the reference for other cores."""

    def forward(
        self,
        q_bhtd: Tensor,
        k_bksd: Tensor,
        v_bksd: Tensor,
        *,
        documents: Tensor | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        """Causal: query t is at key position t + query_offset and attends to the keys up to there.

        With `documents` (ids of the key positions [b, s]) it attends only within its own document.
        """
        group = q_bhtd.shape[1] // k_bksd.shape[1]
        k_bhsd, v_bhsd = k_bksd.repeat_interleave(group, dim=1), v_bksd.repeat_interleave(group, dim=1)
        scores_bhts = q_bhtd @ k_bhsd.transpose(-1, -2) * q_bhtd.shape[-1] ** -0.5
        num_queries, num_keys = scores_bhts.shape[-2:]
        key_s = torch.arange(num_keys, device=q_bhtd.device)
        query_t = torch.arange(query_offset, query_offset + num_queries, device=q_bhtd.device)
        visible = (key_s[None, :] <= query_t[:, None])[None, None]
        if documents is not None:
            query_documents = documents[:, query_offset : query_offset + num_queries]
            visible = visible & (query_documents[:, :, None] == documents[:, None, :])[:, None]
        # Every query attends at least to its own key, so no row of the softmax is empty.
        scores_bhts = scores_bhts.masked_fill(~visible, -math.inf)
        weights_bhts = torch.softmax(scores_bhts, dim=-1, dtype=torch.float32).to(v_bhsd.dtype)
        return weights_bhts @ v_bhsd


class PlainLossHead(nn.Module):
    """The summed next-token negative log-likelihood from full fp32 logits."""

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        logits_btv = F.linear(hidden_btd, head_weight_vd).float()
        return F.cross_entropy(
            logits_btv.flatten(0, 1), labels_bt.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )


def losses_by_row(
    loss_head: nn.Module, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor
) -> Tensor:
    """The summed loss of each row [b], by the loss head in the slot. Only one row's logits exist at a time.

    A preference loss weighs each row's gradient by the losses of all rows, so each row is checkpointed and recomputed in
    the backward pass, unless its loss head recomputes the logits itself (`recomputes`).
    """
    recompute = torch.is_grad_enabled() and not getattr(loss_head, "recomputes", False)
    sums: list[Tensor] = []
    for row in range(labels_bt.shape[0]):
        inputs = hidden_btd[row : row + 1], head_weight_vd, labels_bt[row : row + 1]
        if recompute:
            sums.append(checkpoint(loss_head, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            sums.append(loss_head(*inputs))
    return torch.stack(sums)


class GeluTanh(nn.Module):
    """GELU in GPT-2's tanh form."""

    def forward(self, up: Tensor) -> Tensor:
        return F.gelu(up, approximate="tanh")


class SwiGLU(nn.Module):
    """SwiGLU: silu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Widen(nn.Module):
    """A linear layer and its activation: a slot for a fused backward pass."""

    def forward(self, x_btd: Tensor, layer: nn.Module, activation: nn.Module) -> Tensor:
        out: Tensor = activation(layer(x_btd))
        return out


class GeluMLP(nn.Module):
    """GPT-2's MLP: up projection, GELU, down projection, with biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.intermediate)
        self.activation = GeluTanh()
        self.widen: nn.Module = Widen()
        self.down = nn.Linear(shape.intermediate, shape.hidden)

    def forward(self, x_btd: Tensor) -> Tensor:
        out: Tensor = self.down(self.widen(x_btd, self.up, self.activation))
        return out


def matmul_of(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """The matmul of a layer: `F.linear`, or its own `matmul_with` (fp8, for example). For one matmul over several layers."""
    own: Callable[[Tensor, Tensor], Tensor] | None = getattr(layer, "matmul_with", None)
    return F.linear if own is None else own


class FanOut(nn.Module):
    """Several linear layers of one input, one after another: a slot for fusing them."""

    def forward(self, x_btd: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        return tuple(layer(x_btd) for layer in layers)

    def weight(self, *layers: nn.Linear) -> Tensor:
        """Their weights concatenated, for one matmul over all of them."""
        return torch.cat([layer.weight for layer in layers])


class GatedMLP(nn.Module):
    """Llama's gated MLP: gate and up projections, SwiGLU, down projection, without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.fan_out: nn.Module = FanOut()
        self.activation = SwiGLU()
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(*self.fan_out(x_btd, self.gate, self.up)))
        return out


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | LinearRopeScaling | None
) -> Tensor:
    """RoPE's inverse frequencies (radians per position), on the CPU in fp32, scaled linearly or as in Llama 3.1."""
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    rotations = scaling.original_context * frequencies / (2 * math.pi)  # within the original context
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 0 below the low factor: fully slowed; 1 above the high one: kept
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class Rotary(nn.Module):
    """RoPE: cosines and sines of the angles by which queries and keys are rotated.

    The frequencies stay in fp32 whatever the dtype of the weights: at position 100,000 a bf16 frequency is wrong by
    whole rotations. So they are recomputed whenever the module is moved or cast, also from the meta device.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | LinearRopeScaling | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.cos_and_sin = cos_and_sin
        """A slot: from angles to cosines and sines."""
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(head_dim // 2, dtype=torch.float32), persistent=False)
        self.fill(self.frequencies.device)

    def fill(self, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(self.head_dim, self.theta, self.scaling).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill(self.frequencies.device)
        return self

    def forward(self, positions_bt: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions_bt[..., None].float() * self.frequencies
        return self.cos_and_sin(torch.cat((angles, angles), dim=-1))


def cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos(), angles.sin()


class PlainRotate(nn.Module):
    """Rotates each pair (i, i + d/2) of every query and key by the angle of its position, in fp32.

    The output has the memory layout of the input, the heads of a position side by side. So has attention's output, which
    needs no copy before the next layer.
    """

    def forward(
        self, q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_btd[:, :, None], sin_btd[:, :, None]
        q_bthd, k_btkd = q_bhtd.transpose(1, 2), k_bktd.transpose(1, 2)
        return _rotate(q_bthd, cos, sin).transpose(1, 2), _rotate(k_btkd, cos, sin).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first, second), dim=-1) * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated.to(x.dtype)


class LayerCache:
    """One layer's keys and values, preallocated for the longest sequence."""

    def __init__(self, keys_bksd: Tensor, values_bksd: Tensor) -> None:
        self.keys_bksd, self.values_bksd = keys_bksd, values_bksd

    def extend(self, k_bktd: Tensor, v_bktd: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values at `start`; return all up to the new end."""
        end = start + k_bktd.shape[2]
        self.keys_bksd[:, :, start:end] = k_bktd
        self.values_bksd[:, :, start:end] = v_bktd
        return self.keys_bksd[:, :, :end], self.values_bksd[:, :, :end]


class KVCache:
    """The keys and values of every layer for all tokens so far, so that each token is processed once."""

    def __init__(
        self, shape: Shape, *, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        if capacity > shape.context:
            raise DataError(
                f"A KV cache of {capacity} tokens was asked for, but the model's context is {shape.context}."
            )
        dims = (batch, shape.num_kv_heads, capacity, shape.head_dim)
        self.capacity = capacity
        self.length = 0
        self.layers = [
            LayerCache(
                torch.zeros(dims, device=device, dtype=dtype), torch.zeros(dims, device=device, dtype=dtype)
            )
            for _ in range(shape.num_layers)
        ]
