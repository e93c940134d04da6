"""The published shapes, under the names that recipes use, and a tiny one per family for a laptop.

Figures are those of the config.json that each model was published with.
"""

from __future__ import annotations

from typing import Any

from rush.errors import RecipeError, nearest
from rush.models.families.settings import long_attention_factor
from rush.models.rope_scaling import LinearRopeScaling, LongRopeScaling, RopeScaling
from rush.models.shape import Shape


def gpt2_shape(
    num_layers: int, hidden: int, num_heads: int, *, vocab_size: int = 50257, context: int = 1024
) -> Shape:
    """GPT-2 with the published proportions: an MLP of 4 × hidden, a tied head."""
    return Shape(
        family="gpt2",
        vocab_size=vocab_size,
        context=context,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        intermediate=4 * hidden,
        norm_eps=1e-5,
        tied_head=True,
    )


def llama_shape(
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate: int,
    *,
    tied_head: bool,
    rope_factor: float | None = None,
    vocab_size: int = 128256,
    context: int = 131072,
    rope_theta: float = 500000.0,
) -> Shape:
    """Llama 3.1 or 3.2: a vocabulary of 128,256, RoPE scaled from a context of 8,192 to 131,072."""
    scaling = None if rope_factor is None else RopeScaling(rope_factor, 1.0, 4.0, 8192)
    return _shape(
        "llama",
        (num_layers, hidden, num_heads, num_kv_heads, intermediate),
        norm_eps=1e-5,
        tied_head=tied_head,
        vocab_size=vocab_size,
        context=context,
        rope_theta=rope_theta,
        rope_scaling=scaling,
    )


def _shape(family: str, dims: tuple[int, int, int, int, int], **rest: Any) -> Shape:
    """`dims` are layers, hidden, heads, key/value heads, MLP width."""
    num_layers, hidden, num_heads, num_kv_heads, intermediate = dims
    settings: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden": hidden,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate": intermediate,
        "head_dim": hidden // num_heads,
        "norm_eps": 1e-6,
    }
    return Shape(family, **(settings | rest))


def _qwen3(*dims: int, tied_head: bool) -> Shape:
    return _shape(
        "qwen3", dims, head_dim=128, vocab_size=151936, context=40960, rope_theta=1e6, tied_head=tied_head  # type: ignore[arg-type]
    )  # fmt: skip


def _qwen2(*dims: int, tied_head: bool, vocab_size: int = 151936) -> Shape:
    return _shape("qwen2", dims, vocab_size=vocab_size, context=32768, rope_theta=1e6, tied_head=tied_head)  # type: ignore[arg-type]


def _gemma2(*dims: int) -> Shape:
    return _shape(
        "gemma2", dims, head_dim=256, vocab_size=256000, context=8192, rope_theta=1e4, tied_head=True,  # type: ignore[arg-type]
        window=4096, window_layers=(True, False), attention_softcap=50.0, logit_softcap=30.0,
    )  # fmt: skip


def _gemma3(*dims: int, vocab_size: int, context: int, window: int, factor: float | None = None) -> Shape:
    return _shape(
        "gemma3_text", dims, head_dim=256, vocab_size=vocab_size, context=context, tied_head=True, window=window,  # type: ignore[arg-type]
        window_layers=(True,) * 5 + (False,), rope_theta=1e6, local_rope_theta=1e4,
        rope_scaling=None if factor is None else LinearRopeScaling(factor),
    )  # fmt: skip


def _tiny(family: str, **rest: Any) -> Shape:
    settings: dict[str, Any] = {"vocab_size": 2048, "context": 512, "rope_theta": 1e4, "tied_head": True}
    return _shape(family, (4, 128, 4, 2, 352), **(settings | rest))


_PHI_4_MINI = LongRopeScaling(
    short_factor=(1.0,) * 48,
    long_factor=(
        1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23,
        32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ),
    original_context=4096,
    attention_factor=long_attention_factor(131072, 4096),
)  # fmt: skip

