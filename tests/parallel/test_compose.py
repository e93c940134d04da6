"""Techniques beside layers that are cut and stages of a pipeline do what they do on one rank; the table that says so is true."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.kernels.fp8_linear.reference import E4M3, quantize
from rush.kernels.linear_cross_entropy import reference
from rush.parallel import AXES
from rush.techniques import check, conflict_reason, registry
from tests.parallel.compose_work import given_loss, lose_in_parts, overflow
from tests.parallel.rank_work import Result, learn, on_ranks, recipe
from tests.parallel.shard_work import wait_on_host
from tests.parallel.test_pipeline import together
from tests.parallel.test_sameness import furthest

slow = pytest.mark.slow
TP, PP = {"tp": 2}, {"pp": 2}
ONE = ("model.shape.num_layers=1",)
FOUR = ("model.shape.num_layers=4",)
SHORT = (*ONE, "batch.total_tokens=64")
"""For one step of one block: quick cases, and kernels that the interpreter takes long for."""
NARROW = ("model.shape.hidden=32", "model.shape.head_dim=8", "model.shape.intermediate=32")
# Of every matrix a rank's part of a row comes in whole blocks of 256.
IN_BLOCKS = (*SHORT, "model.shape.hidden=256", "model.shape.head_dim=4", "model.shape.intermediate=512")
# So that every width that a rank has is a multiple of 16.
BY_16 = ("model.shape.num_kv_heads=4",)
WHOLE_STREAM, BLOCKS = "{name='tp', sequence=false}", "{name='compile', scope='block'}"
ZERO_BUBBLE = "{name='pp', schedule='zero_bubble'}"
RUSH8 = "{name='adam8bit', backend='rush'}"
EXACT = {"gradients": 1e-5, "others": 1e-5}
ROUNDED_PARTS = {"gradients": 2e-3, "norms": 12**0.5 * 2**-12, "others": 2e-4}
"""fp16 has a unit of 2⁻¹¹. A block's output is the sum of two rounded parts, rounded again: two exchanges forward and two
backward with some three roundings each add up to √12 · 2⁻¹² of a gradient's norm. Losses are means over hundreds."""
CASES: dict[str, tuple[str, dict[str, int], tuple[str, ...], tuple[str, ...], dict[str, float]]] = {
    "tp, lora": ("llama", TP, ("{name='lora', rank=4}",), SHORT, EXACT),
    "tp, lora, GPT-2, whole stream": ("gpt2", TP, ("lora", WHOLE_STREAM), (), EXACT),
    "tp, lora, compiled": ("llama", TP, ("{name='lora', rank=4}", BLOCKS), ONE, EXACT),
    "tp × fsdp, lora, checkpointing": (
        "llama",
        {"fsdp": 2, "tp": 2},
        ("{name='lora', rank=4}", "checkpoint_full"),
        (),
        EXACT,
    ),
    "tp × pp, lora": ("gpt2", {"pp": 2, "tp": 2}, ("lora",), (), EXACT),
    "tp × ddp, lora on attention": (
        "llama",
        {"ddp": 2, "tp": 2},
        ("{name='lora', roles='attention'}",),
        (),
        EXACT,
    ),
    "pp, lora": ("gpt2", PP, ("{name='lora', rank=4}",), ("batch.total_tokens=64",), EXACT),
    "pp, lora, zero bubble": ("llama", PP, ("lora", ZERO_BUBBLE), FOUR, EXACT),
    "pp, dora": ("llama", PP, ("{name='lora', variant='dora'}",), (), EXACT),
    "pp × fsdp, lora": ("llama", {"pp": 2, "fsdp": 2}, ("lora",), (), EXACT),
    "pp × ddp, lora": ("gpt2", {"pp": 2, "ddp": 2}, ("lora",), (), EXACT),
    "pp, qlora": ("llama", PP, ("qlora",), (), EXACT),
    "pp × fsdp, qlora": ("llama", {"pp": 2, "fsdp": 2}, ("qlora",), (), EXACT),
    "pp, int8_base, zero bubble": ("llama", PP, ("int8_base", ZERO_BUBBLE), FOUR, EXACT),
    "tp, fused_loss": ("llama", TP, ("fused_loss",), SHORT, EXACT),
    "tp, fused_loss, GPT-2, whole stream": ("gpt2", TP, ("fused_loss", WHOLE_STREAM), SHORT, EXACT),
    "tp × fsdp, fused_loss": (
        "llama",
        {"fsdp": 2, "tp": 2},
        ("fused_loss",),
        SHORT,
        EXACT,
    ),
    "tp × pp, fused_loss": (
        "gpt2",
        {"pp": 2, "tp": 2},
        ("fused_loss",),
        (*SHORT, "model.shape.num_layers=2"),
        EXACT,
    ),
    "tp, fused_loss, lora": ("llama", TP, ("fused_loss", "lora"), SHORT, EXACT),
    # Scales are powers of two, so a part's own scale gives what the whole's gives, but for values below 2⁻¹³ of the
    # largest: those are rounded to multiples of 2⁻¹⁷ of it instead of finer ones, which is less than the order of additions.
    "tp, fp8": ("llama", TP, ("fp8",), (*ONE, *BY_16), EXACT),
    "tp, fp8 by rows, GPT-2": ("gpt2", TP, ("{name='fp8', recipe='rowwise'}",), ONE, EXACT),
    "tp × fsdp, fp8": ("llama", {"fsdp": 2, "tp": 2}, ("fp8",), (*ONE, *BY_16), EXACT),
    # The blocks are the same; a gradient that differs in its last bit can turn a code over.
    "tp, adam8bit": ("llama", TP, (RUSH8,), IN_BLOCKS, {"gradients": 1e-5, "others": 1e-3}),
    "tp × fsdp, adam8bit": (
        "llama",
        {"fsdp": 2, "tp": 2},
        (RUSH8,),
        IN_BLOCKS,
        {"gradients": 1e-5, "others": 1e-3},
    ),
    "tp, amp_fp16": ("llama", TP, ("amp_fp16",), (*ONE, *NARROW), ROUNDED_PARTS),
    "tp × pp, amp_fp16": (
        "llama",
        {"tp": 2, "pp": 2},
        ("amp_fp16",),
        NARROW,
        ROUNDED_PARTS,
    ),
    # Stages compute what one rank computes, up to the order in which micro batches are added and fp16 rounds what differs by it.
    "pp, amp_fp16": ("llama", PP, ("amp_fp16",), NARROW, {"gradients": 1e-5, "others": 2e-4}),
}
QUICK = {"pp, lora"}
PART_ONLY = "the whole matrix of an adapter learns from a rank's part of the layer only"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [slow]) for name in CASES]
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_a_technique_beside_an_axis_does_what_it_does_on_one_rank(name: str) -> None:
    family, layout, techniques, more, allowed = CASES[name]
    alone = tuple(entry for entry in techniques if not any(f"name='{axis}'" in entry for axis in AXES))
    steps = 1 if "batch.total_tokens=64" in more else 3
    reference = on_ranks(1, learn, family, {}, alone, steps, "", more)[0]
    found: list[Result] = on_ranks(
        int(np.prod(list(layout.values()))), learn, family, layout, techniques, steps, "", more
    )
    for ours in together(found) if "pp" in layout else found:
        apart = furthest(ours, reference)
        assert all(apart[what] < allowed.get(what, allowed["others"]) for what in apart), apart
        assert all(took_effect for took_effect, _ in ours["proofs"].values()), ours["proofs"]
    assert found[0]["proofs"].keys() >= layout.keys()


