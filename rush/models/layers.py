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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rush.errors import DataError
from rush.models.shape import AttentionForm, Shape

IGNORED_LABEL = -100
PLAIN_FORM = AttentionForm()


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap): nearly x where it is small, and never beyond the cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


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
        return self.weight * self.normalized(x_btd).to(x_btd.dtype)

    def normalized(self, x_btd: Tensor) -> Tensor:
        """In fp32, before the weight."""
        wide = x_btd.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)

    def scale(self) -> Tensor:
        """What the normalized values are multiplied by."""
        return self.weight


class RoundedRMSNorm(RMSNorm):
    """RMSNorm that multiplies by its weight in fp32 and rounds the product: OLMo 2."""

    def forward(self, x_btd: Tensor) -> Tensor:
        return (self.normalized(x_btd) * self.scale().float()).to(x_btd.dtype)


class OffsetRMSNorm(RoundedRMSNorm):
    """RMSNorm that multiplies by 1 + weight: Gemma. The weight is initialized to zeros."""

    def scale(self) -> Tensor:
        return 1.0 + self.weight.float()


def rms_norm(shape: Shape, width: int) -> RMSNorm:
    """The RMSNorm of a shape."""
    structure = shape.structure
    kind = (
        OffsetRMSNorm if structure.norm_offset else RoundedRMSNorm if structure.norm_rounds_last else RMSNorm
    )
    return kind(width, shape.norm_eps)


class DocumentIds(nn.Module):
    """Describes packed documents to the attention core: here by the document id of each token.

    Other cores need another form (cumulative lengths, a block mask). Their technique fills this slot with a module that
    computes it once for all layers, from the ids and the document starts in the flattened batch.
    """

    def forward(self, documents_bt: Tensor, starts_n: Tensor | None) -> Tensor:
        return documents_bt


class PlainAttention(nn.Module):
    """Softmax attention with the full score matrix in memory: the reference for other cores."""

    def __init__(self, form: AttentionForm = PLAIN_FORM) -> None:
        super().__init__()
        self.form = form

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
        form = self.form
        scale = q_bhtd.shape[-1] ** -0.5 if form.scale is None else form.scale
        scores_bhts = soft_cap(q_bhtd @ k_bhsd.transpose(-1, -2) * scale, form.softcap)
        num_queries, num_keys = scores_bhts.shape[-2:]
        key_s = torch.arange(num_keys, device=q_bhtd.device)
        query_t = torch.arange(query_offset, query_offset + num_queries, device=q_bhtd.device)
        visible = (key_s[None, :] <= query_t[:, None])[None, None]
        if form.window is not None:
            visible = visible & (key_s[None, :] > query_t[:, None] - form.window)
        if documents is not None:
            query_documents = documents[:, query_offset : query_offset + num_queries]
            visible = visible & (query_documents[:, :, None] == documents[:, None, :])[:, None]
        # Every query attends at least to its own key, so no row of the softmax is empty.
        scores_bhts = scores_bhts.masked_fill(~visible, -math.inf)
        weights_bhts = torch.softmax(scores_bhts, dim=-1, dtype=torch.float32).to(v_bhsd.dtype)
        return weights_bhts @ v_bhsd


class PlainLossHead(nn.Module):
    """The summed next-token negative log-likelihood from full fp32 logits."""

    def __init__(self, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        logits_btv = soft_cap(F.linear(hidden_btd, head_weight_vd).float(), self.softcap)
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


class GeGLU(nn.Module):
    """GELU, in its tanh form, as a gate: gelu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


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
    """Llama's gated MLP: gate and up projections, SwiGLU (or Gemma's GeGLU), down projection, without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.fan_out: nn.Module = FanOut()
        self.activation: nn.Module = SwiGLU() if shape.activation == "silu" else GeGLU()
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(*self.fan_out(x_btd, self.gate, self.up)))
        return out


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
        self.row_tokens: int | None = None
        """Length of the whole text, where it is read in pieces and RoPE depends on it (LongRoPE)."""
        self.layers = [
            LayerCache(
                torch.zeros(dims, device=device, dtype=dtype), torch.zeros(dims, device=device, dtype=dtype)
            )
            for _ in range(shape.num_layers)
        ]
