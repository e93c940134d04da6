"""Meeting, the mesh, who gets which samples, and what ranks settle through the store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rush.errors import DataError, MachineError, RecipeError
from rush.hardware import probe
from rush.parallel import Ranks, check_world
from rush.parallel.sharded import full_tensor, gather, is_sharded, local_tensor, total_norm
from rush.techniques import check
from rush.training.build import build
from tests.parallel.rank_work import (
    as_a_group,
    gather_both_ways,
    learn,
    look_around,
    on_ranks,
    read_late,
    recipe,
    spoken_over,
)


def test_a_process_alone_joins_nobody() -> None:
    (found,) = on_ranks(1, look_around, {})
    assert found["alone"]
    assert not found["process group"]
    alone = Ranks()
    assert (alone.data_rank, alone.data_ranks, alone.main) == (0, 1, True)
    assert alone.on_rank0(lambda: "made") == "made"
    assert float(alone.all_reduce(torch.tensor(2.0))) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_group_of_one_averages_with_itself_and_learns_the_same_bits(family: str) -> None:
    (found,) = on_ranks(1, as_a_group, look_around, {})
    assert found["process group"]
    assert on_ranks(1, as_a_group, spoken_over, {}, "cpu") == ["gloo"]
    (plain,) = on_ranks(1, learn, family, {}, (), 6)
    (ours,) = on_ranks(1, as_a_group, learn, family, {}, (), 6)
    assert plain["proofs"] == {}
    took_effect, what = ours["proofs"]["ddp"]
    assert took_effect, what
    assert (ours["losses"], ours["norms"]) == (plain["losses"], plain["norms"])


def test_a_mesh_of_ddp_and_fsdp_deals_out_every_sample_once() -> None:
    found = on_ranks(4, look_around, {"ddp": 2, "fsdp": 2})
    assert [answer["data_rank"] for answer in found] == [0, 1, 2, 3]
    assert [answer["place"] for answer in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(answer["sum"] == 6 for answer in found)
    assert all(answer["told"] == "by rank 0" for answer in found), "what rank 0 makes, all have"
    assert all(answer["error"] == "DataError: no such corpus" for answer in found), "and its errors"
    (one,) = on_ranks(1, look_around, {})
    # Micro batches are dealt out in turn: rank r has the r-th, the (r + 4)-th, ...
    dealt = [found[place % 4]["samples"][place // 4] for place in range(len(one["samples"]))]
    assert dealt == one["samples"]


@pytest.mark.parametrize(
    ("techniques", "changes", "kind", "said"),
    [
        ([], ["layout.cp=3"], RecipeError, "multiples of 6, such as 30 and 36"),
        (
            ["{name='cp', balance=false}"],
            ["layout.cp=5"],
            RecipeError,
            "into 5 equal chunks; .* such as 30 and 35",
        ),
        (["cp"], [], MachineError, "set layout.cp to 2 or more"),
        (["cuda_graph"], ["layout.cp=2"], RecipeError, "cp and cuda_graph cannot be combined"),
        (
            [],
            ["layout.pp=2", "objective.kind=dpo"],
            RecipeError,
            "dpo supports ddp and fsdp only",
        ),
        (
            ["fused_projections"],
            ["layout.fsdp=2"],
            RecipeError,
            "fsdp and fused_projections cannot be combined",
        ),
        (["compile"], ["layout.fsdp=2"], MachineError, "use compile with scope block"),
        (["fsdp"], [], MachineError, "set layout.fsdp to 2 or more"),
        (
            ["{name='ddp', bucket_mb=1}"],
            ["layout.ddp=2", "layout.fsdp=2"],
            MachineError,
            "remove it from techniques",
        ),
        (
            ["{name='fsdp', stage='none'}"],
            ["layout.fsdp=2"],
            RecipeError,
            "'parameters', 'gradients', 'optimizer'",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(
    techniques: list[str], changes: list[str], kind: type[Exception], said: str
) -> None:
    asked = recipe("gpt2", {}, techniques, *changes)
    with pytest.raises(kind, match=said) as caught:
        check(asked, probe("cpu"))
    assert "\n" not in str(caught.value)


def test_a_step_that_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(RecipeError, match="which is not a multiple of"):
        recipe("gpt2", {"ddp": 3})


def test_a_layout_puts_its_techniques_on() -> None:
    uses = check(recipe("gpt2", {"ddp": 2, "fsdp": 2}), probe("cpu"))
    assert {use.technique.name for use in uses} == {"ddp", "fsdp"}
    named = check(recipe("gpt2", {"fsdp": 2}, ["{name='fsdp', stage='gradients'}"]), probe("cpu"))
    assert [use.knobs["stage"] for use in named] == ["gradients"]


def test_a_run_for_several_ranks_is_not_built_by_one() -> None:
    with pytest.raises(RecipeError, match="takes 2 ranks, but this run has 1"):
        build(recipe("gpt2", {"ddp": 2}), probe("cpu"))
    with pytest.raises(
        RecipeError, match="every size of the layout is 1, which takes 1 rank, but this run has 2"
    ):
        check_world({"ddp": 1, "fsdp": 1}, 2)
    check_world({"ddp": 2, "fsdp": 2}, 4)


def test_plain_tensors_pass_through_what_is_made_for_sharded_ones() -> None:
    tensors: dict[str, Any] = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert float(total_norm(list(tensors.values()))) == 5.0
    for tensor in tensors.values():
        assert not is_sharded(tensor)
        assert full_tensor(tensor) is tensor
        assert local_tensor(tensor) is tensor
    assert gather(tensors, keep=True) == tensors
    assert gather(tensors, keep=False) == {}


def test_an_error_of_rank_0_is_everybodys() -> None:
    with pytest.raises(DataError, match="no such corpus"):
        Ranks().on_rank0(_fail)


def _fail() -> str:
    raise DataError("no such corpus")


def test_rank_0_which_keeps_the_store_leaves_last() -> None:
    assert on_ranks(2, read_late, 1.5) == ["gone", "farewell"]


def test_ranks_that_share_a_device_gather_through_the_host_what_others_gather_directly() -> None:
    for plain, through_host in on_ranks(2, gather_both_ways):
        assert plain[2:4] == [[4.0, 5.0], [10.0, 11.0]]
        assert plain == through_host
