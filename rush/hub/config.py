"""Hugging Face's `config.json`, to a `Shape` and back.

A config may ask for an architecture that rush does not have (another activation, biases, another RoPE scaling). Loading its
weights anyway would give wrong results, so every setting that changes the result is checked and refused by name. Settings
of training (dropout, initializer range) are ignored.

Llama's RoPE settings have two spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` since transformers 5. Both
are read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from rush.errors import DataError, RecipeError
from rush.models.shape import LinearRopeScaling, RopeScaling, Shape, rope_type

Config = Mapping[str, Any]

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
_BASE_ARCHITECTURES = {"gpt2": "GPT2Model", "llama": "LlamaModel"}

# Settings that change the result: the supported values, the library's default first.
_GPT2_SUPPORTED: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}
_LLAMA_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}
_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
Scaling = RopeScaling | LinearRopeScaling | None


def shape_from_config(config: Config) -> Shape:
    """The shape a `config.json` describes; a DataError names what is missing or not supported."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        _refuse("model_type", family, f"supported are {', '.join(sorted(ARCHITECTURES))}")
    known = (ARCHITECTURES[family], _BASE_ARCHITECTURES[family])
    named = config.get("architectures") or []
    for name in named if isinstance(named, list) else [named]:
        if name not in known:
            _refuse("architectures", name, f"supported for {family} are {' and '.join(known)}")
    if config.get("quantization_config") is not None:
        _refuse("quantization_config", "a quantized model", "weights must be plain fp32, bf16 or fp16")
    try:
        return _gpt2_shape(config) if family == "gpt2" else _llama_shape(config)
    except RecipeError as error:
        raise DataError(f"config.json describes an impossible model. {error}") from error


def config_from_shape(
    shape: Shape, *, dtype: str = "float32", bos_id: int | None = None, eos_id: int | None = None
) -> dict[str, Any]:
    """The `config.json` that transformers and its relatives need to read weights of this shape."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_head,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return config | (_gpt2_config(shape) if shape.family == "gpt2" else _llama_config(shape))


def _gpt2_shape(config: Config) -> Shape:
    _check_supported(config, _GPT2_SUPPORTED)
    hidden = _number(config, "n_embd", "hidden_size")
    num_heads = _number(config, "n_head", "num_attention_heads")
    inner = config.get("n_inner")
    return Shape(
        family="gpt2",
        vocab_size=_number(config, "vocab_size"),
        context=_number(config, "n_positions", "max_position_embeddings", "n_ctx"),
        hidden=hidden,
        num_layers=_number(config, "n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=max(1, hidden // max(1, num_heads)),
        intermediate=4 * hidden if inner is None else inner,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tied_head=_flag(config, "tie_word_embeddings", default=True),
    )


def _llama_shape(config: Config) -> Shape:
    _check_supported(config, _LLAMA_SUPPORTED)
    hidden = _number(config, "hidden_size")
    num_heads = _number(config, "num_attention_heads")
    num_kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    theta, scaling = _rope_from_config(config)
    return Shape(
        family="llama",
        vocab_size=_number(config, "vocab_size"),
        context=_number(config, "max_position_embeddings"),
        hidden=hidden,
        num_layers=_number(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=max(1, hidden // max(1, num_heads)) if head_dim is None else head_dim,
        intermediate=_number(config, "intermediate_size"),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_head=_flag(config, "tie_word_embeddings", default=False),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _rope_from_config(config: Config) -> tuple[float, Scaling]:
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            _refuse(key, value, "it must be a JSON object")
    readings = [_rope_table(table) for table in (new, old) if table]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise DataError("config.json has different values in rope_parameters and rope_scaling: keep one.")
    thetas: list[Any] = []
    for table in (config, new, old):
        theta = table.get("rope_theta") if table else None
        if theta is not None and theta not in thetas:
            thetas.append(theta)
    if len(thetas) > 1:
        raise DataError(f"config.json gives several values of rope_theta: {thetas!r:.200}. Keep one.")
    return (thetas[0] if thetas else 10000.0), (readings[0] if readings else None)


def _rope_table(table: Config) -> Scaling:
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        _refuse("rope_type", kind, "supported are default, linear and llama3")
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse("partial_rotary_factor", table["partial_rotary_factor"], "supported is 1.0")
    if kind == "default":
        return None
    keys = _ROPE_KEYS if kind == "llama3" else {"factor": "factor"}
    missing = [key for key in keys.values() if key not in table]
    if missing:
        raise DataError(f"config.json's {kind} RoPE scaling lacks {', '.join(missing)}.")
    values = {ours: table[theirs] for ours, theirs in keys.items()}
    return RopeScaling(**values) if kind == "llama3" else LinearRopeScaling(**values)


def _gpt2_config(shape: Shape) -> dict[str, Any]:
    return {
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "n_embd": shape.hidden,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": None if shape.intermediate == 4 * shape.hidden else shape.intermediate,
        "layer_norm_epsilon": shape.norm_eps,
        # Our models have no dropout; transformers would assume 0.1.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    } | {key: values[0] for key, values in _GPT2_SUPPORTED.items()}


def _llama_config(shape: Shape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    table: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        table = {"rope_type": rope_type(scaling)} | {
            theirs: getattr(scaling, ours) for ours, theirs in _ROPE_KEYS.items() if hasattr(scaling, ours)
        }
    return {
        "max_position_embeddings": shape.context,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if scaling is None else table,
        "rope_parameters": table | {"rope_theta": shape.rope_theta},
    }


def _check_supported(config: Config, supported: Mapping[str, tuple[object, ...]]) -> None:
    for key, allowed in supported.items():
        found = config.get(key, allowed[0])
        if found not in allowed:
            _refuse(key, found, f"supported is {' or '.join(repr(value) for value in allowed)}")


def _number(config: Config, *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            if not isinstance(value, int) or isinstance(value, bool):
                _refuse(name, value, "it must be a whole number")
            return value
    raise DataError(f"config.json lacks {names[0]!r}, without which the model's shape is unknown.")


def _flag(config: Config, name: str, *, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        _refuse(name, value, "it must be true or false")
    return value


def _refuse(key: str, found: object, why: str) -> NoReturn:
    raise DataError(f"config.json asks for {key} = {found!r:.200}, which rush does not support: {why}.")
