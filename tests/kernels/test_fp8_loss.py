"""The LM head and its loss with fp8 operands: against the same casts in float64, and against bf16."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels.fp8_linear.operands import scaled_mm
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Fp8Tensor, quantize
from rush.kernels.linear_cross_entropy import fp8, linear_cross_entropy
from rush.kernels.linear_cross_entropy.fp8 import SCALE, logits_gradient

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
# Tokens, width, vocabulary, tokens per chunk: one chunk smaller than a tile; an odd vocabulary, several chunks, a remainder.
SHAPES = [
    (16, 16, 64, None),
    (144, 32, 301, 64),
    pytest.param(256, 48, 515, 128, marks=pytest.mark.slow),
]
LARGE = [(4096, 768, 50257, 1024)]


@pytest.fixture(autouse=True)
def _units(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 matmuls")


def given(device: str, tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=device).bfloat16()
    weight = (torch.randn(vocab, width, generator=generator, device=device) * 0.3).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, **more: object) -> tuple[Tensor, Tensor, Tensor]:
    loss = linear_cross_entropy(hidden, weight, labels, matmuls="fp8", **more)  # type: ignore[arg-type]
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


def emulated(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64 from the same fp8 values, one chunk at a time since each has its own scale.

    On a GPU the logits come from its tensor cores: their fast accumulation truncates, which makes all logits a little
    smaller (`test_what_fast_accumulation_truncates`).
    """

    def fp8(x: Tensor) -> Fp8Tensor:
        return Fp8Tensor(*quantize(x.detach(), E4M3, rowwise=False))

    def wide(x: Fp8Tensor) -> Tensor:
        return x.values.double() * x.inv_scale.double()

    narrow = fp8(F.pad(weight, (0, 0, 0, -len(weight) % 64)))
    w, losses, d_hidden = wide(narrow)[: len(weight)], 0.0, []
    d_weight = torch.zeros_like(w)
    for x_bf16, label in zip(
        hidden.split(chunk or len(hidden)), labels.split(chunk or len(hidden)), strict=True
    ):
        narrow_x = fp8(x_bf16)
        x = wide(narrow_x)
        if x.is_cuda:
            made = scaled_mm(narrow_x, narrow, torch.bfloat16, fast_accum=True)[:, : len(weight)]
        else:
            made = (x @ w.t()).bfloat16()
        logits = made.double().requires_grad_()
        loss = F.cross_entropy(logits, label, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, logits)
        gradient = (gradient * SCALE).float().to(E5M2).double() / SCALE
        losses = losses + loss.detach()
        d_hidden.append(gradient @ w)
        d_weight += gradient.t() @ x
    return losses, torch.cat(d_hidden), d_weight


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("tokens", "width", "vocab", "chunk"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in LARGE)],
)
def test_it_equals_the_emulation_in_float64(
    device: str, tokens: int, width: int, vocab: int, chunk: int | None
) -> None:
    if tokens > 1000 and device == "cpu":
        pytest.skip("too much for the interpreter")
    hidden, weight, labels = given(device, tokens, width, vocab)
    loss, d_hidden, d_weight = ours(hidden, weight, labels, chunk_tokens=chunk)
    exact = emulated(hidden, weight, labels, chunk)
    # Results are rounded to bf16, each chunk's too: 0.003 at most. With gradients in e4m3 it would be 0.011 to 0.03.
    assert float(loss) == pytest.approx(float(exact[0]), rel=1e-6)
    assert apart(d_hidden, exact[1]) < 0.004
    assert apart(d_weight, exact[2]) < 0.004
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    assert d_hidden[labels == -100].abs().max() == 0


@pytest.mark.gpu
def test_what_fast_accumulation_truncates(device: str) -> None:
    """Hopper's tensor cores keep at least 13 bits of every sum, at each step of 32 terms."""
    if device == "cpu":
        pytest.skip("a CPU accumulates in full precision")
    hidden, weight, _ = given(device, 1024, 768, 4096)
    x, w = (Fp8Tensor(*quantize(each.detach(), E4M3, rowwise=False)) for each in (hidden, weight))
    logits = scaled_mm(x, w, torch.float32, fast_accum=True).double()
    exact = (x.values.double() * x.inv_scale) @ (w.values.double() * w.inv_scale).t()
    sizes = (x.values.double() * x.inv_scale).abs() @ (w.values.double() * w.inv_scale).abs().t()
    assert float(((logits - exact).abs() / sizes).max()) < 768 / 32 * 2.0**-13


