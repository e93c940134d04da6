"""Fused LM head and loss: against float64, in every dtype, in chunks, compiled, recomputed, under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.linear_cross_entropy import chunks, linear_cross_entropy
from rush.kernels.linear_cross_entropy.reference import linear_cross_entropy as reference

CPP = True
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tokens, hidden, vocabulary, tokens per chunk: tiny, odd, a remainder, aligned (no padding), many chunks.
# Fewer under the interpreter, which is slow, and on a GPU, where each width and dtype compiles a kernel.
ODD = (7, 16, 33, 3)
INTERPRETED_CASES = [
    *((ODD, dtype) for dtype in DTYPES),
    ((1, 8, 5, 1), torch.float32),
    ((24, 32, 257, 5), torch.bfloat16),
]
CASES = [
    *(
        pytest.param(
            place,
            shape,
            dtype,
            marks=() if place == "c++" or (shape, dtype) in INTERPRETED_CASES else pytest.mark.slow,
        )
        for place in ("cpu", "c++")
        for shape in ((1, 8, 5, 1), ODD, (24, 32, 257, 5), (24, 32, 128, 24), (40, 16, 64, 2))
        for dtype in DTYPES
    ),
    *(
        pytest.param("cuda", shape, dtype, marks=pytest.mark.gpu)
        for shape, dtype in (
            ((300, 64, 257, 100), torch.float32),
            ((2000, 768, 50257, 171), torch.bfloat16),
            ((2048, 512, 32000, 64), torch.bfloat16),
            ((1000, 256, 32000, 125), torch.float16),
        )
    ),
]


def made(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * vocab)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) / 2
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[3::5] = -100
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)


def gradients(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: float = 0.5,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients, with an upstream gradient that is not 1."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    loss = function(hidden, weight, labels, **options)
    d_hidden, d_weight = torch.autograd.grad(loss * scale, (hidden, weight))
    return loss.detach(), d_hidden, d_weight


@pytest.mark.parametrize(("device", "shape", "dtype"), CASES, indirect=["device"])
def test_loss_and_gradients_are_as_exact_as_full_logits_in_the_same_dtype(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, check_errors: Any
) -> None:
    tokens, width, vocab, chunk = shape
    hidden, weight, labels = made(tokens, width, vocab, dtype, device)
    exact = gradients(reference, hidden.double(), weight.double(), labels)
    plain = gradients(reference, hidden, weight, labels)
    ours = gradients(linear_cross_entropy, hidden, weight, labels, chunk_tokens=chunk)
    for what, factor, found, theirs, true in zip(
        ("loss", "hidden", "weight"), (2, 3, 3), ours, plain, exact, strict=True
    ):
        check_errors(found, theirs, true, factor, what)


def test_in_bf16_the_sum_over_many_chunks_stays_within_three_times(device: str, check_errors: Any) -> None:
    size = 8 if device == "cuda" else 2
    tokens = size * chunks.MOST_ROUNDED
    hidden, weight, labels = made(tokens, 16, 64, torch.bfloat16, device)
    exact = gradients(reference, hidden.double(), weight.double(), labels)[2]
    plain = gradients(reference, hidden, weight, labels)[2]
    for chunk in (size, size // 2):  # rounded after each chunk, and above MOST_ROUNDED kept in fp32
        ours = gradients(linear_cross_entropy, hidden, weight, labels, chunk_tokens=chunk)[2]
        check_errors(ours, plain, exact, 3, f"chunks of {chunk}")


def test_in_fp16_neither_a_large_sum_nor_a_small_probability_is_lost(device: str) -> None:
    tokens, width, vocab = 64, 8, 40
    hidden = torch.full((tokens, width), 2000.0, device=device, dtype=torch.float16)
    weight = torch.zeros(vocab, width, device=device, dtype=torch.float16)
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    # The unscaled gradient of the label's row is 64 · 2000 · 39/40, beyond fp16.
    _, _, d_weight = gradients(linear_cross_entropy, hidden, weight, labels, scale=1 / tokens, chunk_tokens=8)
    assert d_weight.isfinite().all()
    torch.testing.assert_close(
        d_weight[0].float(), torch.full((width,), -2000 * 39 / 40, device=device), rtol=2e-3, atol=0
    )
    # A probability of e^-20 = 2e-9 is below fp16's smallest number, and 30,000 times it is not.
    hidden = torch.ones(1, 1, device=device, dtype=torch.float16)
    weight = torch.tensor([[20.0], [0.0]], device=device, dtype=torch.float16)
    _, _, d_weight = gradients(
        linear_cross_entropy, hidden, weight, torch.zeros(1, dtype=torch.int64, device=device), scale=30000.0
    )
    assert float(d_weight[1]) == pytest.approx(30000 * 2.06e-9, rel=0.05)


def test_only_required_gradients_are_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = made(12, 8, 20, torch.float32, device)
    matmuls: list[str] = []
    for name in ("_mm", "_addmm_transposed"):
        original = getattr(chunks, name)

        def counted(*args: Any, name: str = name, original: Any = original, **rest: Any) -> None:
            matmuls.append(name)
            original(*args, **rest)

        monkeypatch.setattr(chunks, name, counted)
    expected = reference(hidden, weight, labels)
    for hidden_grad, weight_grad in ((False, False), (True, False), (False, True), (True, True)):
        matmuls.clear()
        found = linear_cross_entropy(
            hidden.clone().requires_grad_(hidden_grad),
            weight.clone().requires_grad_(weight_grad),
            labels,
            chunk_tokens=12,
        )
        torch.testing.assert_close(found, expected)
        assert matmuls == ["_mm"] * hidden_grad + ["_addmm_transposed"] * weight_grad
    with torch.no_grad():
        matmuls.clear()
        linear_cross_entropy(hidden.clone().requires_grad_(), weight.clone().requires_grad_(), labels)
        assert matmuls == []


def test_chunks_do_not_change_the_result(device: str) -> None:
    hidden, weight, labels = made(14, 16, 30, torch.float32, device)
    expected = gradients(reference, hidden, weight, labels)
    for chunk in (None, 7, 99):
        for found, theirs in zip(
            gradients(linear_cross_entropy, hidden, weight, labels, chunk_tokens=chunk), expected, strict=True
        ):
            torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


def test_the_default_chunk_is_at_most_a_tenth_of_many_tokens_and_never_all_of_a_few() -> None:
    assert [chunks.default_chunk(n) for n in (16384, 32768, 65536)] == [1536, 2048, 4096]
    assert all(chunks.default_chunk(n) / n <= 0.1 for n in (10240, 12288, 16384, 65536, 10**6))
    # Up to 16 chunks the weight's gradient is summed in bf16, and the default stays there.
    many = (10240, 16384, 20479, 32768, 36864, 65536, 131072, 10**6)
    assert all(-(-n // chunks.default_chunk(n)) <= chunks.MOST_ROUNDED for n in many)
    assert all(chunks.default_chunk(n) < n for n in range(2, 3000))


def test_grouped_and_strided_inputs(device: str) -> None:
    hidden, weight, labels = made(8, 16, 30, torch.float32, device)
    expected = gradients(linear_cross_entropy, hidden, weight, labels)
    grouped = gradients(linear_cross_entropy, hidden.view(2, 4, 16), weight, labels.view(2, 4))
    torch.testing.assert_close(grouped[0], expected[0])
    torch.testing.assert_close(grouped[1].flatten(0, 1), expected[1])
    strided = gradients(
        linear_cross_entropy,
        hidden.t().contiguous().t(),
        weight.t().contiguous().t(),
        labels.repeat_interleave(2)[::2],
    )
    for found, theirs in zip(strided, expected, strict=True):
        torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_matmuls_round_and_gradients_keep_the_dtype_of_their_tensor(
    dtype: torch.dtype, device: str, check_errors: Any
) -> None:
    hidden, weight, labels = made(10, 32, 67, torch.float32, device)
    exact = gradients(reference, hidden.double(), weight.double(), labels)
    with torch.autocast(device, dtype):
        plain = gradients(reference, hidden, weight, labels)
        ours = gradients(linear_cross_entropy, hidden, weight, labels, chunk_tokens=5)
        mixed = gradients(linear_cross_entropy, hidden.to(dtype), weight, labels, chunk_tokens=5)
    for factor, found, theirs, true in zip((2, 3, 3), ours, plain, exact, strict=True):
        assert found.dtype == torch.float32
        check_errors(found, theirs, true, factor)
    assert mixed[1].dtype == dtype
    assert torch.equal(mixed[2], ours[2])
    rounded = gradients(linear_cross_entropy, hidden.to(dtype), weight.to(dtype), labels, chunk_tokens=5)
    torch.testing.assert_close(ours[0], rounded[0])


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        *(("c++", dtype) for dtype in DTYPES),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    indirect=["device"],
)
def test_compiled_without_a_graph_break_it_gives_the_same(device: str, dtype: torch.dtype) -> None:
    hidden, weight, labels = made(9, 32, 67, dtype, device)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1.5, weight, labels, chunk_tokens=8) * 0.25

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for found, theirs in zip(
        gradients(compiled, hidden, weight, labels), gradients(loss, hidden, weight, labels), strict=True
    ):
        torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance / 10)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(hidden, weight, labels), loss(hidden, weight, labels), rtol=1e-4, atol=1e-4
        )


def test_recomputed_under_activation_checkpointing_it_gives_the_same(device: str) -> None:
    hidden, weight, labels = made(6, 16, 30, torch.float32, device)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.sin(), weight, labels)

    def again(*given: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(loss, *given, use_reentrant=False)
        return recomputed

    for found, theirs in zip(
        gradients(again, hidden, weight, labels), gradients(loss, hidden, weight, labels), strict=True
    ):
        assert torch.equal(found, theirs)


def test_a_second_backward_pass_over_gradients_that_were_scaled_in_place_is_an_error(device: str) -> None:
    hidden, weight, labels = made(6, 8, 20, torch.float32, device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels) * 0.5
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_repeats_give_the_same_bits(device: str) -> None:
    many = (1024, 256, 5000, 96) if device == "cuda" else (12, 8, 20, 5)
    hidden, weight, labels = made(*many[:3], torch.bfloat16, device)
    first = gradients(linear_cross_entropy, hidden, weight, labels, chunk_tokens=many[3])
    for _ in range(100 if device == "cuda" else 2):
        again = gradients(linear_cross_entropy, hidden, weight, labels, chunk_tokens=many[3])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_operator_is_what_it_declares(device: str) -> None:
    hidden, weight, labels = made(9, 8, 20, torch.float32, device)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(
        torch.ops.rush.linear_cross_entropy.default,
        (hidden, weight, labels, torch.float32, 4, -100, True, True, 0, 0, 1, "", "dtype"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4, dtype=torch.float64)}, "takes fp32, bf16 and fp16"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.bfloat16)}, "in one dtype"),
        ({"hidden": torch.zeros(3, 5)}, r"a weight \[vocabulary, width\]"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, "for each hidden state"),
        ({"chunk_tokens": 0}, "chunk_tokens must be positive"),
    ],
)
def test_unsupported_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "hidden": torch.zeros(3, 4), "weight": torch.zeros(6, 4), "labels": torch.zeros(3, dtype=torch.int64), **change
    }  # fmt: skip
    with pytest.raises(KernelRefusal, match=message):
        linear_cross_entropy(given.pop("hidden"), given.pop("weight"), given.pop("labels"), **given)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_extra_memory_is_at_most_a_tenth_of_the_logits(how: str) -> None:
    tokens, width, vocab = 16384, 1024, 65536
    hidden, weight, labels = made(tokens, width, vocab, torch.bfloat16, "cuda")
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels)

    torch._dynamo.reset()
    call = loss if how == "eager" else torch.compile(loss, fullgraph=True)
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (call(hidden, weight) / tokens).backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    results = 2 * (hidden.numel() + weight.numel())
    logits = 2 * tokens * vocab
    assert peak - results < 0.1 * logits, (
        f"{(peak - results) / logits:.1%} of the logits beyond the gradients"
    )
