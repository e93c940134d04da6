"""Layers that are cut among ranks: their parts, what a rank's slots see, what is refused, and beside which techniques they learn the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.models import build_model
from rush.parallel import Ranks
from rush.parallel.sharded import ShardedDim
from rush.techniques import Build, check, registry
from tests.parallel.rank_work import learn, on_ranks, recipe
from tests.parallel.tensor_work import hold_in_parts, look_inside
from tests.parallel.test_sameness import furthest

WHOLE_STREAM = "{name='tp', sequence=false}"
BLOCKS = "{name='compile', scope='block'}"


@pytest.mark.parametrize("size", [1, 5, 12, 25, 50257])
@pytest.mark.parametrize("parts", [1, 3])
def test_pieces_of_any_length_join_to_the_whole(size: int, parts: int) -> None:
    whole = torch.arange(size * parts)
    for ranks in (1, 2, 3, 4, 8):
        pieces = ShardedDim(0, 0, parts, ranks, 0).pieces(whole)
        assert len(pieces) == ranks
        assert torch.equal(ShardedDim(0, 0, parts, ranks, 0).joined(pieces), whole)
        for piece in pieces:  # cut once more, as fsdp does
            again = ShardedDim(0, 0, 1, 3, 0)
            assert torch.equal(again.joined(again.pieces(piece)), piece)
    if parts == 3 and size == 12:
        assert ShardedDim(0, 0, 3, 4, 1).pieces(whole)[1].tolist() == [3, 4, 5, 15, 16, 17, 27, 28, 29]


@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 2, "tp": 2},
        pytest.param({"tp": 3}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 3, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_was_cut_once_or_twice_is_one_tensor(layout: dict[str, int]) -> None:
    found = on_ranks(int(np.prod(list(layout.values()))), hold_in_parts, layout)
    for ours in found:
        assert max(ours["apart"].values()) == 0, ours["apart"]
        assert ours["norm"] == pytest.approx(ours["wanted"], rel=1e-6), "replicas count once"
        assert ours["scaled"] == pytest.approx(ours["wanted"], rel=1e-6)
    assert len({ours["norm"] for ours in found}) == 1


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_slots_see_plain_tensors_of_a_ranks_own_heads_and_widths(family: str) -> None:
    for ours in on_ranks(2, look_inside, family):
        shapes = ours["shapes"]
        assert ours["same start"], "the weights are those of one rank"
        assert shapes["norm"] == [(1, 16, 64)], "its shard of the sequence"
        query, key = (1, 2, 32, 16), (1, 1 if family == "llama" else 2, 32, 16)
        assert shapes["core"] == [query, key, key], "whole heads of the whole sequence"
        assert set(shapes["activation"]) == {(1, 32, 48)}
        assert ours["logits"] == (1, 32, 259), "asked for logits, a rank gathers them"
        if family == "llama":
            assert shapes["rotate"][:2] == [query, key]
            assert shapes["fan_out"] == [(1, 32, 64)], "gathered once for all layers"


@pytest.mark.parametrize(
    ("bug", "techniques"),
    [
        pytest.param("the parts of a layer are not summed", [WHOLE_STREAM], marks=pytest.mark.slow),
        pytest.param("gradients of a norm stay those of a rank's tokens", [], marks=pytest.mark.slow),
    ],
)
def test_a_planted_bug_of_a_cut_layer_is_seen(bug: str, techniques: list[str]) -> None:
    planted = on_ranks(2, learn, "gpt2", {"tp": 2}, techniques, 12, bug)
    reference = on_ranks(1, learn, "gpt2", {}, (), 12)[0]
    apart = furthest(planted[0], reference)
    assert apart["gradients"] > 1e-3, apart
    assert apart["held_out"] > 1e-5, apart


@pytest.mark.parametrize(
    ("techniques", "changes", "kind", "said"),
    [
        ([], ["layout.tp=3"], RecipeError, r"does not divide the heads of tiny, 4.*Allowed: 1, 2, 4\."),
        ([], ["layout.tp=8"], RecipeError, r"does not divide the heads"),
        (
            [],
            ["layout.tp=2", "batch.sequence=31", "batch.total_tokens=31"],
            RecipeError,
            "the nearest allowed: 30 or 32",
        ),
        (
            [],
            ["layout.tp=4", "model.shape.intermediate=98"],
            RecipeError,
            r"the MLP width of tiny, 98.*Allowed: 1, 2\.",
        ),
        (
            [],
            ["layout.tp=4", "model.shape.vocab_size=5"],
            RecipeError,
            "leaves a rank with an empty vocab shard",
        ),
        (["pad"], ["layout.tp=2"], RecipeError, r"shapes is 0, .*allowed here: 1, 2, 4, 8, 16\."),
        (["compile"], ["layout.tp=2"], RecipeError, "the only allowed value is 'block'"),
        (["vocab_pad"], ["layout.tp=2"], RecipeError, "cannot be combined"),
        (["tp"], [], MachineError, "set layout.tp to 2 or more"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_legal_sizes(
    techniques: list[str], changes: list[str], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        check(recipe("gpt2", {}, techniques, *changes), probe("cpu"))
    assert "\n" not in str(caught.value)


def test_key_value_heads_are_not_copied_to_more_ranks_than_there_are() -> None:
    with pytest.raises(RecipeError, match=r"the key/value heads of llama-tiny, 2.*Allowed: 1, 2\."):
        check(recipe("llama", {"tp": 4}), probe("cpu"))
    whole_stream = recipe("gpt2", {"tp": 2}, [WHOLE_STREAM], "batch.sequence=31", "batch.total_tokens=31")
    assert [use.technique.name for use in check(whole_stream, probe("cpu"))] == ["tp"]


def test_what_a_rank_has_compiled_is_not_found_by_another() -> None:
    machine, whole = probe("cpu"), recipe("llama", {"tp": 2})
    tags = {""}
    with torch.compiler.config.patch(cache_key_tag=""):  # type: ignore[attr-defined]
        for rank in (0, 1):
            model = build_model(whole.shape())
            ranks = Ranks(rank, 2, mesh=object())  # type: ignore[arg-type]
            build = Build(whole, machine, torch.device("cpu"), model, ranks=ranks)
            registry()["compile"].apply(build, {"scope": "block", "mode": "default"})
            tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 3
    assert torch.compiler.config.cache_key_tag == "", "what other tests compile is looked up as always"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "techniques", "more"),
    [
        ("llama", {"tp": 4}, (), ("model.shape.num_kv_heads=4",)),
        ("llama", {"tp": 2}, (), ("model.shape.tied_head=false",)),
        ("llama", {"tp": 2}, (BLOCKS,), ()),
        ("gpt2", {"tp": 2}, (BLOCKS,), ()),
        ("llama", {"fsdp": 2, "tp": 2}, (BLOCKS, "fused_adamw"), ()),
        ("gpt2", {"tp": 2}, ("checkpoint_full", "fused_adamw"), ()),
        ("llama", {"tp": 2}, ("checkpoint_selective",), ()),
        ("llama", {"tp": 2}, ("fused_update",), ("model.shape.num_layers=1",)),
        ("llama", {"tp": 2}, ("flash_attention", "flatten"), ("batch.micro=2",)),
        ("gpt2", {"ddp": 2, "tp": 2}, ("accumulate",), ("batch.micro=2",)),
        ("llama", {"tp": 2}, ("pack_best_fit", "{name='chunked_loss', chunk_tokens=64}"), ("batch.micro=4",)),
    ],
)
def test_a_technique_does_the_same_in_a_cut_layer(
    family: str, layout: dict[str, int], techniques: tuple[str, ...], more: tuple[str, ...]
) -> None:
    reference = on_ranks(1, learn, family, {}, techniques, 3, "", more)[0]
    found = on_ranks(int(np.prod(list(layout.values()))), learn, family, layout, techniques, 3, "", more)
    for ours in found:
        apart = furthest(ours, reference)
        assert max(apart.values()) < 1e-5, apart
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "limit"), [("amp_bf16", 0.02), ("pure_bf16", 0.05), ("bf16_master", 0.05)]
)
def test_sixteen_bits_do_the_same_in_a_cut_layer(technique: str, limit: float) -> None:
    reference = on_ranks(1, learn, "llama", {}, (technique, "fused_adamw"), 3)[0]
    found = on_ranks(2, learn, "llama", {"tp": 2}, (technique, "fused_adamw"), 3)[0]
    apart = furthest(found, reference)
    assert max(apart.values()) < limit, apart
    assert apart["losses"] < 1e-3, apart
    assert all(took_effect for took_effect, _ in found["proofs"].values()), found["proofs"]


SMALL = ("model.shape.num_layers=1", "model.shape.hidden=32", "model.shape.head_dim=8", "model.shape.intermediate=32",
         "batch.sequence=16", "batch.total_tokens=64")  # fmt: skip


def test_the_bias_of_a_row_wise_layer_learns_from_the_tokens_of_all_ranks() -> None:
    """It is added after the reduction, to a rank's shard of the sequence: GPT-2 alone has one."""
    reference = learn("gpt2", {}, (), 1, "", SMALL)["gradients"]
    named = ["blocks.0.attention.out.bias", "blocks.0.mlp.down.bias"]
    for ours in on_ranks(2, learn, "gpt2", {"tp": 2}, (), 1, "", SMALL):
        for name in named:
            np.testing.assert_allclose(ours["gradients"][name], reference[name], rtol=1e-4, atol=1e-7)
    assert all(np.abs(reference[name]).max() > 1e-4 for name in named)
