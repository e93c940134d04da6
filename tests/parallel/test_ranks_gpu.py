"""Ranks on GPUs: one device each, over NCCL; and what a machine with fewer devices says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.parallel.rank_work import as_a_group, learn, on_ranks, sharing_a_gpu, spoken_over

pytestmark = pytest.mark.gpu


def test_more_ranks_than_gpus_are_refused() -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(AssertionError, match="each rank needs one of its own"):
        on_ranks(
            count, learn, "gpt2", {"ddp": count}, (), 1, "", (f"batch.total_tokens={32 * count}",), "cuda"
        )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed for two ranks over NCCL")
@pytest.mark.parametrize("techniques", [(), ("fused_adamw",)])
@pytest.mark.parametrize("axis", ["ddp", "fsdp"])
def test_two_gpus_learn_what_one_learns(axis: str, techniques: tuple[str, ...]) -> None:
    reference = on_ranks(1, learn, "llama", {}, techniques, 20, "", (), "cuda")[0]
    for ours in on_ranks(2, learn, "llama", {axis: 2}, techniques, 20, "", (), "cuda"):
        for name in ("losses", "norms"):
            assert ours[name] == pytest.approx(reference[name], rel=1e-5), name
        for name, value in reference["gradients"].items():
            apart = np.linalg.norm(ours["gradients"][name] - value) / np.linalg.norm(value)
            assert apart < 1e-5, name
        assert all(took_effect for took_effect, _ in ours["proofs"].values()), ours["proofs"]


@pytest.mark.parametrize("techniques", [(), ("fused_adamw",)])
def test_one_rank_over_nccl_learns_what_a_plain_run_learns(techniques: tuple[str, ...]) -> None:
    (plain,) = on_ranks(1, learn, "llama", {}, techniques, 20, "", (), "cuda")
    assert on_ranks(1, as_a_group, spoken_over, {}, "cuda") == ["nccl"]
    (ours,) = on_ranks(1, as_a_group, learn, "llama", {}, techniques, 20, "", (), "cuda")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["proofs"]["ddp"][0], ours["proofs"]


@pytest.mark.parametrize("axis", ["ddp", "fsdp", "tp"])
def test_two_ranks_that_share_a_gpu_learn_what_one_learns(axis: str) -> None:
    reference = on_ranks(1, learn, "llama", {}, (), 10, "", (), "cuda")[0]
    for ours in on_ranks(2, sharing_a_gpu, learn, "llama", {axis: 2}, (), 10, "", (), "cuda"):
        assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert all(took_effect for took_effect, _ in ours["proofs"].values()), ours["proofs"]
