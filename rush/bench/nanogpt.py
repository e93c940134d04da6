"""nanoGPT's GPT-2 as a baseline: reimplemented with plain torch, and run with nanoGPT's own settings.

Our plain GPT-2 with the same techniques would be the wrong baseline: its techniques pin FlashAttention-2's operator, where
`F.scaled_dot_product_attention` lets torch choose, and torch 2.11 chooses cuDNN's kernels on Hopper. It also has biases, whose
gradients are a reduction over all tokens in every layer; nanoGPT's default has none. So this file uses nothing of our model or
our techniques: torch's modules, autocast in bf16, `torch.compile` of the full module, fused AdamW, TF32 for the remaining fp32
matmuls. Like nanoGPT's forward, it returns the logits with the loss, and the loop holds them until the backward pass ends.

Module names and initial weights are those of our GPT-2: with the same seed both sides start from the same loss. Omitting the
biases changes nothing initially, since they start at zero.

Shapes: b batch, t position, h heads, d width of a head or of the residual stream, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.bench.baseline_run import measure_run
from rush.data import Batch
from rush.errors import RecipeError
from rush.hardware import Machine
from rush.models import Shape
from rush.models.initial import initial_values
from rush.models.layers import IGNORED_LABEL
from rush.recipe import Recipe
from rush.techniques.precision.tf32 import tf32_allowed
from rush.training.build import Run
from rush.training.optimizer import build_optimizer

Gelu = Literal["none", "tanh"]
GELUS = get_args(Gelu)


@dataclass(frozen=True)
class NanoGPTOptions:
    """nanoGPT's settings, some of which tests turn off."""

    biases: bool = False
    """Biases in linear layers and norms; nanoGPT's default has none, the published GPT-2 has them."""
    gelu: Gelu = "none"
    """`approximate` of `F.gelu`: `none`, the exact form, as in nanoGPT; `tanh` as in the published GPT-2."""
    autocast: bool = True
    """bf16 autocast."""
    compiled: bool = True
    """`torch.compile` of the whole module."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), GELUS if field.name == "gelu" else (True, False)
            if value not in allowed:
                raise RecipeError(
                    f"{field.name} of a baseline of kind nanogpt is {value!r}; allowed: {' or '.join(map(repr, allowed))}."
                )

    def kernels(self, shape: Shape) -> list[str]:
        """Parts of the names of kernels that must have run. (cuDNN's attention has `flash` in its name, too.)"""
        return ["flash", "FusedAdam", *(["triton_"] if self.compiled else [])]


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x_btd: Tensor) -> Tensor:
        return F.layer_norm(x_btd, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        parts = self.qkv(x_btd).split(x_btd.shape[-1], dim=-1)
        q_bhtd, k_bhtd, v_bhtd = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        o_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        out: Tensor = self.out(o_bhtd.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape, bias: bool, gelu: Gelu) -> None:
        super().__init__()
        self.gelu = gelu
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_btd), approximate=self.gelu))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape, bias: bool, gelu: Gelu) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(shape.hidden, shape.norm_eps, bias)
        self.attention = Attention(shape, bias)
        self.mlp_norm = LayerNorm(shape.hidden, shape.norm_eps, bias)
        self.mlp = MLP(shape, bias, gelu)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        out_btd: Tensor = x_btd + self.mlp(self.mlp_norm(x_btd))
        return out_btd


class NanoGPT(nn.Module):
    """GPT-2 with a tied head."""

    def __init__(self, shape: Shape, *, biases: bool = False, gelu: Gelu = "none") -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.position_embedding = nn.Embedding(shape.context, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, biases, gelu) for _ in range(shape.num_layers))
        self.final_norm = LayerNorm(shape.hidden, shape.norm_eps, biases)
        self.head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_bt: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [b, t, v] and the summed loss. (nanoGPT's is the mean; our step divides by the labels of all its passes.)"""
        positions_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btd = self.embedding(tokens_bt) + self.position_embedding(positions_t)
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv: Tensor = self.head(self.final_norm(x_btd))
        loss = F.cross_entropy(
            logits_btv.flatten(0, 1), labels_bt.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return logits_btv, loss

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """The initial weights of our GPT-2."""
        own = dict(self.named_parameters())
        for name, value in initial_values(self.shape, seed):
            if name in own:
                own.pop(name).copy_(value)
            else:
                assert name.endswith(".bias"), name
        assert not own, f"no value for {', '.join(own)}"


def measure_nanogpt(spec: Mapping[str, Any], result: Any) -> None:
    """Time the steps of this baseline."""
    options = NanoGPTOptions(**spec["options"])
    measure_run(spec, result, partial(build_nanogpt, options=options), options.kernels)


def build_nanogpt(recipe: Recipe, machine: Machine, options: NanoGPTOptions) -> Run:
    """The model as a run of ours: loader, learning rate, clipping, groups of the update and clock are those of both sides."""
    shape, device = recipe.shape(), torch.device(machine.device)
    if shape.family != "gpt2" or not shape.tied_head or recipe.objective.kind != "lm":
        raise RecipeError(
            f"a baseline of kind nanogpt is a GPT-2 with a tied head and objective lm; the recipe's model is of the family "
            f"{shape.family}, its objective {recipe.objective.kind}; take kind recipe or transformers."
        )
    with device:
        model = NanoGPT(shape, biases=options.biases, gelu=options.gelu)
    model.init_weights(recipe.run.seed)
    call = torch.compile(model) if options.compiled else model
    autocast = torch.bfloat16 if options.autocast else None
    on_gpu: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    return Run(
        recipe,
        machine,
        device,
        model,  # type: ignore[arg-type]
        optimizer=build_optimizer(recipe, model, torch.optim.AdamW, on_gpu),
        autocast_dtype=autocast,
        loader_options={"pin": True} if device.type == "cuda" else {},
        pass_wrappers=[lambda plain: partial(nanogpt_pass, call, autocast)],
        step_contexts=[tf32_allowed],
    )


def nanogpt_pass(call: Any, autocast: torch.dtype | None, batch: Batch, share: Tensor) -> Tensor:
    """Forward and backward of a micro batch: the summed loss, as our own pass returns it."""
    with torch.autocast(batch.tokens_bt.device.type, autocast, enabled=autocast is not None):
        _logits, loss = call(batch.tokens_bt, batch.labels_bt)
    (loss * share).backward()
    summed: Tensor = loss.detach()
    return summed
