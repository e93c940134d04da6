"""Hugging Face's `config.json`, to a `Shape` and back.

How each family's settings are read and written is in its file (`rush/models/families`). A config may ask for an architecture
that rush does not have (another activation, other biases, another RoPE scaling). Loading its weights anyway would give wrong
results, so every setting that changes the result is checked and refused by name. Settings of training (dropout, initializer
range) are ignored.
"""

from __future__ import annotations

from typing import Any

from rush.errors import DataError, RecipeError, nearest
from rush.models.families import FAMILIES, MODEL_TYPES
from rush.models.families.family import Config
from rush.models.families.settings import check_supported, refuse
from rush.models.shape import Shape


def shape_from_config(config: Config) -> Shape:
    """The shape a `config.json` describes; a DataError names what is missing or not supported."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        refuse("model_type", model_type, nearest(str(model_type)[:80], sorted(MODEL_TYPES)).rstrip("."))
    family = MODEL_TYPES[model_type]
    known = (family.architecture, *family.accepted)
    named = config.get("architectures") or []
    for name in named if isinstance(named, list) else [named]:
        if name not in known:
            refuse("architectures", name, f"supported for {model_type} are {' and '.join(known)}")
    if config.get("quantization_config") is not None:
        refuse("quantization_config", "a quantized model", "weights must be plain fp32, bf16 or fp16")
    check_supported(config, family.supported)
    try:
        return Shape(family.name, **family.read(config))
    except RecipeError as error:
        raise DataError(f"config.json describes an impossible model. {error}") from error


def config_from_shape(
    shape: Shape, *, dtype: str = "float32", bos_id: int | None = None, eos_id: int | None = None
) -> dict[str, Any]:
    """The `config.json` that transformers and its relatives need to read weights of this shape."""
    family = FAMILIES[shape.family]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_head,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return config | family.write(shape)
