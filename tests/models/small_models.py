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
from rush.models import Decoder, RopeScaling, Shape, build_model

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


def _llama(**changes: Any) -> Shape:
    settings: dict[str, Any] = {
        "family": "llama",
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
