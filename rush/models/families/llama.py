"""Llama 2, 3, 3.1, 3.2: RMSNorm, RoPE, grouped-query attention, a gated MLP, no biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.llama_like import NO_BIASES, llama_like, write_llama_like

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | {"mlp_bias": False, "pretraining_tp": 1}


FAMILY = llama_like("llama", "Llama 2 and 3", "Llama", _write, supported=NO_BIASES)
