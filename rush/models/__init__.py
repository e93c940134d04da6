"""GPT-2 and Llama in plain PyTorch, their published sizes, parameter counts and FLOPs."""

from __future__ import annotations

from rush.models.construct import build_model
from rush.models.counts import count_parameters, flops_per_token, matmul_parameters, parameter_table
from rush.models.decoder import Decoder, check_tokens
from rush.models.layers import KVCache
from rush.models.shape import SIZES, LinearRopeScaling, RopeScaling, Shape, shape_of

__all__ = [
    "SIZES",
    "Decoder",
    "KVCache",
    "LinearRopeScaling",
    "RopeScaling",
    "Shape",
    "build_model",
    "check_tokens",
    "count_parameters",
    "flops_per_token",
    "matmul_parameters",
    "parameter_table",
    "shape_of",
]