@slow
def test_an_adapter_whose_whole_matrix_learns_from_one_rank_only_is_seen() -> None:
    lora = ("{name='lora', rank=4}",)
    reference = on_ranks(1, learn, "llama", {}, lora, 3, "", ONE)[0]
    for ours in on_ranks(2, learn, "llama", TP, lora, 3, PART_ONLY, ONE):
        apart = furthest(ours, reference)
        assert apart["gradients"] > 1e-3, apart
        assert apart["losses"] > 1e-5, apart


def test_a_loss_over_parts_of_the_vocabulary_is_the_loss_over_all_of_it() -> None:
    hidden_nd, weight_vd, labels_n = (t.double().requires_grad_(t.is_floating_point()) for t in given_loss())
    wanted = reference.linear_cross_entropy(hidden_nd, weight_vd, labels_n.long())
    (wanted * 2).backward()  # type: ignore[no-untyped-call]
    assert hidden_nd.grad is not None
    assert weight_vd.grad is not None
    found = on_ranks(2, lose_in_parts, 4)
    for ours in found:
        assert ours["loss"] == pytest.approx(float(wanted.detach()), rel=1e-6)
        np.testing.assert_allclose(ours["hidden"], hidden_nd.grad, rtol=1e-5, atol=1e-6)
        assert np.isnan(ours["unknown"]), "a label outside the vocabulary must not pass for a cheap one"
        assert ours["silent"] == 0
    weight = np.concatenate([ours["weight"] for ours in found])
    # (One token's hidden vector is 300 times as long as the others.)
    np.testing.assert_allclose(weight, weight_vd.grad, rtol=1e-5, atol=1e-4)


