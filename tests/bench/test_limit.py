"""The limit of a recipe: matmuls and attention at measured rates, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rush.bench.limit import AttentionRate, attention_rates, limit_s_per_token, share_of_limit
from rush.plan.spec import Spec, spec_of
from rush.plan.target import TargetMachine, target_of
from rush.recipe_io import load_recipe

BF16, FP8, ATTENTION = 700e12, 1400e12, 350e12
RATES = (
    AttentionRate(64, 1024, ATTENTION),
    AttentionRate(64, 8192, 2 * ATTENTION),
    AttentionRate(128, 4096, 1e15),
)
WIDTH, LAYERS, VOCABULARY = 768, 12, 50304
WEIGHTS = LAYERS * 12 * WIDTH * WIDTH
"""Of GPT-2's blocks: four times hidden² in attention, eight in the MLP."""
HEAD = VOCABULARY * WIDTH


@pytest.fixture
def target() -> TargetMachine:
    return replace(target_of("h200-sxm"), matmul={"bfloat16": BF16, "float8": FP8})


def gpt2(*overrides: str) -> Spec:
    changes = (
        "batch.micro=64",
        "batch.sequence=1024",
        "batch.total_tokens=65536",
        f"model.shape.vocab_size={VOCABULARY}",
    )
    return spec_of(load_recipe("gpt2-124m", [*changes, *overrides]))


def by_hand(blocks: float, head: float, sequence: int, attention: float, per_weight: int = 6) -> float:
    """A causal query has half of the row as keys; two matmuls forward, five backward, two FLOPs each."""
    scores = 2 * 7 * WIDTH * LAYERS * sequence / 2
    return per_weight * (WEIGHTS / blocks + HEAD / head) + scores / attention


def test_it_is_matmuls_and_attention_at_measured_rates(target: TargetMachine) -> None:
    plain = gpt2('techniques=["amp_bf16"]')
    assert limit_s_per_token(plain, target, RATES) == pytest.approx(by_hand(BF16, BF16, 1024, ATTENTION))
    share = share_of_limit(plain, target, RATES, 500_000.0)
    assert share == pytest.approx(500_000 * by_hand(BF16, BF16, 1024, ATTENTION))


def test_what_is_in_fp8_has_the_rate_of_fp8(target: TargetMachine) -> None:
    blocks, head = (
        gpt2(f'techniques=["amp_bf16","compile",{{name="fp8",scope="{scope}"}}]')
        for scope in ("blocks", "head")
    )
    assert limit_s_per_token(blocks, target, RATES) == pytest.approx(by_hand(FP8, BF16, 1024, ATTENTION))
    assert limit_s_per_token(head, target, RATES) == pytest.approx(by_hand(BF16, FP8, 1024, ATTENTION))


def test_nothing_is_recomputed_in_it(target: TargetMachine) -> None:
    recomputed, plain = (
        gpt2(f"techniques={used}") for used in ('["amp_bf16","checkpoint_full"]', '["amp_bf16"]')
    )
    assert limit_s_per_token(recomputed, target, RATES) == limit_s_per_token(plain, target, RATES)


def test_attention_has_the_rate_of_the_nearest_length(target: TargetMachine) -> None:
    long = gpt2(
        'techniques=["amp_bf16"]', "batch.sequence=4096", "batch.micro=16", "model.shape.context=4096"
    )
    assert limit_s_per_token(long, target, RATES) == pytest.approx(by_hand(BF16, BF16, 4096, 2 * ATTENTION))


def test_frozen_weights_have_no_gradients(target: TargetMachine) -> None:
    frozen = gpt2('techniques=["amp_bf16","lora"]')
    expected = by_hand(BF16, BF16, 1024, ATTENTION, per_weight=4)
    assert limit_s_per_token(frozen, target, RATES) == pytest.approx(expected)


def test_without_a_measured_rate_there_is_none(target: TargetMachine) -> None:
    other = replace(target, matmul={"float16": BF16})
    plain = gpt2('techniques=["amp_bf16"]')
    assert limit_s_per_token(plain, other, RATES) is None
    fp32 = replace(target, matmul={"float32": BF16})
    assert limit_s_per_token(gpt2("techniques=[]"), fp32, RATES) is None, "attention in fp32"
    assert limit_s_per_token(plain, target, RATES[2:]) is None, "another head dim"


def test_the_fastest_attention_that_was_right_counts() -> None:
    def row(
        rate: float | None, step: str = "both", verdict: str = "equal", status: str = "ok"
    ) -> dict[str, Any]:
        dims = {"batch": 16, "sequence": 2048, "heads": 32, "head_dim": 64}
        return {
            "step": step,
            "status": status,
            "dims": dims,
            "flops_per_s": rate,
            "correctness": {"verdict": verdict},
        }

    rows = [
        row(1e14),
        row(3e14),
        row(2e14),
        row(9e14, "forward"),
        row(8e14, verdict="different"),
        row(7e14, status="absent"),
        row(None),
    ]
    record: Any = {"ops": [{"op": "flash_attention", "rows": rows}, {"op": "rope", "rows": [row(5e14)]}]}
    assert attention_rates([record]) == [AttentionRate(64, 2048, 3e14)]
    assert attention_rates([]) == []
