"""Small models of every kind, and the same models in transformers, for the tests of models and of the hub."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.hub.config import config_from_shape
from rush.hub.weights import load_hf_folder
from rush.models import (
    Decoder,
    LinearRopeScaling,
    LongRopeScaling,
    RopeScaling,
    Shape,
    YarnRopeScaling,
    build_model,
)

VOCAB = 257  # odd, and a byte is a token


def _gpt2(**changes: Any) -> Shape:
    settings: dict[str, Any] = {
        "family": "gpt2",
        "vocab_size": VOCAB,
        "context": 64,
        "hidden": 36,
        "num_layers": 3,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 12,
        "intermediate": 144,
        "norm_eps": 1e-5,
        "tied_head": True,
    }
    return Shape(**(settings | changes))


def _llama(family: str = "llama", **changes: Any) -> Shape:
    settings: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "context": 64,
        "hidden": 48,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate": 100,
        "norm_eps": 1e-5,
        "tied_head": True,
        "rope_theta": 10000.0,
    }
    return Shape(**(settings | changes))


# The scaling's three regimes (kept, blended, slowed) all occur among the four frequencies of a head.
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)

SMALL_SHAPES: dict[str, Shape] = {
    "gpt2": _gpt2(),
    "gpt2-untied-narrow": _gpt2(tied_head=False, intermediate=50, num_heads=1, num_kv_heads=1, head_dim=36),
    "llama-grouped": _llama(),
    "llama-all-heads-untied": _llama(num_kv_heads=6, tied_head=False),
    "llama-one-kv-head": _llama(num_kv_heads=1, rope_theta=500000.0, norm_eps=1e-6),
    "llama-scaled": _llama(rope_scaling=SCALING, rope_theta=100.0),
    "llama-wide-heads": _llama(head_dim=10, tied_head=False),
}

# Each family that varies Llama at an odd shape: windows of odd lengths, layers that differ, numbers of its own.
FAMILY_SHAPES: dict[str, Shape] = {
    "mistral": _llama("mistral", window=11, tied_head=False),
    "mistral-yarn": _llama("mistral", rope_scaling=YarnRopeScaling(4.0, 16), rope_theta=1000.0),
    "qwen2": _llama("qwen2", head_dim=8),
    "qwen2-windows": _llama("qwen2", window=7, window_layers=(False, True, True)),
    "qwen3": _llama("qwen3", head_dim=14),
    "qwen3-windows": _llama("qwen3", head_dim=14, window=5, window_layers=(False, True), tied_head=False),
    "gemma2": _llama(
        "gemma2", head_dim=14, window=9, window_layers=(True, False), attention_scale=24**-0.5,
        attention_softcap=5.0, logit_softcap=3.0,
    ),
    "gemma3": _llama(
        "gemma3_text", head_dim=14, window=9, window_layers=(True, True, False), local_rope_theta=50.0,
        rope_scaling=LinearRopeScaling(4.0), attention_scale=20**-0.5,
    ),
    "phi3": _llama("phi3", window=13, tied_head=False),
    "phi3-partial-long": _llama(
        "phi3", rotary_dim=6, tied_head=False,
        rope_scaling=LongRopeScaling((1.0, 1.25, 1.5), (1.0, 3.0, 9.0), 24, attention_factor=1.19),
    ),
    "olmo2": _llama("olmo2", tied_head=False),
    "granite": _llama(
        "granite", embedding_scale=3.3, residual_scale=0.22, attention_scale=0.07, logit_divisor=6.0
    ),
    "smollm3": _llama("smollm3", rope_layers=(True, True, False)),
    "smollm3-windows": _llama(
        "smollm3", num_layers=4, rope_layers=(True, False), window=6, window_layers=(False, True)
    ),
}  # fmt: skip
SMALL_SHAPES |= FAMILY_SHAPES


@pytest.fixture(params=list(SMALL_SHAPES), ids=list(SMALL_SHAPES))
def small_shape(request: pytest.FixtureRequest) -> Shape:
    return SMALL_SHAPES[request.param]


@pytest.fixture(params=["gpt2", "llama-scaled"])
def family_shape(request: pytest.FixtureRequest) -> Shape:
    """One shape per family, for what does not depend on the details."""
    return SMALL_SHAPES[request.param]


@pytest.fixture
def lively() -> Callable[[Shape], Decoder]:
    """A model whose every parameter matters: no zero biases, no unit norms, scores far from uniform."""

    def build(shape: Shape, seed: int = 1) -> Decoder:
        model = build_model(shape, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        return model

    return build


@pytest.fixture
def text_tokens() -> Callable[[int, int], torch.Tensor]:
    """Rows of real text, a byte a token."""

    def rows(batch: int, length: int) -> torch.Tensor:
        source = Path(textwrap.__file__).read_bytes()
        return torch.tensor([list(source[1000 * row : 1000 * row + length]) for row in range(batch)])

    return rows


@pytest.fixture
def reference() -> Callable[[Shape], Any]:
    """The same architecture in transformers, with plain attention and random weights in every tensor."""

    def build(shape: Shape, seed: int = 0) -> Any:
        import transformers

        config = transformers.AutoConfig.for_model(**config_from_shape(shape))
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.eval()

    return build


@pytest.fixture
def imported(tmp_path: Path) -> Callable[[Any], Decoder]:
    """Our model with a transformers model's weights, by way of the folder transformers writes."""

    def load(theirs: Any) -> Decoder:
        folder = tmp_path / f"imported-{len(list(tmp_path.iterdir()))}"
        theirs.save_pretrained(folder)
        shape, state = load_hf_folder(folder)
        model = build_model(shape)
        model.load_state_dict(state)
        return model

    return load