def test_a_part_scaled_by_its_own_largest_value_is_cast_as_in_the_whole() -> None:
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(8, 512, generator=generator) * 10 ** (6 * torch.rand(8, 512, generator=generator) - 5)
    for rowwise in (False, True):
        values, unit = quantize(whole, E4M3, rowwise)
        cast = values.float() * unit
        for part in range(4):
            here = slice(128 * part, 128 * part + 128)
            own_values, own_unit = quantize(whole[:, here], E4M3, rowwise)
            apart = (own_values.float() * own_unit - cast[:, here]).abs()
            largest = whole.abs().amax(1, keepdim=True) if rowwise else whole.abs().amax()
            assert (apart[whole[:, here].abs() > largest * 2**-13] == 0).all()
            assert (apart <= largest * 2**-17).all()


@pytest.mark.parametrize(
    ("layout", "more"), [(PP, NARROW), pytest.param(TP, (*ONE, *NARROW), marks=slow)], ids=["pp", "tp"]
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_what_overflows_on_one_rank_is_left_out_on_all(layout: dict[str, int], more: tuple[str, ...]) -> None:
    for ours in on_ranks(2, overflow, layout, more):
        assert ours["skipped"] == [False, True, False]
        first, second, third = ours["scales"]
        assert (second, third) == (first / 2, first / 2)
        before, left_out, after = ours["weights"]
        assert before == left_out != after


@slow
@pytest.mark.parametrize(
    ("layout", "techniques"), [(TP, ()), (PP, ()), (PP, (ZERO_BUBBLE,))], ids=["tp", "pp", "zero bubble"]
)
def test_activations_wait_on_the_host_beside_an_axis(
    layout: dict[str, int], techniques: tuple[str, ...]
) -> None:
    alone = on_ranks(1, wait_on_host, {})[0]
    for ours in on_ranks(2, wait_on_host, layout, techniques):
        assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert 0 < ours["moved"] <= alone["moved"] / 2


@pytest.mark.parametrize(
    ("techniques", "layout", "kind", "said"),
    [
        (["{name='lora', variant='dora'}"], TP, MachineError, "use variant lora, or set layout.tp to 1"),
        (["{name='adam8bit', backend='torchao'}"], TP, MachineError, "set backend rush"),
        (["{name='fp8', scope='blocks_and_head'}"], TP, MachineError, "set scope to blocks"),
        (["vocab_pad"], TP, RecipeError, "cannot be combined: .*fused_loss pads it"),
        (
            ["cuda_graph"],
            PP,
            RecipeError,
            "cannot be combined: a captured graph holds the work of one device",
        ),
    ],
)
def test_what_does_not_stand_beside_an_axis_is_refused_with_what_does(
    techniques: list[str], layout: dict[str, int], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        check(recipe("gpt2", layout, techniques), probe("cpu"))
    assert "\n" not in str(caught.value)


def test_every_conflict_with_an_axis_has_a_reason() -> None:
    for axis in AXES:
        for other in registry()[axis].conflicts:
            assert conflict_reason(registry()[axis], registry()[other]), f"{axis} and {other}"


def test_the_page_says_what_stands_beside_what() -> None:
    script = import_module("scripts.beside_table")
    page = script.PAGE.read_text(encoding="utf-8")
    # A new technique passes without its page; with it, it is in this table.
    described = {one.stem for one in (script.ROOT / "docs" / "techniques").glob("*.md")}
    assert page == script.written(page, described), "run python scripts/beside_table.py"
