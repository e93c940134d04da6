"""Liger Kernel, the library, as a baseline: its Triton kernels in place of ours.

Liger fuses what lies between the matmuls: a norm, RoPE, SwiGLU are one kernel each forward and backward, and
LM head and loss are computed in chunks of tokens, with gradients in the forward pass, so that the full logits
never exist. Most people use it with transformers to train faster, so it is the baseline of our own fused
techniques, in our model, with the same attention, optimizer and loop. It wins most where memory is short (a
large vocabulary); with `compile`, which fuses elementwise work itself, expect little. GPT-2 gets its norms
and loss only: it has no RoPE, and Liger no GELU without a gate.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.libraries import hush, load_library
from rush.models.layers import IGNORED_LABEL, LayerNorm, OffsetRMSNorm, RMSNorm, RoundedRMSNorm, SwiGLU
from rush.recipe import Recipe
from rush.techniques.api.seams import FunctionModule

# Shapes: b batch, t positions, h query heads, k key/value heads, d width, v vocabulary.

PARTS = ("all", "norm", "rope", "mlp", "loss", "all but loss")
KERNELS = {
    "rms": "rms_norm_forward_kernel",
    "layer": "layer_norm_forward_kernel",
    "rope": "triton_rope",
    "mlp": "swiglu_forward_kernel",
    "loss": "liger_cross_entropy_kernel",
}
"""Kernel names in a profile."""
FIXED_ORDER = "0.7"
"""The first version whose layer norm is deterministic."""


def functions() -> Any:
    """The library's functions; they need no transformers. Imported while building: the compiler cannot trace an import."""
    return load_library("liger_kernel.transformers.functional")


