"""Adapters added in place: the numbers are those of the out-of-place formula, and no wide copy is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from rush.models.adapted_linears import OPERATORS
from rush.models.adapters import Adapter, AdapterSpec, FusedDownProjections, attach
from rush.models.quantized import QuantizedLinear
from rush.models.quantized_formats import Form

TOKENS, INPUTS, OUTPUTS, RANKS = 40, 128, (192, 64, 64), (4, 8, 4)
SCALE = 3.0  # no power of two: where it is applied shows in the last bits
NF4, INT8 = Form("nf4", "bitsandbytes"), Form("int8", "bitsandbytes")
COMPILERS = pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)]
)
"""Graphs are traced, differentiated and partitioned; what Inductor's C++ makes of them takes a compiler ten seconds."""


def layers_of(
    count: int, dtype: torch.dtype, *, bias: bool = False, form: Form | None = None
) -> list[nn.Linear]:
    """Adapted layers with values that training might have left: nothing is zero."""
    torch.manual_seed(7)
    made: list[nn.Linear] = []
    for out, rank in zip(OUTPUTS[:count], RANKS[:count], strict=True):
        plain = nn.Linear(INPUTS, out, bias=bias)
        layer = plain
        if form is not None:
            pytest.importorskip(form.backend)
            layer = QuantizedLinear(plain, form)
            weight = plain.weight.detach()
            layer.to_empty(device="cpu")
            layer.set_weight(weight)
            if plain.bias is not None:
                nn.init.normal_(layer.bias)
        layer.to(dtype)
        attach(layer, Adapter(INPUTS, out, AdapterSpec(rank=rank, alpha=SCALE * rank)).to(dtype))
        nn.init.normal_(layer.adapter.a, std=0.1)  # type: ignore[union-attr, arg-type]
        nn.init.normal_(layer.adapter.b, std=0.1)  # type: ignore[union-attr, arg-type]
        made.append(layer)
    return made