SIZES: dict[str, Shape] = {
    "tiny": gpt2_shape(4, 128, 4, vocab_size=2048, context=256),
    "llama-tiny": llama_shape(
        4, 128, 4, 2, 352, tied_head=True, vocab_size=2048, context=512, rope_theta=10000.0
    ),
    "mistral-tiny": _tiny("mistral", window=64, tied_head=False),
    "qwen2-tiny": _tiny("qwen2"),
    "qwen3-tiny": _tiny("qwen3", head_dim=64),
    "gemma2-tiny": _tiny(
        "gemma2", head_dim=64, window=64, window_layers=(True, False), attention_softcap=50.0, logit_softcap=30.0
    ),
    "gemma3-tiny": _tiny(
        "gemma3_text", head_dim=64, window=64, window_layers=(True, True, True, False), local_rope_theta=1e3
    ),
    "phi3-tiny": _tiny("phi3", rotary_dim=12, tied_head=False),
    "olmo2-tiny": _tiny("olmo2", tied_head=False),
    "granite-tiny": _tiny(
        "granite", embedding_scale=12.0, residual_scale=0.22, attention_scale=0.03125, logit_divisor=8.0
    ),
    "smollm3-tiny": _tiny("smollm3", rope_layers=(True, True, True, False)),
    "gpt2-124m": gpt2_shape(12, 768, 12),
    "gpt2-350m": gpt2_shape(24, 1024, 16),
    "gpt2-774m": gpt2_shape(36, 1280, 20),
    "gpt2-1.5b": gpt2_shape(48, 1600, 25),
    "llama-3.2-1b": llama_shape(16, 2048, 32, 8, 8192, tied_head=True, rope_factor=32.0),
    "llama-3.2-3b": llama_shape(28, 3072, 24, 8, 8192, tied_head=True, rope_factor=32.0),
    "llama-3.1-8b": llama_shape(32, 4096, 32, 8, 14336, tied_head=False, rope_factor=8.0),
    # Meta, "The Llama 3 Herd of Models", arXiv:2407.21783, table 3.
    "llama-3.1-70b": llama_shape(80, 8192, 64, 8, 28672, tied_head=False, rope_factor=8.0),
    "llama-3.1-405b": llama_shape(126, 16384, 128, 8, 53248, tied_head=False, rope_factor=8.0),
    # Version 0.1; later ones have no window.
    "mistral-7b": _shape(
        "mistral", (32, 4096, 32, 8, 14336), vocab_size=32000, context=32768, window=4096, rope_theta=1e4,
        norm_eps=1e-5, tied_head=False,
    ),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, tied_head=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, tied_head=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, tied_head=False, vocab_size=152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied_head=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied_head=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied_head=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288, tied_head=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408, tied_head=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600, tied_head=False),
    "gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14336),
    "gemma-3-1b": _gemma3(26, 1152, 4, 1, 6912, vocab_size=262144, context=32768, window=512),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 10240, vocab_size=262208, context=131072, window=1024, factor=8.0),
    "phi-4": _shape(
        "phi3", (40, 5120, 40, 10, 17920), vocab_size=100352, context=16384, rope_theta=250000.0, norm_eps=1e-5,
        tied_head=False,
    ),
    "phi-4-mini": _shape(
        "phi3", (32, 3072, 24, 8, 8192), vocab_size=200064, context=131072, rope_theta=1e4, norm_eps=1e-5,
        tied_head=True, rotary_dim=96, rope_scaling=_PHI_4_MINI,
    ),
    "olmo-2-1b": _shape(
        "olmo2", (16, 2048, 16, 16, 8192), vocab_size=100352, context=4096, rope_theta=500000.0, tied_head=False
    ),
    "olmo-2-7b": _shape(
        "olmo2", (32, 4096, 32, 32, 11008), vocab_size=100352, context=4096, rope_theta=500000.0, tied_head=False
    ),
    "granite-3.3-2b": _shape(
        "granite", (40, 2048, 32, 8, 8192), vocab_size=49159, context=131072, rope_theta=1e7, norm_eps=1e-5,
        tied_head=True, embedding_scale=12.0, residual_scale=0.22, attention_scale=0.015625, logit_divisor=8.0,
    ),
    "smollm3-3b": _shape(
        "smollm3", (36, 2048, 16, 4, 11008), vocab_size=128256, context=65536, rope_theta=5e6, tied_head=True,
        rope_layers=(True, True, True, False),
    ),
}  # fmt: skip


def shape_of(name: str) -> Shape:
    """The shape of a named size, or a RecipeError that names the nearest one."""
    if name not in SIZES:
        raise RecipeError(f"There is no model size {name!r}: {nearest(name, SIZES)}")
    return SIZES[name]
