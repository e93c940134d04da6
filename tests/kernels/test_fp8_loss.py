"""The head and its loss with 8-bit factors: against the same casts made by plain torch in float64, and against no casts at all."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels.fp8_linear.operands import product
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled, quantize
from rush.kernels.linear_cross_entropy import fp8, linear_cross_entropy
from rush.kernels.linear_cross_entropy.fp8 import SCALE, logits_gradient

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
# tokens, width, vocabulary, tokens of a chunk: one chunk and less than a tile; odd words, several chunks, a shorter last one
SHAPES = [
    (16, 16, 64, None),
    (144, 32, 301, 64),
    pytest.param(256, 48, 515, 128, marks=pytest.mark.slow),
]
LARGE = [(4096, 768, 50257, 1024)]


@pytest.fixture(autouse=True)
def _units(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit matmuls")


def given(device: str, tokens: int, width: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=device).bfloat16()
    weight = (torch.randn(words, width, generator=generator, device=device) * 0.3).bfloat16()
    labels = torch.randint(0, words, (tokens,), generator=generator, device=device)
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, **more: object) -> tuple[Tensor, Tensor, Tensor]:
    loss = linear_cross_entropy(hidden, weight, labels, products="fp8", **more)  # type: ignore[arg-type]
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


def by_hand(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64 from the same 8-bit values, a chunk at a time since each has its own scale.

    Logits come from the GPU's units where there are any: their short accumulator cuts what it cannot hold, which makes all
    logits a little smaller (`test_what_the_short_accumulator_cuts`).
    """

    def fp8(x: Tensor) -> Scaled:
        return Scaled(*quantize(x.detach(), E4M3, rowwise=False))

    def wide(x: Scaled) -> Tensor:
        return x.values.double() * x.unit.double()

    narrow = fp8(F.pad(weight, (0, 0, 0, -len(weight) % 64)))
    w, losses, d_hidden = wide(narrow)[: len(weight)], 0.0, []
    d_weight = torch.zeros_like(w)
    for x_bf16, label in zip(
        hidden.split(chunk or len(hidden)), labels.split(chunk or len(hidden)), strict=True
    ):
        narrow_x = fp8(x_bf16)
        x = wide(narrow_x)
        if x.is_cuda:
            made = product(narrow_x, narrow, torch.bfloat16, fast=True)[:, : len(weight)]
        else:
            made = (x @ w.t()).bfloat16()
        logits = made.double().requires_grad_()
        loss = F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing)
        known = label != -100
        loss = loss + z_loss * torch.logsumexp(logits[known], -1).square().sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        gradient = (gradient * SCALE).float().to(E5M2).double() / SCALE
        losses = losses + loss.detach()
        d_hidden.append(gradient @ w)
        d_weight += gradient.t() @ x
    return losses, torch.cat(d_hidden), d_weight


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-3)])
@pytest.mark.parametrize(
    ("tokens", "width", "words", "chunk"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in LARGE)],
)
def test_it_is_what_its_8_bit_factors_give(
    device: str, tokens: int, width: int, words: int, chunk: int | None, smoothing: float, z_loss: float
) -> None:
    if tokens > 1000 and device == "cpu":
        pytest.skip("too much for the interpreter")
    hidden, weight, labels = given(device, tokens, width, words)
    loss, d_hidden, d_weight = ours(
        hidden, weight, labels, chunk_tokens=chunk, label_smoothing=smoothing, z_loss=z_loss
    )
    exact = by_hand(hidden, weight, labels, chunk, smoothing, z_loss)
    # Results are rounded to bf16, each chunk's too: 0.003 at most. With gradients in e4m3 it would be 0.011 to 0.03.
    assert float(loss) == pytest.approx(float(exact[0]), rel=1e-6)
    assert apart(d_hidden, exact[1]) < 0.004
    assert apart(d_weight, exact[2]) < 0.004
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    assert d_hidden[labels == -100].abs().max() == 0


@pytest.mark.gpu
def test_what_the_short_accumulator_cuts(device: str) -> None:
    """At least 13 bits of every sum stay, at each of its steps of 32 products: so much is known of Hopper's units."""
    if device == "cpu":
        pytest.skip("a CPU sums up in full")
    hidden, weight, _ = given(device, 1024, 768, 4096)
    x, w = (Scaled(*quantize(each.detach(), E4M3, rowwise=False)) for each in (hidden, weight))
    logits = product(x, w, torch.float32, fast=True).double()
    exact = (x.values.double() * x.unit) @ (w.values.double() * w.unit).t()
    sizes = (x.values.double() * x.unit).abs() @ (w.values.double() * w.unit).abs().t()
    assert float(((logits - exact).abs() / sizes).max()) < 768 / 32 * 2.0**-13


