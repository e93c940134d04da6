"""flash_attention: as exact as plain attention, tile by tile, and no document knows of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rush.errors import KernelRefusal
from rush.kernels.flash_attention import flash_attention, triton
from rush.kernels.flash_attention.documents import document_bounds
from rush.kernels.flash_attention.reference import attention
from rush.kernels.flash_attention.tiles import HOPPER, PARTS, Tiles, choose
from rush.kernels.support import INTERPRETED

CPP = True
pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning"
)  # a CPU without units for bf16
Check = Callable[..., None]
FORWARD, BACKWARD = 2.0, 3.0


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Iterator[None]:
    """What plain torch is held to in fp32 is fp32, not TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(seed: int, *dims: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*dims, generator=generator).to(dtype).to(device)


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the output's gradient as a model has them: views of [b, t, h, d]."""
    return tuple(  # type: ignore[return-value]
        random(10 * seed + part, batch, length, count, head_dim, dtype=dtype, device=device).transpose(1, 2)
        for part, count in enumerate((heads, kv_heads, kv_heads, heads))
    )


def with_gradients(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: object
) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    o = function(*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def hold(check: Check, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: object) -> None:
    """Output and gradients against float64, by the measure of plain torch in the same dtype."""
    ours = with_gradients(flash_attention, q, k, v, do, **options)
    plain = with_gradients(attention, q, k, v, do, **options)
    exact = with_gradients(attention, q.double(), k.double(), v.double(), do.double(), **options)
    for name, mine, theirs, truth in zip(("o", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        check(mine, theirs, truth, FORWARD if name == "o" else BACKWARD, name)


def shape_of(device: str, small: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
    return small if device == "cpu" else large


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# batch, query heads, key/value heads, positions, head dim: here, and on a GPU
SHAPES = [
    ((1, 2, 1, 31, 64), (2, 4, 2, 333, 64)),
    ((2, 1, 1, 64, 64), (2, 4, 4, 1024, 64)),
    ((1, 2, 2, 77, 128), (2, 4, 1, 777, 128)),
    ((1, 1, 1, 40, 32), (3, 2, 2, 200, 32)),
    ((1, 3, 1, 33, 16), (1, 6, 2, 130, 16)),
    ((1, 2, 1, 70, 256), (2, 8, 4, 777, 256)),
]
CASES = [
    *((SHAPES[0], dtype, True) for dtype in (BF16, FP16, FP32)),
    (SHAPES[0], BF16, False),
    (SHAPES[1], BF16, True),
    (SHAPES[2], BF16, True),
    (SHAPES[3], BF16, True),
    (SHAPES[5], BF16, True),
]
# On a GPU every one of these would compile three kernels more.
INTERPRETED_CASES = [
    (SHAPES[1], FP16, True),
    (SHAPES[2], FP32, True),
    (SHAPES[2], FP32, False),
    (SHAPES[4], FP32, True),
    (SHAPES[5], FP32, True),
]


@pytest.mark.parametrize(("shapes", "dtype", "causal"), [*CASES, *INTERPRETED_CASES], ids=str)
def test_it_is_as_exact_as_plain_attention(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    causal: bool,
    device: str,
    check_errors: Check,
) -> None:
    if device == "cuda" and (shapes, dtype, causal) in INTERPRETED_CASES:
        pytest.skip("checked in the interpreter")
    batch, heads, kv_heads, length, head_dim = shape_of(device, *shapes)
    q, k, v, do = inputs(batch, heads, kv_heads, length, head_dim, dtype, device)
    hold(check_errors, q, k, v, do, causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_single_position_gives_its_value(dtype: torch.dtype, device: str) -> None:
    """Its weight is 1 whatever the score, so the gradients of query and key are zero, up to a rounding of Σ o·do."""
    q, k, v, do = inputs(2, 2, 1, 1, 64, dtype, device)
    o, dq, dk, dv = with_gradients(flash_attention, q, k, v, do)
    assert torch.equal(o, v.expand_as(o))
    torch.testing.assert_close(dv, do.sum(1, keepdim=True))
    for gradient in (dq, dk):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


def test_the_scale_is_one_over_the_root_of_the_head_dim_unless_given(
    device: str, check_errors: Check
) -> None:
    q, k, v, do = inputs(1, 2, 1, 20, 64, torch.float32, device)
    hold(check_errors, q, k, v, do, scale=0.3)
    given = flash_attention(q, k, v, scale=64**-0.5)
    assert torch.equal(given, flash_attention(q, k, v))
    assert not torch.equal(given, flash_attention(q, k, v, scale=0.126))


def test_scores_far_apart_stay_finite_and_exact(
    device: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    """Scores of some hundreds: without the running maximum their powers would overflow.

    A power is as exact as its exponent, which fp32 rounds at its own size: so the bound grows with the largest score.
    """
    q, k, v, do = inputs(1, 2, 1, 50, 64, torch.float32, device)
    q, k = 20 * q, 10 * k
    largest = float((q @ k.transpose(-1, -2).expand(-1, 2, -1, -1)).abs().max()) / 8
    assert largest > 300
    ours = with_gradients(flash_attention, q, k, v, do)
    exact = with_gradients(attention, *(tensor.double() for tensor in (q, k, v, do)))
    for mine, truth in zip(ours, exact, strict=True):
        assert error(mine, truth) < largest * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t,
        lambda t: t.contiguous(),
        lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[3]],
        lambda t: t.repeat(1, 1, 2, 1)[:, :, : t.shape[2]],
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: torch.cat((t, t), 2)[:, :, ::2],
    ],
    ids=[
        "heads side by side",
        "contiguous",
        "wider rows",
        "longer rows",
        "head dim apart",
        "every other position",
    ],
)
def test_it_reads_any_strides(cut: Callable[[Tensor], Tensor], device: str) -> None:
    tensors = inputs(*shape_of(device, (1, 2, 1, 34, 16), (2, 4, 2, 45, 64)), torch.bfloat16, device)
    strided = [cut(tensor) for tensor in tensors]
    expected = with_gradients(flash_attention, *(tensor.contiguous() for tensor in strided))
    for mine, theirs in zip(with_gradients(flash_attention, *strided), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_an_expanded_gradient_is_read_too(device: str) -> None:
    """What .sum().backward() hands back has strides of zero."""
    q, k, v, _ = inputs(1, 2, 1, 20, 64, torch.float32, device)
    ones = torch.ones_like(q)
    spread = torch.ones((), device=device).expand(q.shape)
    for mine, theirs in zip(
        with_gradients(flash_attention, q, k, v, spread),
        with_gradients(flash_attention, q, k, v, ones),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_the_output_lies_in_memory_as_the_next_layer_reads_it(device: str) -> None:
    q, k, v, _ = inputs(1, 2, 1, 20, 64, torch.bfloat16, device)
    o = flash_attention(q, k, v)
    assert o.transpose(1, 2).is_contiguous()


# Sides equal, unequal either way; with and without a loop of its own for whole tiles; both ways to load.
CUTS = [
    (Tiles(16, 16), False), (Tiles(32, 16, tma=True), False), (Tiles(16, 32, split=False), False),
    (Tiles(16, 16, tma=True), True), (Tiles(32, 16), True), (Tiles(16, 32, tma=True), True),
    (Tiles(16, 16, tma=True, split=False), True),
]  # fmt: skip


@pytest.mark.parametrize(("tiles", "packed"), CUTS, ids=str)
def test_the_division_of_the_work_does_not_matter(tiles: Tiles, packed: bool) -> None:
    """In the interpreter, where any cut can run: each against float64."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled on this machine")
    causal = tiles.rows != 16 or tiles.columns != 16 or not packed
    q, k, v, do = inputs(1, 2, 1, 53, 16, torch.float32, "cpu")
    documents = torch.tensor([[0] * 5 + [1] * 33 + [2] * 15]) if packed else None
    first, last = document_bounds(documents, 1, 53) if documents is not None else (None, None)
    exact = with_gradients(
        attention, *(tensor.double() for tensor in (q, k, v, do)), causal=causal, documents=documents
    )
    o, lse2 = triton.forward(q, k, v, first, last, causal, 0.25, tiles)
    dq, dk, dv = triton.backward(do, q, k, v, o, lse2, first, last, causal, 0.25, tiles, tiles)
    for mine, truth in zip((o, dq, dk, dv), exact, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_ways_to_load_tiles_agree(head_dim: int, error: Callable[[Tensor, Tensor], float]) -> None:
    """On a GPU: the copy engine and the threads' own loads, on a length no tile divides."""
    q, k, v, do = inputs(2, 4, 2, 500, head_dim, torch.bfloat16, "cuda")
    results = []
    for tma in (False, True):
        cuts = [dataclasses.replace(choose(part, head_dim, q.dtype, q.device), tma=tma) for part in PARTS]
        o, lse2 = triton.forward(q, k, v, None, None, True, head_dim**-0.5, cuts[0])
        gradients = triton.backward(do, q, k, v, o, lse2, None, None, True, head_dim**-0.5, cuts[1], cuts[2])
        results.append([o, lse2, *gradients])
    for name, mine, theirs in zip(("o", "lse2", "dq", "dk", "dv"), *results, strict=True):
        assert error(mine, theirs.double()) < 1e-3, (
            name
        )  # a rounding to bf16 that went the other way, here and there


def lengths_of(device: str) -> list[int]:
    return [3, 40, 1, 30] if device == "cpu" else [3, 391, 1, 170, 256, 64, 500]


def ids_of(lengths: list[int], device: str) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(device)


@pytest.mark.parametrize(
    ("given_as", "dtype", "causal"),
    [
        ("ids", torch.bfloat16, True),
        ("ids", torch.float32, False),
        ("cumulative lengths", torch.float32, True),
        ("cumulative lengths", torch.bfloat16, False),
    ],
    ids=str,
)
def test_packed_documents_are_as_exact(
    given_as: str, dtype: torch.dtype, causal: bool, device: str, check_errors: Check
) -> None:
    if device == "cuda" and dtype == torch.float32 and not causal:
        pytest.skip("checked in the interpreter")
    lengths = lengths_of(device)
    q, k, v, do = inputs(1, 2, 1, sum(lengths), 64, dtype, device)
    documents = ids_of(lengths, device)
    if given_as == "cumulative lengths":
        documents = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    hold(check_errors, q, k, v, do, causal=causal, documents=documents)


def test_rows_of_a_batch_have_documents_of_their_own(device: str, check_errors: Check) -> None:
    q, k, v, do = inputs(2, 2, 1, 60, 64, torch.float32, device)
    cuts = [[7, 53], [20, 20, 20]]
    documents = torch.cat([ids_of(lengths, device) for lengths in cuts])
    hold(check_errors, q, k, v, do, documents=documents)


def test_packed_is_the_same_as_each_document_by_itself(
    device: str, error: Callable[[Tensor, Tensor], float]
) -> None:
    lengths = lengths_of(device)
    tensors = inputs(1, 2, 1, sum(lengths), 64, torch.float32, device)
    packed = with_gradients(flash_attention, *tensors, documents=ids_of(lengths, device))
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
    alone = [with_gradients(flash_attention, *piece) for piece in pieces]
    for together, apart in zip(packed, zip(*alone, strict=True), strict=True):
        assert error(together, torch.cat(apart, 2).double()) < 2e-6


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_a_changed_document_changes_no_bit_of_another(dtype: torch.dtype, causal: bool, device: str) -> None:
    lengths = lengths_of(device)
    documents = ids_of(lengths, device)
    before = inputs(1, 2, 1, sum(lengths), 64, dtype, device)
    others = inputs(1, 2, 1, sum(lengths), 64, dtype, device, seed=1)
    changed = documents[0] == 1
    after = [torch.where(changed[:, None], 30 * new, old) for new, old in zip(others, before, strict=True)]
    one = with_gradients(flash_attention, *before, causal=causal, documents=documents)
    two = with_gradients(flash_attention, *after, causal=causal, documents=documents)
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first[:, :, ~changed], second[:, :, ~changed])
        assert not torch.equal(first[:, :, changed], second[:, :, changed])


def test_without_documents_an_earlier_token_does_change_a_later_one(device: str) -> None:
    """The test above would pass for a kernel that looks at nothing; this one would not."""
    q, k, v, _ = inputs(1, 2, 1, 40, 64, torch.float32, device)
    moved = v.clone()
    moved[:, :, 3] += 1
    first, second = flash_attention(q, k, v), flash_attention(q, k, moved)
    assert torch.equal(first[:, :, :3], second[:, :, :3])
    assert bool((first[:, :, 3:] != second[:, :, 3:]).any(-1).all())


def test_an_id_that_comes_back_is_another_document() -> None:
    first, last = document_bounds(torch.tensor([[5, 5, 1, 5, 5, 5]]), 1, 6)
    assert first.tolist() == [[0, 0, 2, 3, 3, 3]]
    assert last.tolist() == [[2, 2, 3, 6, 6, 6]]


def test_positions_after_the_last_cumulative_length_are_a_document_of_their_own() -> None:
    first, last = document_bounds(torch.tensor([0, 2, 5]), 1, 7)
    assert first.tolist() == [[0, 0, 2, 2, 2, 5, 5]]
    assert last.tolist() == [[2, 2, 5, 5, 5, 7, 7]]


def test_a_hundred_repeats_give_the_same_bits(device: str) -> None:
    repeats = 2 if device == "cpu" else 100  # the interpreter has no threads that could race
    batch, heads, kv_heads, length, head_dim = shape_of(device, (1, 2, 1, 40, 16), (2, 8, 2, 777, 128))
    tensors = inputs(batch, heads, kv_heads, length, head_dim, torch.bfloat16, device)
    expected = with_gradients(flash_attention, *tensors)
    for _ in range(repeats):
        for mine, theirs in zip(with_gradients(flash_attention, *tensors), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_the_gradient_is_that_of_finite_differences(device: str) -> None:
    """Against the kernel's own forward pass, in a random direction of all three inputs."""
    q, k, v, do = (tensor.float() for tensor in inputs(1, 2, 1, 24, 64, torch.float32, device))
    gradients = with_gradients(flash_attention, q, k, v, do)[1:]
    steps = inputs(1, 2, 1, 24, 64, torch.float32, device, seed=3)[:3]
    size = 1e-2
    above, below = (
        (flash_attention(*(x + sign * size * step for x, step in zip((q, k, v), steps, strict=True))) * do)
        .double()
        .sum()
        for sign in (1, -1)
    )
    found = float(above - below) / (2 * size)
    expected = sum(
        float((gradient.double() * step).sum()) for gradient, step in zip(gradients, steps, strict=True)
    )
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_compiled_it_is_one_graph_and_the_same_bits(packed: bool, device: str) -> None:
    tensors = inputs(1, 2, 1, 48, 64, torch.bfloat16, device)
    documents = torch.tensor([[0] * 10 + [1] * 38], device=device) if packed else None

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (
            flash_attention(q * 2, k + 1, v, documents=documents).transpose(1, 2).flatten(2).transpose(1, 2)
        )

    torch._dynamo.reset()
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    do = tensors[3].transpose(1, 2).flatten(2).transpose(1, 2)
    for mine, theirs in zip(
        with_gradients(compiled, *tensors[:3], do), with_gradients(model, *tensors[:3], do), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_recomputed_in_the_backward_pass_it_gives_the_same_bits(device: str) -> None:
    q, k, v, do = inputs(1, 2, 1, 40, 64, torch.bfloat16, device)

    def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = checkpoint(flash_attention, q, k, v, use_reentrant=False)  # type: ignore[assignment]
        return out

    for mine, theirs in zip(
        with_gradients(again, q, k, v, do), with_gradients(flash_attention, q, k, v, do), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_torch_finds_no_fault_with_the_operator(device: str) -> None:
    """Schema, fake tensors, autograd registration and compilation, by torch's own checks."""
    q, k, v, _ = inputs(1, 2, 1, 20, 64, torch.float32, device)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    first, last = document_bounds(torch.zeros(1, 20, dtype=torch.int64, device=device), 1, 20)
    for bounds in ((None, None), (first, last)):
        torch.library.opcheck(torch.ops.rush.flash_attention_forward, (*leaves, *bounds, True, 0.125))


@pytest.mark.gpu
def test_memory_grows_with_the_sequence_not_with_its_square() -> None:
    def peak(length: int) -> int:
        q, k, v, do = inputs(1, 4, 4, length, 64, torch.bfloat16, "cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with_gradients(flash_attention, q, k, v, do)
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    assert peak(8192) < 5 * peak(2048)


@pytest.mark.gpu
def test_a_row_beyond_two_to_the_31_numbers(check_errors: Check) -> None:
    """A packed row so long that offsets into it need 64 bits: its last document against that document alone."""
    length, heads, head_dim = 2**20 + 300, 32, 64
    wide = torch.empty(1, length, 3 * heads * head_dim, dtype=torch.bfloat16, device="cuda")  # 6.4e9 numbers
    assert wide.numel() > 2**31
    wide.normal_()
    q, k, v = (part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in wide.chunk(3, -1))
    ends = torch.arange(0, length, 256, device="cuda", dtype=torch.int32)
    documents = torch.cat((ends, torch.tensor([length], device="cuda", dtype=torch.int32)))
    start = int(ends[-1])
    do = q[:, :, start:].flip(3)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    o = flash_attention(*leaves, documents=documents)
    gradients = torch.autograd.grad(o[:, :, start:], leaves, do)
    alone = with_gradients(flash_attention, *(tensor[:, :, start:].contiguous() for tensor in (q, k, v)), do)
    for mine, theirs in zip([o.detach(), *gradients], alone, strict=True):
        torch.testing.assert_close(mine[:, :, start:], theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda q, k, v: (q[0], k, v), "takes \\[batch, heads"),
        (lambda q, k, v: (q, k[:, :, :4], v[:, :, :4]), "as many queries as keys .*cache"),
        (lambda q, k, v: (q, k, v[:, :, :4]), "as many values as keys"),
        (
            lambda q, k, v: (q[..., :24], k[..., :24], v[..., :24]),
            "head dims 16, 32, 64, 128, 256; found .*24",
        ),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of the key/value heads"),
        (lambda q, k, v: (q, k.bfloat16(), v), "found torch.float32, torch.bfloat16"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "found torch.float64"),
        (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), "at least one position"),
    ],
    ids=range(8),
)
def test_what_it_does_not_support_it_refuses(
    change: Callable[..., tuple[Tensor, ...]], sentence: str, device: str
) -> None:
    q, k, v, _ = inputs(1, 4, 2, 8, 64, torch.float32, device)
    with pytest.raises(KernelRefusal, match=sentence):
        flash_attention(*change(q, k, v))


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        (torch.zeros(1, 7, dtype=torch.int64), "found shape \\(1, 7\\)"),
        (torch.zeros(1, 8), "as integers"),
        (torch.zeros(1, dtype=torch.int64), "cumulative lengths"),
    ],
)
def test_documents_of_another_form_are_refused(documents: Tensor, sentence: str, device: str) -> None:
    q, k, v, _ = inputs(1, 4, 2, 8, 64, torch.float32, device)
    with pytest.raises(KernelRefusal, match=sentence):
        flash_attention(q, k, v, documents=documents.to(device))


def test_cumulative_lengths_are_for_a_single_row(device: str) -> None:
    q, k, v, _ = inputs(2, 4, 2, 8, 64, torch.float32, device)
    with pytest.raises(KernelRefusal, match="a batch of 2"):
        flash_attention(q, k, v, documents=torch.tensor([0, 8], device=device))


def test_a_scale_that_is_not_positive_is_refused(device: str) -> None:
    q, k, v, _ = inputs(1, 1, 1, 8, 64, torch.float32, device)
    with pytest.raises(KernelRefusal, match="positive scale"):
        flash_attention(q, k, v, scale=-1.0)


def test_no_kernel_has_more_tiles_to_try_than_a_sweep_has_time_for() -> None:
    for cuts in HOPPER.values():
        assert len(set(cuts)) == len(cuts) <= 8
