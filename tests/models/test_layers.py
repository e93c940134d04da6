from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rush.errors import DataError
from rush.models import SIZES, KVCache, LinearRopeScaling, RopeScaling
from rush.models.layers import (
    GeluTanh,
    LayerNorm,
    PlainAttention,
    PlainLossHead,
    RMSNorm,
    SwiGLU,
)
from rush.models.rotary import PlainRotate, Rotary, inverse_frequencies


def draw(*dims: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, offset: int
) -> torch.Tensor:
    """Float64, one query at a time, over the keys it may see: no mask anywhere."""
    out = torch.zeros_like(q, dtype=torch.float64)
    batch, heads, queries, width = q.shape
    for b in range(batch):
        for h in range(heads):
            shared = h * k.shape[1] // heads
            for t in range(queries):
                seen = [
                    s
                    for s in range(t + offset + 1)
                    if documents is None or documents[b, s] == documents[b, t + offset]
                ]
                scores = (k[b, shared, seen].double() @ q[b, h, t].double()) / math.sqrt(width)
                out[b, h, t] = torch.softmax(scores, 0) @ v[b, shared, seen].double()
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_plain_attention_equals_a_loop_over_queries(kv_heads: int, offset: int, packed: bool) -> None:
    q = draw(2, 6, 9, 8)
    k, v = draw(2, kv_heads, 9 + offset, 8, seed=1), draw(2, kv_heads, 9 + offset, 8, seed=2)
    documents = None
    if packed:
        documents = torch.tensor([[0] * 4 + [1] * (5 + offset), [3] * (8 + offset) + [9]])
    found = PlainAttention()(q, k, v, documents=documents, query_offset=offset)
    expected = attention_by_hand(q, k, v, documents, offset)
    assert (found - expected).abs().max() < 2e-6


def test_rms_norm_equals_float64_and_in_bf16_errs_by_rounding_only() -> None:
    norm = RMSNorm(16, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(draw(16, seed=3))
    x = draw(2, 5, 16)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert (norm(x) - expected).abs().max() < 1e-6
    halved = norm.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert halved.dtype == torch.bfloat16
    assert (halved - expected).abs().max() < 3 * 2**-8 * expected.abs().max()


def test_rms_norm_of_fp16_squares_in_fp32() -> None:
    """300² is beyond fp16: squared in that dtype, the mean would be infinite and every output zero."""
    x = torch.linspace(-300, 300, 64).half()
    exact = x.double() / (x.double().square().mean() + 1e-5).sqrt()
    ours = RMSNorm(64, 1e-5).half()(x)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-3, atol=1e-4)


def test_layer_norm_equals_float64() -> None:
    norm = LayerNorm(16, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(draw(16, seed=3))
        norm.bias.copy_(draw(16, seed=4))
    x = draw(2, 5, 16) + 3
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    assert (norm(x) - expected).abs().max() < 2e-6


def test_activations_equal_their_formulas() -> None:
    x, y = draw(100, seed=5).double(), draw(100, seed=6).double()
    tanh_form = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert (GeluTanh()(x) - tanh_form).abs().max() < 1e-12
    assert (SwiGLU()(x, y) - x / (1 + torch.exp(-x)) * y).abs().max() < 1e-12


def test_the_loss_head_sums_over_labels_that_count() -> None:
    hidden, weight = draw(2, 5, 8), draw(11, 8, seed=1)
    labels = torch.tensor([[0, 1, -100, 10, 3], [-100] * 4 + [7]])
    log_probabilities = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    expected = -sum(
        log_probabilities[b, t, labels[b, t]] for b in range(2) for t in range(5) if labels[b, t] >= 0
    )
    assert abs(float(PlainLossHead()(hidden, weight, labels) - expected)) < 1e-5
    assert float(PlainLossHead()(hidden, weight, torch.full((2, 5), -100))) == 0.0


SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def test_rope_scaling_keeps_fast_frequencies_divides_slow_ones_and_interpolates() -> None:
    plain = inverse_frequencies(128, 500000.0, None).double()
    scaled = inverse_frequencies(128, 500000.0, SCALING).double()
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    between = ~fast & ~slow
    assert fast.sum() > 5
    assert slow.sum() > 5
    assert between.sum() > 2
    assert torch.equal(scaled[fast], plain[fast])
    assert (scaled[slow] * 8 / plain[slow] - 1).abs().max() < 1e-6
    share = (8192 / wavelengths[between] - 1) / (4 - 1)
    expected = (1 - share) * plain[between] / 8 + share * plain[between]
    assert (scaled[between] / expected - 1).abs().max() < 1e-6


def test_linear_rope_scaling_divides_every_frequency_as_transformers_does() -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        head_dim=64, rope_theta=10000.0, rope_scaling={"rope_type": "linear", "factor": 4.0}
    )
    expected, attention_factor = rope.ROPE_INIT_FUNCTIONS["linear"](config, "cpu")
    assert attention_factor == 1.0
    assert torch.equal(inverse_frequencies(64, 10000.0, LinearRopeScaling(4.0)), expected)


def test_rope_makes_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(16, 10000.0, None)
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16, seed=1)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned_q, _ = PlainRotate()(q, q, *rotary(torch.tensor([[query_position]])))
        _, turned_k = PlainRotate()(k, k, *rotary(torch.tensor([[key_position]])))
        return (turned_q * turned_k).sum()

    assert abs(score(7, 3) - score(1007, 1003)) < 1e-4
    assert abs(score(7, 3) - score(7, 4)) > 1e-2
    assert abs(score(0, 0) - (q * k).sum()) < 1e-6


def test_rope_frequencies_stay_fp32_and_exact_through_casts_and_meta() -> None:
    expected = inverse_frequencies(16, 500000.0, SCALING)
    with torch.device("meta"):
        rotary = Rotary(16, 500000.0, SCALING)
    assert rotary.frequencies.is_meta
    for moved in (rotary.to_empty(device="cpu"), rotary.to(torch.bfloat16), rotary.half(), rotary.double()):
        assert moved.frequencies.dtype == torch.float32
        assert torch.equal(moved.frequencies, expected)
    assert "frequencies" not in rotary.state_dict()


def test_a_cache_longer_than_the_context_is_refused() -> None:
    with pytest.raises(DataError, match=r"513.*512"):
        KVCache(SIZES["llama-tiny"], batch=1, capacity=513, device="cpu", dtype=torch.float32)


def test_the_core_agrees_with_torch_attention() -> None:
    q, k, v = draw(2, 4, 33, 16), draw(2, 2, 33, 16, seed=1), draw(2, 2, 33, 16, seed=2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (PlainAttention()(q, k, v) - expected).abs().max() < 2e-6