@pytest.mark.parametrize(("tokens", "width", "words", "chunk"), SHAPES[1:])
def test_it_is_near_what_16_bits_give(
    device: str, tokens: int, width: int, words: int, chunk: int | None
) -> None:
    hidden, weight, labels = given(device, tokens, width, words)
    loss, d_hidden, d_weight = ours(hidden, weight, labels, chunk_tokens=chunk)
    plain = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    theirs = torch.autograd.grad(plain, (hidden, weight))
    assert float(loss) == pytest.approx(float(plain.detach()), rel=0.01)
    assert 1e-4 < apart(d_hidden, theirs[0].double()) < 0.15
    assert 1e-4 < apart(d_weight, theirs[1].double()) < 0.15


def test_the_transpose_has_the_same_bytes_and_padding_is_nothing(device: str) -> None:
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(144, 320, generator=generator, device=device).bfloat16()
    labels = torch.randint(0, 301, (144,), generator=generator, device=device)
    lse = torch.logsumexp(logits[:, :301].float(), -1)
    straight, turned = logits_gradient(logits, labels, lse, 301, -100, 0.0, 0.0)
    assert torch.equal(straight.t().contiguous().view(torch.uint8), turned.view(torch.uint8))
    assert straight[:, 301:].float().abs().max() == 0
    assert straight.float().abs().max() > 0.5 * SCALE


def test_alone_each_gradient_is_the_same_and_the_loss_needs_none(device: str) -> None:
    hidden, weight, labels = given(device, 48, 32, 130)
    loss, d_hidden, d_weight = ours(hidden, weight, labels)
    (only_hidden,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight.detach(), labels, products="fp8"), hidden
    )
    (only_weight,) = torch.autograd.grad(
        linear_cross_entropy(hidden.detach(), weight, labels, products="fp8"), weight
    )
    assert torch.equal(only_hidden, d_hidden)
    assert torch.equal(only_weight, d_weight)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, products="fp8"), loss)


def test_it_refuses_products_it_does_not_know(device: str) -> None:
    hidden, weight, labels = given(device, 16, 16, 64)
    with pytest.raises(KernelRefusal, match="dtype, fp8 or fp8_fast"):
        linear_cross_entropy(hidden, weight, labels, products="fp4")  # type: ignore[arg-type]


def test_the_same_bits_every_time(device: str, repeats: int) -> None:
    hidden, weight, labels = given(device, 144, 32, 301)
    first = ours(hidden, weight, labels, chunk_tokens=64)
    for _ in range(repeats):
        assert all(map(torch.equal, ours(hidden, weight, labels, chunk_tokens=64), first))


def test_it_works_under_compile_without_a_break(device: str) -> None:
    hidden, weight, labels = given(device, 48, 32, 130)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1.0, weight, labels, products="fp8")

    loss = torch.compile(loss_of, fullgraph=True)(hidden, weight)
    found = torch.autograd.grad(loss, (hidden, weight))
    expected = ours(hidden, weight, labels)
    assert torch.equal(loss, expected[0])
    assert all(map(torch.equal, found, expected[1:]))


@pytest.mark.parametrize(
    ("tokens", "width", "chunk", "dtype", "words"),
    [
        (17, 16, None, torch.bfloat16, "multiples of 16"),
        (32, 24, None, torch.bfloat16, "multiples of 16"),
        (64, 16, 24, torch.bfloat16, "multiples of 16"),
        (32, 16, None, torch.float16, "takes bf16"),
    ],
)
def test_it_refuses_what_it_cannot_make(
    device: str, tokens: int, width: int, chunk: int | None, dtype: torch.dtype, words: str
) -> None:
    hidden, weight = (torch.zeros(size, width, dtype=dtype, device=device) for size in (tokens, 64))
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    with pytest.raises(KernelRefusal, match=words):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, products="fp8")


def test_a_chunk_is_let_go_before_the_next_is_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = given(device, 64, 16, 64)
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        alive.append(sum(each() is not None for each in kept))
        made = logits_gradient(*arguments)
        kept.extend(weakref.ref(each) for each in made)
        return made

    monkeypatch.setattr(fp8, "logits_gradient", watched)
    ours(hidden, weight, labels, chunk_tokens=16)
    assert alive == [0, 0, 0, 0]
