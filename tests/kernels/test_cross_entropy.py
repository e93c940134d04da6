"""Cross-entropy: against float64, in place and not, compiled, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.cross_entropy import cross_entropy, cross_entropy_
from rush.kernels.cross_entropy import triton as kernels
from rush.kernels.cross_entropy.reference import cross_entropy as reference

CPP = True
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# On a GPU fewer, because each width and dtype is a kernel to be compiled.
CASES = [
    *(
        pytest.param(place, shape, dtype)
        for place in ("cpu", "c++")
        for shape in ((1, 1), (1, 7), (3, 33), (5, 257), (4, 1024))
        for dtype in DTYPES
    ),
    *(
        pytest.param("cuda", shape, dtype, marks=pytest.mark.gpu)
        for shape, dtype in (
            ((200, 7), torch.float32),
            ((320, 8191), torch.bfloat16),
            ((256, 50257), torch.bfloat16),
            ((64, 128256), torch.bfloat16),
            ((256, 8192), torch.float16),
        )
    ),
]
OPTIONS: list[dict[str, Any]] = [{}, {"ignore_index": 3}]
FORMS: list[Callable[..., Tensor]] = [
    cross_entropy,
    lambda x, *rest, **options: cross_entropy_(x * 1, *rest, **options),
]


def made(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[rows // 2 :: 3] = -100
    labels[0] = columns - 1
    return logits.to(device), labels.to(device)


def gradient(function: Callable[[Tensor], Tensor], logits: Tensor, upstream: Tensor | None = None) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    out = function(leaf)
    (found,) = torch.autograd.grad(out, leaf, upstream)
    return found


@pytest.mark.parametrize("form", FORMS, ids=["fresh", "in_place"])
@pytest.mark.parametrize(("device", "shape", "dtype"), CASES, indirect=["device"])
def test_losses_and_gradients_are_as_exact_as_plain_torch_in_the_same_dtype(
    device: str, shape: tuple[int, int], dtype: torch.dtype, form: Callable[..., Tensor], check_errors: Any
) -> None:
    rows, columns = shape
    logits, made_labels = made(rows, columns, dtype, device)
    for options in OPTIONS:
        ignored = options.get("ignore_index", -100)
        labels = made_labels.masked_fill(made_labels == -100, ignored)
        rows_of = {**options, "reduction": "none"}
        exact = reference(logits.double(), labels, **options)
        plain = reference(logits, labels, **options)
        check_errors(form(logits, labels, **rows_of), plain, exact, 2, f"loss {options}")
        check_errors(form(logits, labels, **options), plain.sum(), exact.sum(), 2, f"sum {options}")
        # Rows weigh differently, so that a gradient scaled by another row's weight shows.
        weights = torch.linspace(0.5, 2, rows, device=device)
        exact_gradient = gradient(
            lambda x, options=options, labels=labels: reference(x, labels, **options),
            logits.double(),
            weights.double(),
        )
        plain_gradient = gradient(
            lambda x, options=options, labels=labels: reference(x, labels, **options), logits, weights
        )
        ours = gradient(lambda x, options=rows_of, labels=labels: form(x, labels, **options), logits, weights)
        check_errors(ours, plain_gradient, exact_gradient, 3, f"gradient {options}")
        assert ours[labels == ignored].count_nonzero() == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_longer_than_a_block(in_place: bool, device: str, check_errors: Any) -> None:
    columns = kernels.LARGEST_BLOCK + 1234
    logits, labels = made(3, columns, torch.float32, device)
    logits[0] += torch.linspace(0, 40, columns, device=device)  # the maximum is raised again and again
    logits[1, : kernels.LARGEST_BLOCK] = -math.inf  # a whole block without a finite number
    labels[1] = columns - 2
    form = FORMS[in_place]
    exact = reference(logits.double(), labels)
    check_errors(form(logits, labels, reduction="none"), reference(logits, labels), exact, 2)
    found = gradient(lambda x: form(x, labels), logits)
    exact_gradient = gradient(lambda x: reference(x, labels).sum(), logits.double())
    plain_gradient = gradient(lambda x: reference(x, labels).sum(), logits)
    check_errors(found, plain_gradient, exact_gradient, 3)


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_finite_logit_is_nan_and_changes_no_other_row(device: str) -> None:
    logits, labels = made(3, 16, torch.float32, device)
    labels[:] = 5
    alone = cross_entropy(logits[2:], labels[2:])
    logits[1] = -math.inf
    losses = cross_entropy_(logits, labels, reduction="none")
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.isnan().any(dim=1).tolist() == [False, True, False]
    assert losses[2] == alone


def test_large_logits_do_not_overflow(device: str) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-3e4, -3e4, -3e4]], device=device)
    labels = torch.tensor([0, 1], device=device)
    losses = cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses.cpu(), torch.tensor([0.0, math.log(3)]), rtol=1e-4, atol=2e-3)


def test_strided_logits_give_what_contiguous_ones_give(device: str) -> None:
    logits, labels = made(6, 40, torch.float32, device)
    expected, expected_gradient = (
        cross_entropy(logits, labels),
        gradient(lambda x: cross_entropy(x, labels), logits),
    )
    wide = torch.randn(6, 64, device=device)
    wide[:, 8:48] = logits
    for strided in (logits.t().contiguous().t(), wide[:, 8:48]):
        assert not strided.is_contiguous()
        leaf = strided.detach().requires_grad_()
        # How wide the loads are, and with it the order of the sums, follows the alignment of the rows.
        near = {"rtol": 4e-7 * 40, "atol": 0.0}
        torch.testing.assert_close(cross_entropy(leaf, labels), expected, **near)
        found = torch.autograd.grad(cross_entropy(leaf, labels), leaf)[0]
        torch.testing.assert_close(found, expected_gradient, **near)
    every_other = labels.repeat_interleave(2)[::2]
    assert torch.equal(cross_entropy(logits, every_other), expected)
    grouped = cross_entropy(logits.view(2, 3, 40), labels.view(2, 3), reduction="none")
    assert grouped.shape == (2, 3)
    assert torch.equal(grouped.sum(), expected)


def test_a_label_outside_the_vocabulary_gives_nan(device: str) -> None:
    logits, _ = made(3, 9, torch.float32, device)
    losses = cross_entropy(logits, torch.tensor([9, -1, 4], device=device), reduction="none")
    assert losses.isnan().tolist() == [True, True, False]


def test_in_place_the_gradient_overwrites_the_logits(device: str) -> None:
    logits, labels = made(4, 50, torch.bfloat16, device)
    leaf = logits.clone().requires_grad_()
    over = leaf * 1
    address = over.data_ptr()
    loss = cross_entropy_(over, labels)
    waiting = over.detach().clone()
    (found,) = torch.autograd.grad(loss, over)
    assert found.data_ptr() == address
    # The upstream gradient is 1: nothing was written.
    assert torch.equal(found, waiting)
    expected = gradient(lambda x: cross_entropy(x, labels), logits)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-6)


def test_autograd_raises_when_the_overwritten_logits_are_needed_elsewhere(device: str) -> None:
    logits, labels = made(4, 50, torch.float32, device)
    leaf = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy_(leaf.exp(), labels).backward()
    over = leaf * 1
    loss = cross_entropy_(over, labels) * 2
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("form", FORMS, ids=["fresh", "in_place"])
def test_compiled_without_a_graph_break_it_gives_the_same(form: Callable[..., Tensor], device: str) -> None:
    logits, labels = made(6, 130, torch.float32, device)
    weight = torch.randn(130, 130, device=device)

    def loss(x: Tensor) -> Tensor:
        return form(x @ weight, labels) * 0.25

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    torch.testing.assert_close(compiled(logits), loss(logits), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient(compiled, logits), gradient(loss, logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=["fresh", "in_place"])
def test_recomputed_under_activation_checkpointing_it_gives_the_same(
    form: Callable[..., Tensor], device: str
) -> None:
    logits, labels = made(6, 33, torch.float32, device)

    def loss(x: Tensor) -> Tensor:
        return form(x.sin(), labels)

    again = gradient(lambda x: checkpoint(loss, x, use_reentrant=False), logits)
    assert torch.equal(again, gradient(loss, logits))


def test_a_hundred_repeats_give_the_same_bits(device: str) -> None:
    logits, labels = (
        made(2, 40, torch.float32, device) if device == "cpu" else made(512, 50257, torch.bfloat16, device)
    )
    first = gradient(lambda x: cross_entropy(x, labels), logits)
    loss = cross_entropy(logits, labels)
    for _ in range(100):
        assert torch.equal(cross_entropy(logits, labels), loss)
    for _ in range(10):
        assert torch.equal(gradient(lambda x: cross_entropy(x, labels), logits), first)


def test_the_operators_are_what_they_declare(device: str) -> None:
    logits, labels = made(3, 20, torch.float32, device)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    leaf = logits.clone().requires_grad_()
    torch.library.opcheck(torch.ops.rush.cross_entropy.default, (leaf, labels, -100), test_utils=tests)
    torch.library.opcheck(
        torch.ops.rush.cross_entropy_in_place.default,
        (logits.clone(), labels, -100),
        test_utils=tests[:2],
    )
    torch.library.opcheck(
        torch.ops.rush.scale_rows.default,
        (logits.clone(), torch.ones(3, device=device), 2.0),
        test_utils=tests[:2],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 5, dtype=torch.float64)}, "takes logits in fp32, bf16 and fp16"),
        ({"labels": torch.zeros(3)}, "integer labels"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "a label for each row"),
        ({"reduction": "mean"}, 'reduction must be "sum" or "none"'),
        ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, "on one device"),
    ],
)
def test_unsupported_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"logits": torch.zeros(3, 5), "labels": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(KernelRefusal, match=message):
        cross_entropy(given.pop("logits"), given.pop("labels"), **given)


def test_in_place_refuses_what_it_cannot_overwrite(device: str) -> None:
    logits, labels = made(4, 6, torch.float32, device)
    with pytest.raises(KernelRefusal, match="must be contiguous"):
        cross_entropy_(logits.t().contiguous().t(), labels)
    with pytest.raises(KernelRefusal, match="must not be a leaf"):
        cross_entropy_(logits.requires_grad_(), labels)


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count() -> None:
    rows, columns = 16416, 131072
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
    labels = torch.randint(0, columns, (rows,), device="cuda", generator=generator)
    last_logits, last = logits[-16:].clone(), labels[-16:]
    losses = cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(
        losses[-16:], cross_entropy(last_logits, last, reduction="none"), rtol=0, atol=0
    )
    cross_entropy_(logits, labels)
    cross_entropy_(last_logits, last)
    assert torch.equal(logits[-16:], last_logits)