class LigerNorm(nn.Module):
    """The library's norm over the plain norm's weights."""

    def __init__(self, plain: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.eps, self.weight = plain.eps, plain.weight
        self.bias = plain.bias if isinstance(plain, LayerNorm) else None
        self.call = functions().liger_rms_norm if self.bias is None else functions().liger_layer_norm
        # Gemma's multiplies by 1 + weight, and like OLMo's in fp32.
        self.rest: tuple[Any, ...] = ()
        if isinstance(plain, RoundedRMSNorm):
            self.rest = (1.0 if isinstance(plain, OffsetRMSNorm) else 0.0, "gemma")

    def forward(self, x_btd: Tensor) -> Tensor:
        given = [self.weight] if self.bias is None else [self.weight, self.bias]
        out: Tensor = self.call(x_btd, *given, self.eps, *self.rest)
        return out


class LigerLossHead(nn.Module):
    """LM head and summed loss in chunks; the gradients are computed in the forward pass."""

    stays_eager = True
    """The library reads values on the host, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.call = functions().liger_fused_linear_cross_entropy

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        loss: Tensor = self.call(
            hidden_btd.flatten(0, 1),
            head_weight_vd,
            labels_bt.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        return loss


@dataclass(frozen=True)
class LigerKernels:
    """The library's kernels for the modules that were replaced."""

    names: list[str]


def apply(build: api.Build, knobs: api.Knobs) -> None:
    # The compiler cannot tell which inputs some of the library's kernels write, and copies them all: slower, and right.
    hush("torch._dynamo", "Encountered an exception in identify_mutated_tensors")
    # Its SwiGLU asks a cached function for the GPU's generation, and the compiler warns that it traces through the cache.
    warnings.filterwarnings(
        "ignore",
        r"Dynamo detected a call to a `functools\.lru_cache`-wrapped function at 'swiglu",
        UserWarning,
    )
    chosen = _chosen(str(knobs["parts"]))
    model, expected = build.model, []
    blocks: Iterable[Any] = model.blocks
    if "norm" in chosen:
        expected.append("rms" if isinstance(model.final_norm, RMSNorm) else "layer")
        for owner, name, norm in list(model.norms()):
            setattr(owner, name, _norm(norm))
    for block in blocks:
        if "rope" in chosen and hasattr(block.attention, "rotate") and model.shape.rotary_dim is None:
            block.attention.rotate = FunctionModule(functions().liger_rope)
            expected.append("rope")
        if "mlp" in chosen and isinstance(block.mlp.activation, SwiGLU):
            block.mlp.activation = FunctionModule(functions().liger_swiglu)
            expected.append("mlp")
    if "loss" in chosen:
        model.loss_head = LigerLossHead()
        expected.append("loss")
    build.facts.note(LigerKernels(sorted({KERNELS[part] for part in expected})))


def _chosen(parts: str) -> set[str]:
    every = {"norm", "rope", "mlp", "loss"}
    if parts == "all but loss":
        return every - {"loss"}
    return every if parts == "all" else {parts}


def _with(part: str) -> Callable[[api.Knobs], bool]:
    """Whether the library computes this part."""
    return lambda knobs: part in _chosen(str(knobs["parts"]))


def _norm(plain: nn.Module) -> LigerNorm:
    assert isinstance(plain, RMSNorm | LayerNorm), type(plain)
    return LigerNorm(plain)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """In the profile: the library's kernel for every module that it replaces."""
    noted = seen.facts.noted(LigerKernels)
    expected = noted.names if noted is not None else []
    missing = [part for part in expected if not any(part in name for name in seen.kernels)]
    if not expected:
        return api.Proof(False, "this model has none of the chosen modules, or none was replaced")
    if missing:
        return api.Proof(False, f"nothing named {', '.join(missing)} ran")
    return api.Proof(True, f"ran {', '.join(expected)}")


def _parts_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The library's kernels ran for the chosen modules, as far as the model has them, and for no other."""
    found = {part for part, kernel in KERNELS.items() if any(kernel in name for name in seen.kernels)}
    shape = seen.shape
    norm = "rms" if shape.norm == "rms" else "layer"
    has = {norm, "loss"}
    has |= {"rope"} if shape.has_rope and shape.rotary_dim is None else set()
    has |= {"mlp"} if shape.gated_mlp and shape.activation == "silu" else set()
    chosen = {norm if part == "norm" else part for part in _chosen(str(knobs["parts"]))}
    wanted = (chosen & has) - (set() if seen.holds_head else {"loss"})
    return api.Proof(found == wanted, f"the library computed: {', '.join(sorted(found)) or 'nothing'}")


def nondeterministic(recipe: Recipe, knobs: api.Knobs) -> str | None:
    """The layer norm of its earlier versions accumulates gradients with atomics."""
    installed = version("liger-kernel") if find_spec("liger_kernel") is not None else FIXED_ORDER
    if recipe.shape().norm != "layer" or "norm" not in _chosen(str(knobs["parts"])):
        return None
    if _numbers(installed) >= _numbers(FIXED_ORDER):
        return None
    return (
        f"the layer norm of liger-kernel {installed} accumulates its gradients in varying order; install {FIXED_ORDER} or newer, "
        'set parts to "loss", or use fused_norm'
    )


def _takes_loss(recipe: Recipe) -> bool:
    return "loss" in _chosen(str(api.knob_of(recipe, "liger", "parts", "all")))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


technique = api.Technique(
    name="liger",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            'it needs the library liger-kernel: pip install "optimization-rush[liger]"',
            lambda machine, recipe: find_spec("liger_kernel") is not None,
            library=True,
        ),
        api.needs_cuda,
        api.Requirement(
            "its loss is called without a soft cap of logits, which this model has; set parts to all but loss, and use chunked_loss",
            lambda machine, recipe: recipe.shape().logit_softcap is None or not _takes_loss(recipe),
        ),
        api.Requirement(
            "with compile it needs scope = block, or parts without the loss: the library's loss cannot be traced",
            lambda machine, recipe: (
                not api.used(recipe, "compile")
                or api.knob_of(recipe, "compile", "scope", "model") == "block"
                or not _takes_loss(recipe)
            ),
        ),
        api.Requirement(
            "with cuda_graph it needs parts without the loss: the library's loss synchronizes with the host, which a captured "
            "graph cannot; set parts to all but loss",
            lambda machine, recipe: not api.used(recipe, "cuda_graph") or not _takes_loss(recipe),
        ),
    ),
    conflicts=("chunked_loss", "fused_loss", "fused_mlp", "fused_norm", "fused_rope", "tp", "vocab_pad"),
    nondeterministic=nondeterministic,
    knobs={"parts": api.KnobRange(PARTS, "modules that the library computes", _parts_seen)},
    claim=api.Claim(
        "tokens_per_s",
        0.20,
        regime="popular models under transformers, on average; Llama 3 8B with FSDP on eight A100s is the example",
        source="Hsu et al. 2024, arXiv:2410.10989",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("logits.copies", 0.0, "the gradient overwrites the logits", when=_with("loss")),
        api.MemoryEffect(
            "logits.tokens",
            0.02,
            "a chunk's logits are as large as the hidden states of all tokens",
            when=_with("loss"),
        ),
        api.MemoryEffect("head.gradient", 1.0, "computed in the forward pass", when=_with("loss")),
        api.MemoryEffect("norm.wide", 0.0, "the norms save their inputs only", when=_with("norm")),
        api.MemoryEffect("norm.scaled", 0.0, "the norms save their inputs only", when=_with("norm")),
        api.MemoryEffect("mlp.activated", 0.0, "SwiGLU saves its inputs only", when=_with("mlp")),
        api.MemoryEffect(
            "norm.opaque", 1.0, "with fp8: casts of their outputs are saved", when=_with("norm")
        ),
        api.MemoryEffect("mlp.opaque", 1.0, "with fp8: a cast of its output is saved", when=_with("mlp")),
    ),
    settings=(api.Setting(), api.Setting({"parts": "all but loss"})),
    work=(
        api.WorkEffect("norms.fused", 1.0, when=_with("norm")),
        api.WorkEffect("rope.fused", 1.0, when=_with("rope")),
        api.WorkEffect("mlp.fused", 1.0, when=_with("mlp")),
        api.WorkEffect("loss.bytes", 18.0, when=_with("loss")),
    ),
)
