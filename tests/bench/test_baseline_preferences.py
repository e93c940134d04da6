"""DPO's baseline: TRL's trainer, or its loss written out, gives our rewards, losses and gradients from the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.bench import baseline_preferences, workloads
from rush.bench.baseline_preferences import WRITTEN_OUT, trl_inputs, trl_missing
from rush.bench.baseline_run import BaselineOptions, build_baseline
from rush.data import Batch
from rush.data.batch import IGNORED
from rush.data.row_tensors import PADDING_TOKEN
from rush.errors import RecipeError
from rush.hardware import probe
from rush.hub.weight_names import exported_name
from rush.recipe_io import load_recipe
from rush.records.models import read_models
from rush.training.build import Run, build
from rush.training.objectives import Preference
from rush.training.step import train_step

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of other libraries
    pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers"),
]
TRL = pytest.param(
    "trl",
    marks=[
        pytest.mark.slow,  # importing it takes seconds
        pytest.mark.skipif(bool(trl_missing()), reason=f"needs {', '.join(trl_missing())}"),
    ],
)
SHAPE = ["model.name=llama-tiny", "model.shape.num_layers=2", "model.shape.hidden=64", "model.shape.num_heads=4",
         "model.shape.num_kv_heads=2", "model.shape.head_dim=16", "model.shape.intermediate=128", "model.shape.vocab_size=101",
         "model.shape.context=64", "batch.micro=2", "batch.sequence=24", "batch.total_tokens=none"]  # fmt: skip


def recipe(*changes: str) -> Any:
    return load_recipe("dpo-tiny", [*SHAPE, "techniques=[]", *changes])


def pairs(reference: bool = True) -> Batch:
    """Two pairs: prompts without labels, answers of several lengths, rows filled up at their ends."""
    tokens_bt = torch.randint(1, 101, (4, 21), generator=torch.Generator().manual_seed(5))
    labels_bt, tokens_bt = tokens_bt[:, 1:].clone(), tokens_bt[:, :-1].clone()
    for row, (prompt, end) in enumerate(((3, 20), (5, 13), (3, 9), (5, 17))):
        labels_bt[row, :prompt], labels_bt[row, end:] = IGNORED, IGNORED
        tokens_bt[row, end:] = PADDING_TOKEN
    kept = torch.tensor([-70.0, -40.0, -35.0, -60.0]) if reference else None
    return Batch(tokens_bt, labels_bt, ("a", "b", "a", "b"), padding=18, paired=True, reference_b=kept)


def both(how: str, *changes: str) -> tuple[Run, Run]:
    """Our plain run and the baseline's, with the same weights."""
    ours = build(recipe(*changes), probe("cpu"))
    theirs = build_baseline(ours.recipe, ours.machine, BaselineOptions(preferences=how))
    there = dict(theirs.model.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.model.named_parameters():
            there[exported_name(ours.model.shape, name)].copy_(parameter)
    return ours, theirs


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("how", ["written", TRL])
def test_from_the_same_weights_both_sides_have_the_same_rewards_loss_and_gradients(
    how: str, loss: str
) -> None:
    ours, theirs = both(how, f"objective.loss='{loss}'")
    batch, share = pairs(), torch.tensor(0.5)
    expected, found = ours.forward_backward(batch, share), theirs.forward_backward(batch, share)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    figures = ours.objective.figures()
    if loss == "sigmoid":  # TRL's rewards of ipo are over sums, ours per token as its loss is
        rewards = theirs.objective.losses.rewards()  # type: ignore[attr-defined]
        for name in ("reward_chosen", "reward_rejected"):
            assert rewards[name] == pytest.approx(figures[name], rel=1e-5), name
    there = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        mine, other = parameter.grad, there[exported_name(ours.model.shape, name)].grad
        assert mine is not None
        assert other is not None, name
        assert float((mine - other).norm() / mine.norm()) < 1e-4, name


@pytest.mark.parametrize("how", ["written", TRL])
def test_the_reference_is_that_of_our_own_pass(how: str) -> None:
    ours, theirs = both(how)
    assert isinstance(ours.objective, Preference)
    assert isinstance(theirs.objective, Preference)
    batch = pairs(reference=False)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs.objective.answers(theirs.model, batch), ours.objective.answers(ours.model, batch)
        )


@pytest.mark.parametrize("how", ["written", TRL])
def test_the_baseline_learns_the_preference_in_our_loop(how: str) -> None:
    _, theirs = both(how)
    losses = [train_step(theirs, step, 1e-3, [pairs()]).loss for step in range(1, 9)]
    assert losses[-1] < 0.5 * losses[0], losses


def test_a_row_gets_back_the_token_that_its_labels_end_with() -> None:
    tokens_bt = torch.tensor([[11, 12, 13, 14], [11, 12, 21, PADDING_TOKEN]])
    labels_bt = torch.tensor([[IGNORED, 13, 14, 15], [IGNORED, 21, 22, IGNORED]])
    found = trl_inputs(Batch(tokens_bt, labels_bt, ("a", "a"), paired=True))
    assert found["input_ids"].tolist() == [[11, 12, 13, 14, 15], [11, 12, 21, 22, 0]]
    assert found["completion_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_the_title_says_whose_loss_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, title, how in ([], "TRL's DPOTrainer", "trl"), (["trl"], WRITTEN_OUT, "written"):
        monkeypatch.setattr(workloads, "trl_missing", lambda missing=missing: missing)
        (workload,) = workloads.load_workloads(["dpo"])
        assert workload.baseline is not None
        assert workload.baseline.title == title
        assert workload.baseline.options["preferences"] == how


def test_losses_that_the_baseline_has_not_are_refused() -> None:
    for change in ("objective.loss='simpo'", "objective.label_smoothing=0.1"):
        run = build(recipe(change), probe("cpu"))
        with pytest.raises(RecipeError, match="without label smoothing"):
            baseline_preferences.library_preference(run.model, run.recipe, "written")


@pytest.mark.slow
def test_the_whole_workload_on_a_tiny_model(tmp_path: Path) -> None:
    """References, alternating processes, parity, a short life, the record: all but the GPU."""
    from rush.bench.baselines import bench_models

    wide = ("model.shape.vocab_size=512", "model.shape.context=256", "batch.sequence=160")
    own = recipe("data.shuffle=false", "data.vocab_size=512", "data.too_long='drop'", *wide)
    measure = workloads.load_workloads(["dpo"])[0].measure.model_copy(
        update={"processes": 1, "windows": 4, "window_ms": 1.0, "timed_max_s": 2.0, "warmup_max_steps": 3}
    )
    parity = workloads.ParityConfig.model_validate({"steps": 2})
    options = {"preferences": "written" if trl_missing() else "trl"}
    spec = workloads.WorkloadSpec(
        "dpo", "tiny", workloads.BaselineSpec("baseline", "transformers", own, options),
        (workloads.TargetedRecipe("dpo-tiny", own, 0.1, parity, 100.0),), measure,
    )  # fmt: skip
    bench_models([spec], tmp_path)
    (found,) = read_models(tmp_path)["workloads"]
    assert found["rival"]["status"] == "ok", found["rival"].get("reason")
    rung = found["ours"][0]["rung"]
    assert rung["gain"] is not None
    assert rung["gain"]["ci95"][0] <= rung["gain"]["ratio"] <= rung["gain"]["ci95"][1]
    assert rung["parity"]["verdict"] == "equal", rung["parity"]
