"""`overfit` on two ranks: one verdict, from what all of them see."""

from __future__ import annotations

from typing import Any

import pytest

from rush.evaluate.label_checks import entropy_floor
from rush.models import build_model
from rush.recipe_io import load_recipe
from tests.parallel.overfit_work import SMALL, micro_batch, overfit_on_ranks
from tests.parallel.rank_work import on_ranks
from tests.training.small_runs import rush, small_recipe, write_corpus

TOTAL = sum(parameter.numel() for parameter in build_model(load_recipe("tiny", SMALL).shape()).parameters())


def verdict_of(overrides: list[str], planted: str = "") -> dict[str, Any]:
    """The verdict, which is the same on both ranks."""
    found: list[Any] = on_ranks(2, overfit_on_ranks, overrides, planted)
    assert found[0] == found[1]
    one: dict[str, Any] = found[0]
    return one


def said(verdict: dict[str, Any], name: str) -> str:
    return str(next(check["what"] for check in verdict["checks"] if check["name"] == name))


@pytest.mark.parametrize(
    "axis", ["fsdp", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("tp", "pp"))]
)
def test_a_good_configuration_overfits_its_batch_on_every_layout(axis: str) -> None:
    verdict = verdict_of([f"layout.{axis}=2"])
    assert verdict["can_learn"], verdict["reason"]
    assert all(check["good"] for check in verdict["checks"])
    batches = [micro_batch(1)] if axis == "tp" else [micro_batch(1), micro_batch(2)]
    labels = sum(batch.num_labels for batch in batches)
    assert said(verdict, "mask").startswith(f"{labels} of {labels} tokens"), (
        "counts the labels of all ranks, once"
    )
    assert verdict["floor"] == pytest.approx(entropy_floor(*batches))
    assert said(verdict, "parameters").startswith(f"{TOTAL:,} of {TOTAL:,} "), "counts all shards and stages"


def test_shifted_labels_of_one_rank_are_found() -> None:
    verdict = verdict_of(["layout.ddp=2"], "shifted")
    assert not verdict["can_learn"]
    assert verdict["cause"] == "data mask"
    assert "the token itself" in verdict["reason"]


def test_a_rank_without_labels_is_no_reason_as_long_as_another_has_some() -> None:
    assert said(verdict_of(["layout.ddp=2"], "masked"), "mask").startswith("32 of 64 tokens are trained")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_starts_ranks_and_refuses_what_does_not_fit(tmp_path: Any) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 6, "warmup": 2}))
    cache = tmp_path / "cache"
    wrong = rush("overfit", recipe, "layout.fsdp=2", cache=cache)
    assert wrong.returncode == 2
    assert "start it with --nproc 2" in wrong.stderr
    assert "Corpus" not in wrong.stderr, "before any data is prepared"
    other = rush("overfit", recipe, "layout.fsdp=2", "--nproc", "3", cache=cache)
    assert other.returncode == 2
    qlora = ("layout.fsdp=2", "techniques=[{name='qlora', rank=16}]", "batch.micro=1", "optimizer.lr=0.02")
    done = rush("overfit", recipe, *qlora, "--steps", "20", "--nproc", "2", cache=cache)
    assert done.returncode in (0, 5), done.stderr
    assert done.stdout.count("near zero is at most") == 1, "one rank reports"
    assert "Traceback" not in done.stderr