@pytest.mark.parametrize(("tokens", "width", "vocab", "chunk"), [(48, 32, 133, 32)])
def test_it_is_near_bf16(device: str, tokens: int, width: int, vocab: int, chunk: int | None) -> None:
    hidden, weight, labels = given(device, tokens, width, vocab)
    loss, d_hidden, d_weight = ours(hidden, weight, labels, chunk_tokens=chunk)
    plain = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    theirs = torch.autograd.grad(plain, (hidden, weight))
    assert float(loss) == pytest.approx(float(plain.detach()), rel=0.01)
    assert 1e-4 < apart(d_hidden, theirs[0].double()) < 0.15
    assert 1e-4 < apart(d_weight, theirs[1].double()) < 0.15


def test_the_transpose_has_the_same_bytes_and_padding_is_zero(device: str) -> None:
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(144, 320, generator=generator, device=device).bfloat16()
    labels = torch.randint(0, 301, (144,), generator=generator, device=device)
    lse = torch.logsumexp(logits[:, :301].float(), -1)
    gradient, transposed = logits_gradient(logits, labels, lse, 301, -100)
    assert torch.equal(gradient.t().contiguous().view(torch.uint8), transposed.view(torch.uint8))
    assert gradient[:, 301:].float().abs().max() == 0
    assert gradient.float().abs().max() > 0.5 * SCALE


def test_each_gradient_alone_is_the_same_and_the_loss_needs_none(device: str) -> None:
    hidden, weight, labels = given(device, 16, 16, 70)
    loss, d_hidden, d_weight = ours(hidden, weight, labels)
    (only_hidden,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight.detach(), labels, matmuls="fp8"), hidden
    )
    (only_weight,) = torch.autograd.grad(
        linear_cross_entropy(hidden.detach(), weight, labels, matmuls="fp8"), weight
    )
    assert torch.equal(only_hidden, d_hidden)
    assert torch.equal(only_weight, d_weight)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, matmuls="fp8"), loss)


def test_it_refuses_unknown_matmuls(device: str) -> None:
    hidden, weight, labels = given(device, 16, 16, 64)
    with pytest.raises(KernelRefusal, match="dtype, fp8 or fp8_fast"):
        linear_cross_entropy(hidden, weight, labels, matmuls="fp4")  # type: ignore[arg-type]


def test_it_is_deterministic(device: str, repeats: int) -> None:
    size = (144, 32, 301) if device == "cuda" else (32, 16, 70)
    hidden, weight, labels = given(device, *size)
    first = ours(hidden, weight, labels, chunk_tokens=16)
    for _ in range(repeats):
        assert all(map(torch.equal, ours(hidden, weight, labels, chunk_tokens=16), first))


def test_it_compiles_without_a_graph_break(device: str, backend: str) -> None:
    hidden, weight, labels = given(device, 16, 16, 70)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1.0, weight, labels, matmuls="fp8")

    loss = torch.compile(loss_of, fullgraph=True, backend=backend)(hidden, weight)
    found = torch.autograd.grad(loss, (hidden, weight))
    expected = ours(hidden, weight, labels)
    assert torch.equal(loss, expected[0])
    assert all(map(torch.equal, found, expected[1:]))


@pytest.mark.parametrize(
    ("tokens", "width", "chunk", "dtype", "message"),
    [
        (17, 16, None, torch.bfloat16, "multiples of 16"),
        (32, 24, None, torch.bfloat16, "multiples of 16"),
        (64, 16, 24, torch.bfloat16, "multiples of 16"),
        (32, 16, None, torch.float16, "takes bf16"),
    ],
)
def test_it_refuses_unaligned_sizes_and_other_dtypes(
    device: str, tokens: int, width: int, chunk: int | None, dtype: torch.dtype, message: str
) -> None:
    hidden, weight = (torch.zeros(size, width, dtype=dtype, device=device) for size in (tokens, 64))
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    with pytest.raises(KernelRefusal, match=message):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, matmuls="fp8")


def test_a_chunk_is_freed_before_the_next_is_allocated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = given(device, 48, 16, 64)
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        alive.append(sum(each() is not None for each in kept))
        made = logits_gradient(*arguments)
        kept.extend(weakref.ref(each) for each in made)
        return made

    monkeypatch.setattr(fp8, "logits_gradient", watched)
    ours(hidden, weight, labels, chunk_tokens=16)
    assert alive == [0, 0, 0]
