"""Models in plain PyTorch: families as data, their published sizes, parameter counts and FLOPs."""

from __future__ import annotations

from rush.models.construct import build_model
from rush.models.counts import count_parameters, flops_per_token, matmul_parameters, parameter_table
from rush.models.decoder import Decoder, check_tokens
from rush.models.layers import KVCache
from rush.models.rope_scaling import LinearRopeScaling, LongRopeScaling, RopeScaling, YarnRopeScaling
from rush.models.shape import AttentionForm, Shape
from rush.models.sizes import SIZES, shape_of

__all__ = [
    "SIZES",
    "AttentionForm",
    "Decoder",
    "KVCache",
    "LinearRopeScaling",
    "LongRopeScaling",
    "RopeScaling",
    "Shape",
    "YarnRopeScaling",
    "build_model",
    "check_tokens",
    "count_parameters",
    "flops_per_token",
    "matmul_parameters",
    "parameter_table",
    "shape_of",
]
