"""`overfit`: a setting that can learn is told from one that cannot, and each planted cause is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.evaluate.label_checks import entropy_floor, misaligned
from rush.evaluate.overfit import MakeRun, overfit
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.training.build import Run, build

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # bf16 on older CPUs

SMALL = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.vocab_size=64", "model.shape.head_dim=8",
         "model.shape.intermediate=64", "batch.sequence=16", "batch.total_tokens=16", "batch.micro=1",
         "schedule.steps=50", "optimizer.lr=0.01"]  # fmt: skip


def maker(*overrides: str) -> MakeRun:
    recipe = load_recipe("tiny", [*SMALL, *overrides])
    return lambda: build(recipe, probe("cpu"))


def lm_batch(seed: int = 1) -> Batch:
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = torch.arange(4)  # four beginnings that can be told apart
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tuple(f"row {i}" for i in range(4)))


def sft_batch() -> Batch:
    batch = lm_batch(2)
    batch.labels_bt[:, :6] = IGNORED
    return batch


def pairs_batch() -> Batch:
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(3))
    tokens[4:, :5] = tokens[:4, :5]
    labels = tokens[:, 1:].clone()
    labels[:, :4] = IGNORED
    return Batch(tokens[:, :-1].contiguous(), labels, tuple(f"answer {i}" for i in range(8)), paired=True)


@pytest.mark.parametrize("kind", ["lm", "sft", "dpo"])
def test_a_good_configuration_overfits_its_batch(kind: str) -> None:
    batch = {"lm": lm_batch, "sft": sft_batch, "dpo": pairs_batch}[kind]()
    seen: list[float] = []
    verdict = overfit(maker(f"objective.kind='{kind}'"), [batch], 200, lambda step, loss: seen.append(loss))
    assert verdict.can_learn, verdict.reason
    assert verdict.cause == "none"
    assert verdict.losses[-1] <= verdict.target <= verdict.floor + 0.05, (
        "near zero is near zero, whatever the start"
    )
    assert verdict.target <= verdict.floor + 0.05 * (verdict.losses[0] - verdict.floor)
    assert list(verdict.losses) == seen
    assert all(check.good for check in verdict.checks)
    assert {check.name for check in verdict.checks} == {
        "mask",
        "labels",
        "parameters",
        "gradients",
        "updates",
    }
    if kind == "dpo":
        assert verdict.losses[0] == float(torch.tensor(math.log(2), dtype=torch.float32))


def test_adapters_can_overfit_a_batch() -> None:
    verdict = overfit(
        maker("techniques=['lora']", "objective.kind='dpo'", "objective.beta=2.0"), [pairs_batch()], 60
    )
    assert verdict.can_learn, verdict.reason
    assert "12,288 of 39,680" in next(check.what for check in verdict.checks if check.name == "parameters")


def test_everything_masked_is_named_as_the_mask() -> None:
    batch = sft_batch()
    batch.labels_bt.fill_(IGNORED)
    verdict = overfit(maker("objective.kind='sft'"), [batch], 50)
    assert (verdict.can_learn, verdict.cause) == (False, "data mask")
    assert "masked" in verdict.reason
    assert verdict.losses == ()


@pytest.mark.parametrize(
    ("shift", "what"),
    [(0, "the token itself"), (2, "the token after the next"), (5, "are not the next token")],
)
def test_shifted_labels_are_detected_even_if_the_loss_falls(shift: int, what: str) -> None:
    batch = lm_batch()
    tokens = torch.cat((batch.tokens_bt, torch.randint(0, 64, (4, 8))), 1)
    moved = replace(batch, labels_bt=tokens[:, shift : shift + 16].contiguous())
    verdict = overfit(maker(), [moved], 60)
    assert (verdict.can_learn, verdict.cause) == (False, "data mask")
    assert what in verdict.reason


def test_right_labels_are_not_called_wrong_wherever_documents_end() -> None:
    assert misaligned(lm_batch()) is None
    assert misaligned(sft_batch()) is None
    packed = lm_batch()
    packed.labels_bt[:, 7] = 9  # the last token of a first document, which is in no input
    documents = (torch.arange(16) > 7).long().expand(4, 16)
    assert misaligned(replace(packed, documents_bt=documents)) is None
    one = torch.full((2, 16), IGNORED)
    one[:, 15] = 3
    assert misaligned(Batch(packed.tokens_bt[:2], one)) is None, "a single label at the end cannot be checked"


def test_a_learning_rate_far_too_low_is_named_and_the_better_one_too() -> None:
    verdict = overfit(maker("optimizer.lr=2e-5"), [lm_batch()], 20)
    assert (verdict.can_learn, verdict.cause) == (False, "learning rate")
    assert "too low" in verdict.reason
    assert "optimizer.lr=0.002 " in verdict.reason, "a hundred times more does better still"
    assert "only fell" in verdict.reason


def test_a_learning_rate_far_too_high_is_named() -> None:
    verdict = overfit(maker("optimizer.lr=0.5"), [lm_batch()], 25)
    assert (verdict.can_learn, verdict.cause) == (False, "learning rate"), verdict.reason
    assert "too high" in verdict.reason
    assert "optimizer.lr=0.05" in verdict.reason


def test_a_learning_rate_with_a_non_finite_loss_is_named() -> None:
    verdict = overfit(maker("optimizer.lr=1e30"), [lm_batch()], 20)
    assert (verdict.can_learn, verdict.cause) == (False, "learning rate"), verdict.reason
    assert "non-finite" in verdict.reason


def changed(make: MakeRun, how: str) -> MakeRun:
    """The same run with a fault planted."""

    def make_faulty() -> Run:
        run = make()
        if how == "all frozen":
            run.model.requires_grad_(False)
        if how == "all but a norm":
            for name, parameter in run.model.named_parameters():
                parameter.requires_grad_(name.startswith("final_norm"))
        if how == "detached":
            for block in run.model.blocks:
                block.mlp = Detached(block.mlp)  # type: ignore[arg-type]
            for block in list(run.model.blocks)[:-1]:
                block.attention = Detached(block.attention)  # type: ignore[arg-type]
            run.model.final_norm = Detached(run.model.final_norm)
        if how == "damaged":
            with torch.no_grad():
                run.model.embedding.weight.fill_(math.nan)
        return run

    return make_faulty


class Detached(nn.Module):
    """Forward as ever, and no gradient behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        out: Tensor = self.inner(*given, **named).detach()
        return out


