"""Training methods and their techniques: the combinations of the ready recipes, by objective, method and device.

full    every weight; on a GPU in bf16 with stochastic rounding (recipes/sft.toml, measured in results/models-finetune-h200)
lora    adapters on a base in bf16 (recipes/lora.toml, results/models-lora-h200)
qlora   adapters on a base in 4 bits (recipes/qlora.toml, results/models-qlora-h200)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rush.models import Shape
from rush.plan.target import TargetMachine

ADAPTER_RANK, ADAPTER_ALPHA = 16, 32
METHODS = ("full", "lora", "qlora")
Techniques = list[str | dict[str, Any]]


@dataclass(frozen=True)
class Method:
    name: str
    """full, lora or qlora."""
    recompute: bool
    """Whether activations are recomputed in the backward pass."""

    def say(self) -> str:
        what = {
            "full": "every weight is trained",
            "lora": "LoRA adapters",
            "qlora": "QLoRA: a base of 4 bits, and adapters",
        }
        return what[self.name] + (", activations recomputed" if self.recompute else "")


def methods_for(pretrained: bool) -> list[Method]:
    """From full fine-tuning to the one with the least memory. Adapters need the weights of a base."""
    names = METHODS if pretrained else METHODS[:1]
    return [Method(name, recompute) for name in names for recompute in (False, True)]


def method_of(techniques: Techniques) -> Method:
    """The method of a list of techniques."""
    names = [one if isinstance(one, str) else one.get("name") for one in techniques]
    name = next((one for one in ("qlora", "lora") if one in names), "full")
    return Method("lora" if "int8_base" in names else name, "checkpoint_full" in names)


def techniques_for(method: Method, objective: str, target: TargetMachine, shape: Shape) -> Techniques:
    if target.kind != "cuda":
        return _on_cpu(method, objective)
    if "bfloat16" not in target.matmul:
        return _in_fp16(method, objective)
    adapters = method.name != "full"
    if objective == "dpo" and not adapters:
        return ["bf16_master", "flash_attention", *_recomputed(method), "chunked_loss", "fused_adamw"]
    update: dict[str, Any] = {"name": "fused_update", "stochastic_rounding": True}
    return [
        "pure_bf16",
        *_adapters(method),
        *(_attention_of_corpus(target, shape) if objective == "lm" else ["flash_attention"]),
        *(["flatten"] if objective == "sft" else []),
        *_recomputed(method),
        *([] if objective == "dpo" else [{"name": "compile", "scope": "block"}]),  # not measured with pairs
        "fused_loss",
        update if adapters else {**update, "state": "bfloat16"},
        "loader_workers",
        "pin_memory",
    ]


def _on_cpu(method: Method, objective: str) -> Techniques:
    packing = {"sft": ["pack_best_fit"], "dpo": ["pad"], "lm": []}[objective]
    return [*_adapters(method), *packing, *_recomputed(method)]


def _in_fp16(method: Method, objective: str) -> Techniques:
    """GPUs without bf16: fp16 under autocast with a loss scale."""
    packing = ["pack_best_fit"] if objective == "sft" else []
    return [
        "amp_fp16", *_adapters(method), *packing, *_recomputed(method), "chunked_loss", "fused_adamw", "loader_workers", "pin_memory",
    ]  # fmt: skip


def _adapters(method: Method) -> Techniques:
    if method.name == "full":
        return []
    return [{"name": method.name, "rank": ADAPTER_RANK, "alpha": ADAPTER_ALPHA}]


def _recomputed(method: Method) -> Techniques:
    return ["checkpoint_full"] if method.recompute else []


def _attention_of_corpus(target: TargetMachine, shape: Shape) -> Techniques:
    """cuDNN's kernel on Hopper, where it was the fastest (recipes/llama-3.2-1b-fast.toml)."""
    if target.rocm or (target.capability or (0, 0)) != (9, 0):
        return ["flash_attention"]
    grouped = shape.num_kv_heads < shape.num_heads
    return [{"name": "cudnn_attention", "heads": "grouped"}] if grouped else ["cudnn_attention"]