def input_of(dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, TOKENS // 4, INPUTS, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def ours(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    made: Sequence[Tensor] = FusedDownProjections()(x, *layers)
    return made


def out_of_place(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Each layer for itself, its output copied and added to."""
    outs = []
    for layer in layers:
        adapter: Any = layer.adapter
        if isinstance(layer, QuantizedLinear):
            base = F.linear(x, layer.dense_weight(x.dtype))
            base = base if layer.bias is None else base + layer.bias
        else:
            base = F.linear(x, layer.weight, layer.bias)
        down_nr = F.linear(x, adapter.a).flatten(0, -2)
        flat = torch.addmm(base.flatten(0, -2), down_nr, adapter.b.t(), alpha=adapter.spec.scale)
        outs.append(flat.view_as(base))
    return outs


def gradients(outs: Sequence[Tensor], x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    leaves: list[Tensor] = [x]
    for layer in layers:
        leaves += layer.adapter.parameters()  # type: ignore[union-attr, operator]
    loss = sum((out.sin() * (1 + index)).sum() for index, out in enumerate(outs))
    return list(torch.autograd.grad(loss, leaves))  # type: ignore[arg-type]


def same(left: Sequence[Tensor], right: Sequence[Tensor], relative: float) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert float((one - other).detach().norm()) <= relative * float(other.detach().norm())


KINDS = [("plain", None, False), ("bias", None, True), ("nf4", NF4, False), ("int8 bias", INT8, True)]


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("_", "form", "bias"), KINDS, ids=[kind[0] for kind in KINDS])
def test_outputs_and_gradients_are_those_of_the_formula_out_of_place(
    _: str, form: Form | None, bias: bool, count: int, dtype: torch.dtype, relative: float
) -> None:
    if form == NF4 and dtype is torch.float64:
        pytest.skip("bitsandbytes unpacks to no more than fp32")
    layers, x = layers_of(count, dtype, bias=bias, form=form), input_of(dtype)
    got, wanted = ours(x, layers), out_of_place(x, layers)
    same(got, wanted, relative)
    same(gradients(got, x, layers), gradients(wanted, x, layers), relative)


@pytest.mark.parametrize(
    ("count", "form"),
    [
        pytest.param(1, None, marks=pytest.mark.slow, id="1-plain"),
        pytest.param(1, NF4, id="1-nf4"),
        pytest.param(3, None, marks=pytest.mark.slow, id="3-plain"),
        pytest.param(3, NF4, marks=pytest.mark.slow, id="3-nf4"),
    ],
)
@COMPILERS
def test_compiled_it_is_one_graph_and_bit_identical(count: int, form: Form | None, backend: str) -> None:
    layers, x = layers_of(count, torch.float32, form=form), input_of(torch.float32)
    compiled = torch.compile(lambda x: ours(x, layers), fullgraph=True, backend=backend)
    got, wanted = compiled(x), ours(x, layers)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    same(gradients(got, x, layers), gradients(wanted, x, layers), 1e-6)


def recorded(form: Form | None, count: int, path: Any = ours) -> tuple[set[str], list[int]]:
    """Names of the operators of a pass forward and backward, and the sizes of all memory that was taken."""
    layers, x = layers_of(count, torch.float32, form=form), input_of(torch.float32)
    gradients(path(x, layers), x, layers)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        outs = path(x, layers)
        # Gradients that are there already: what is taken now is taken by the layers.
        torch.autograd.grad(outs, [x], [torch.ones_like(out) for out in outs])
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    taken = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return {event.name for event in seen.events() or []}, [size for size in taken if size > 0]


@pytest.mark.parametrize("form", [None, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("count", [1, 3])
def test_no_output_is_copied_and_the_input_gets_one_gradient(count: int, form: Form | None) -> None:
    names, taken = recorded(form, count)
    assert "aten::addmm_" in names
    assert not names & {"aten::addmm", "aten::add", "aten::add_"}
    assert taken.count(4 * TOKENS * INPUTS) == 1
    assert taken.count(4 * TOKENS * OUTPUTS[0]) == 2  # the output, and the ones given as its gradient
    # What this looks for is there, where the formula is written out.
    names, taken = recorded(form, count, out_of_place)
    assert {"aten::addmm", "aten::add_"} & names
    assert taken.count(4 * TOKENS * INPUTS) > 1


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_dequantized_weight_is_saved_with_an_adapter(compiled: bool) -> None:
    layers, x = layers_of(3, torch.float32, form=NF4), input_of(torch.float32)
    run = torch.compile(lambda x: ours(x, layers), fullgraph=True) if compiled else lambda x: ours(x, layers)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    # The input, ranks for each token, the adapters' own matrices, and beside them scales and tables.
    thin = sum(RANKS) * (TOKENS + INPUTS) + sum(o * r for o, r in zip(OUTPUTS, RANKS, strict=True))
    rest = sum(kept.values()) - TOKENS * INPUTS - thin
    assert 0 < rest < 3 * (256 + 16)


@pytest.mark.parametrize("form", [None, INT8], ids=["plain", "int8"])
def test_torch_finds_the_operators_well_formed(form: Form | None) -> None:
    x = input_of(torch.float32)
    layers = layers_of(2, torch.float32, bias=True, form=form)
    parts = [part for layer in layers for part in ([layer.weight] if form is None else layer.parts)]  # type: ignore[union-attr, list-item]
    bs: list[Any] = [layer.adapter.b for layer in layers]  # type: ignore[union-attr]
    a_ri = torch.cat([layer.adapter.a for layer in layers]).detach().requires_grad_()  # type: ignore[union-attr, arg-type, misc]
    biases = [layer.bias for layer in layers]
    operator = OPERATORS[0 if form is None else 1]
    down_nr = (x.flatten(0, -2) @ a_ri.t()).detach()
    torch.library.opcheck(
        operator, (x, down_nr, a_ri, bs, [2.0, 3.0], parts, biases, "" if form is None else str(form))
    )


def test_an_output_that_nobody_uses_adds_nothing_to_the_gradients() -> None:
    layers, x = layers_of(3, torch.float64), input_of(torch.float64)
    b = [layer.adapter.b for layer in layers]  # type: ignore[union-attr]
    got = torch.autograd.grad(ours(x, layers)[1].sin().sum(), [x, b[0], b[1]])  # type: ignore[list-item]
    wanted = torch.autograd.grad(out_of_place(x, layers)[1].sin().sum(), [x, b[1]])  # type: ignore[list-item]
    same([got[0], got[2]], wanted, 1e-14)
    assert not got[1].any()


def test_an_input_without_gradient_needs_no_matmul_with_the_weight() -> None:
    """The first block's input, say."""
    layers, x = layers_of(1, torch.float32), input_of(torch.float32).detach()
    out = ours(x, layers)[0]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        out.sum().backward()
    shapes = [
        event.input_shapes for event in seen.events() or [] if event.name in ("aten::mm", "aten::addmm_")
    ]
    assert len(shapes) == 3  # the gradients of the rank's values, of A and of B
    assert [INPUTS, OUTPUTS[0]] not in [shape for both in shapes for shape in both]


def test_a_weight_that_is_trained_after_all_gets_its_gradient() -> None:
    layers, x = layers_of(3, torch.float32), input_of(torch.float32)
    layers[1].weight.requires_grad_(True)
    sum(out.sum() for out in ours(x, layers)).backward()  # type: ignore[union-attr]
    assert layers[1].weight.grad is not None


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_under_autocast_the_result_is_that_of_bf16_weights() -> None:
    layers, x = layers_of(3, torch.float32), input_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(x, layers)
    narrow = [layer.to(torch.bfloat16) for layer in layers]
    wanted = ours(x.detach().bfloat16(), narrow)
    assert all(one.dtype is torch.bfloat16 for one in got)
    # Weights that autocast casts are not multiplied in place: the sum is rounded in another order, each time by half of 2⁻⁸.
    same(got, wanted, 2**-8)


@COMPILERS
@pytest.mark.parametrize("form", [None, pytest.param(INT8, marks=pytest.mark.slow)], ids=["plain", "int8"])
def test_recomputed_and_compiled_the_last_layer_needs_only_its_low_rank_matmul(
    form: Form | None, backend: str
) -> None:
    """A block's last output is of no use to its own backward pass. In Llama's that is a quarter of the recomputation."""
    (layer,), x = layers_of(1, torch.float32, form=form), input_of(torch.float32)

    def block(x: Tensor) -> Tensor:
        return ours(ours(x, [layer])[0][..., :INPUTS].sin(), [layer])[0]

    @torch.compile(fullgraph=True, backend=backend)
    def checkpointed(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return out

    checkpointed(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        checkpointed(x).sum().backward()
    ran = [event.name for event in seen.events() or []]
    name = "rush::adapted_linears" if form is None else "rush::adapted_quantized_linears"
    assert ran.count(name) == 3, "both layers forward, and of the recomputation the first"
    assert ran.count(f"{name}_backward") == 2