def test_a_model_that_is_all_frozen_is_named() -> None:
    verdict = overfit(changed(maker(), "all frozen"), [lm_batch()], 20)
    assert (verdict.can_learn, verdict.cause) == (False, "frozen parameters")
    assert "All parameters are frozen" in verdict.reason


def test_too_many_frozen_parameters_are_named() -> None:
    verdict = overfit(changed(maker("optimizer.lr=0.3"), "all but a norm"), [lm_batch()], 40)
    assert (verdict.can_learn, verdict.cause) == (False, "frozen parameters"), verdict.reason
    assert "64 of" in verdict.reason
    assert "embedding.weight" in verdict.reason


def test_parameters_that_no_gradient_reaches_are_named() -> None:
    verdict = overfit(changed(maker(), "detached"), [lm_batch()], 20)
    assert (verdict.can_learn, verdict.cause) == (False, "frozen parameters"), verdict.reason
    assert "no gradient reaches" in verdict.reason
    assert "blocks.0." in verdict.reason


def test_updates_that_bf16_rounds_away_are_named_as_precision() -> None:
    verdict = overfit(maker("techniques=['pure_bf16']", "optimizer.lr=1e-6"), [lm_batch()], 20)
    assert (verdict.can_learn, verdict.cause) == (False, "precision"), verdict.reason
    updates = next(check for check in verdict.checks if check.name == "updates")
    assert not updates.good
    assert "bfloat16" in updates.what
    same_rate = overfit(maker("optimizer.lr=1e-6"), [lm_batch()], 20)
    assert same_rate.cause == "learning rate", "in fp32 the same rate is only too low"


def test_non_finite_initial_weights_are_not_blamed_on_the_learning_rate() -> None:
    verdict = overfit(changed(maker(), "damaged"), [lm_batch()], 20)
    assert (verdict.can_learn, verdict.cause) == (False, "start")


def test_the_entropy_floor_counts_prefixes_with_several_continuations() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 3], [6, 2, 3]])
    labels = torch.tensor([[2, 3, 7], [2, 4, 7], [5, 3, 7], [2, 3, 7]])
    # After [1]: 2, 2, 5; after [1, 2]: 3, 4. All else goes on in one way.
    wanted = (2 * math.log(3 / 2) + math.log(3) + 2 * math.log(2)) / 12
    assert entropy_floor(Batch(tokens, labels)) == pytest.approx(wanted)
    documents = torch.tensor([[0, 1, 1]] * 4)
    # The second document begins with 2, 2, 5, 2, each going on to 3, 4, 3, 3; the first with 1, 1, 1, 6.
    wanted = (2 * math.log(3 / 2) + math.log(3)) * 2 / 12
    assert entropy_floor(Batch(tokens, labels, documents_bt=documents)) == pytest.approx(wanted)
    assert entropy_floor(replace(lm_batch(), labels_bt=torch.full((4, 16), IGNORED))) == 0.0


def test_smoothed_labels_have_a_floor_that_counts_as_near_zero() -> None:
    verdict = overfit(maker("objective.kind='dpo'", "objective.label_smoothing=0.1"), [pairs_batch()], 200)
    assert verdict.floor == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9))
    assert verdict.can_learn, verdict.reason
