"""Plain models: GPT-2 and Llama in plain torch, their sizes, their counts, Hugging Face in and out."""

from __future__ import annotations

from rush.models.build import build_model
from rush.models.counts import count_parameters, flops_per_token, matmul_parameters, parameter_table
from rush.models.decoder import Decoder, check_tokens
from rush.models.huggingface import load_hf_folder, save_hf_folder
from rush.models.huggingface_config import config_from_shape, shape_from_config
from rush.models.layers import KVCache
from rush.models.shape import SIZES, RopeScaling, Shape, shape_of

__all__ = [
    "SIZES",
    "Decoder",
    "KVCache",
    "RopeScaling",
    "Shape",
    "build_model",
    "check_tokens",
    "config_from_shape",
    "count_parameters",
    "flops_per_token",
    "load_hf_folder",
    "matmul_parameters",
    "parameter_table",
    "save_hf_folder",
    "shape_from_config",
    "shape_of",
]
