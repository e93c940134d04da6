"""cuDNN's fused attention: the tiled algorithm of FlashAttention, another kernel.

cuDNN generates its kernel for the current GPU; on Hopper it uses asynchronous tensor cores, which
FlashAttention 2 does not. It wins there at long sequences; every new shape needs a new cuDNN plan. torch's
dispatcher may silently fall back to another backend, so this calls the cuDNN operator itself: it runs or it
fails.

cuDNN's backward pass accumulates the queries' gradients in varying order, so their last bits differ from
run to run, and torch has no switch for it. With `run.deterministic` the backward pass is that of
`triton_attention`, whose sums have a fixed order; it takes cuDNN's output and log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.kernels.support import empty_bthd, op
from rush.models import AttentionForm
from rush.models.layers import PLAIN_FORM
from rush.recipe import Recipe
from rush.techniques.api.evidence import attention_ran
from rush.techniques.api.features import no_score_cap, no_windows
from rush.techniques.api.seams import repeat_heads, set_attention_core, to_autocast_dtype
from rush.techniques.attention.tiled import HEAD_DIMS, TILED_MEMORY

OPERATORS = ("aten::_scaled_dot_product_cudnn_attention", "rush::cudnn_attention_forward")

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim.


def _cudnn(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of every query."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_bhtd, k_bktd, v_bktd, None, True, 0.0, True, scale=scale
    )
    return found[0], found[1]


@op("cudnn_attention_forward")
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    o, lse = _cudnn(q, k, v, scale)
    # Our backward pass uses exp2, so it takes the log-sum-exp to base 2.
    return o.transpose(1, 2).contiguous().transpose(1, 2), lse.reshape(q.shape[:3]) * math.log2(math.e)


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    return empty_bthd(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, o, lse2 = ctx.saved_tensors
    backward = torch.ops.rush.flash_attention_backward
    scale = q.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale
    dq, dk, dv = backward(do, q, k, v, o, lse2, None, None, True, scale)
    return dq, dk, dv, None


_forward.register_autograd(_gradients, setup_context=_keep)


class CudnnCore(nn.Module):
    """Attention core by torch's cuDNN operator."""

    def __init__(self, grouped: bool, deterministic: bool = False, form: AttentionForm = PLAIN_FORM) -> None:
        super().__init__()
        assert form == AttentionForm(scale=form.scale), "torch's operator has no window and no soft cap"
        self.scale = form.scale
        self.grouped = grouped
        """Whether the kernel handles grouped-query attention."""
        self.deterministic = deterministic
        """Whether the backward pass is our deterministic one."""
        if deterministic:
            import rush.kernels.flash_attention  # noqa: F401  (defines the operator that the backward pass calls)

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents: Tensor | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        assert documents is None, "packed documents need variable-length attention"
        assert query_offset == 0, "decoding with a cache uses the plain core"
        q_bhtd, k_bktd, v_bktd = to_autocast_dtype(q_bhtd, k_bktd, v_bktd)
        k_bhtd, v_bhtd = (k_bktd, v_bktd) if self.grouped else repeat_heads(q_bhtd, k_bktd, v_bktd)
        out: Tensor = (_forward if self.deterministic else _cudnn)(q_bhtd, k_bhtd, v_bhtd, self.scale)[0]
        return out


def apply(build: api.Build, knobs: api.Knobs) -> None:
    grouped, deterministic = knobs["heads"] == "grouped", build.recipe.run.deterministic
    set_attention_core(build.model, lambda form: CudnnCore(grouped, deterministic, form))


def nondeterministic(recipe: Recipe, knobs: api.Knobs) -> str | None:
    if recipe.shape().head_dim in HEAD_DIMS:
        return None
    return (
        "cuDNN's backward pass accumulates in varying order, and ours, which replaces it, supports head dims "
        f"{', '.join(map(str, HEAD_DIMS))}; use flash_attention"
    )


def _heads_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The cuDNN operator was called with as many key heads as query heads, or with the model's own (which are as many
    where the model has no grouped-query attention)."""
    calls = [call for name in OPERATORS for call in seen.calls.get(name, {})]
    heads = {(call.shapes[0][1], call.shapes[1][1]) for call in calls}
    groups = 1 if knobs["heads"] == "repeated" else seen.shape.num_heads // seen.shape.num_kv_heads
    return api.Proof(
        bool(heads) and all(queries == groups * keys for queries, keys in heads),
        f"query and key heads of the operator: {', '.join(map(str, sorted(heads))) or 'none seen'}",
    )


technique = api.Technique(
    name="cudnn_attention",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            "it needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer",
            lambda machine, recipe: (
                machine.device == "cuda" and machine.hip is None and (machine.capability or (0, 0)) >= (8, 0)
            ),
        ),
        api.half_precision,
        no_windows,
        no_score_cap,
        api.Requirement(
            "torch does not support packed documents with cuDNN (pack_best_fit, flatten); use "
            "flash_attention, triton_attention or flex_attention with them",
            lambda machine, recipe: not api.used(recipe, "flatten", "pack_best_fit"),
        ),
        api.Requirement(
            "with run.deterministic its backward pass is that of triton_attention, which needs Triton; use flash_attention",
            lambda machine, recipe: not recipe.run.deterministic or machine.triton is not None,
        ),
    ),
    nondeterministic=nondeterministic,
    conflicts=("cpu_attention", "flash_attention", "flex_attention", "triton_attention"),
    knobs={
        "heads": api.KnobRange(
            ("repeated", "grouped"),
            "grouped-query attention by repeating keys and values for each query head, or inside the kernel",
            _heads_seen,
        )
    },
    claim=api.Claim(
        "attention rate",
        0.75,
        regime="up to, on an H100, over FlashAttention 2",
        source="PyTorch 2.5 release notes, October 2024",
        relative_to="flash_attention",
    ),
    parity=api.Parity.CLOSE,
    evidence=attention_ran(kernels=("cudnn",), ops=("scaled_dot_product_cudnn_attention",)),
    memory=(
        *TILED_MEMORY,
        api.MemoryEffect(
            "heads.repeated",
            1.0,
            "unless heads = grouped",
            by_knob=lambda knobs: float(knobs["heads"] == "repeated"),
        ),
    ),
    settings=(api.Setting(), api.Setting({"heads": "grouped"})),
    work=(api.WorkEffect("attention", 0.38, "measured on an H200"),),
)
