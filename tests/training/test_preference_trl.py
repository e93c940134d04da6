"""Our preference losses against TRL's own code, where it is installed: the same log-probabilities, the same losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rush.recipe_io import load_recipe
from rush.training.objectives.preference import LOSSES, Pairs

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of another library


def settings(*changes: str) -> Any:
    return load_recipe("tiny", ["objective.kind='dpo'", *changes]).objective


def drawn() -> tuple[Pairs, Pairs]:
    """Pairs of summed log-probabilities, and the same per token."""
    generator = torch.Generator().manual_seed(8)
    values = [-20 * torch.rand(16, generator=generator) - 0.5 for _ in range(4)]
    lengths = [torch.randint(1, 12, (16,), generator=generator).float() for _ in range(2)]
    means = [value / lengths[index % 2] for index, value in enumerate(values)]
    return Pairs(values[0], values[1], *lengths, *values[2:]), Pairs(means[0], means[1], *lengths, *means[2:])


def trainer(**given: Any) -> Any:
    """What TRL's methods read of a trainer, and no more."""
    given |= {
        "accelerator": SimpleNamespace(device=torch.device("cpu")),
        "label_smoothing": 0.0,
        "alpha": 0.0,
    }
    return SimpleNamespace(**given)


def test_simpo_is_trls() -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    pairs, means = drawn()
    mine = LOSSES["simpo"](
        pairs, settings("objective.loss='simpo'", "objective.beta=2.0", "objective.margin=0.7")
    )
    theirs = cpo.CPOTrainer.cpo_loss(
        trainer(beta=2.0, simpo_gamma=0.7, loss_type="simpo"), means.chosen_n, means.rejected_n
    )
    torch.testing.assert_close(mine.loss_n, theirs[0])
    torch.testing.assert_close(mine.reward_chosen_n, theirs[1])
    torch.testing.assert_close(mine.reward_rejected_n, theirs[2])


def test_orpo_is_trls() -> None:
    orpo = pytest.importorskip("trl.experimental.orpo")
    pairs, means = drawn()
    mine = LOSSES["orpo"](pairs, settings("objective.loss='orpo'", "objective.beta=0.3"))
    theirs = orpo.ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), means.chosen_n, means.rejected_n)
    # TRL adds the loss of the chosen text in another place, prompt included; ours is over the answer.
    torch.testing.assert_close(mine.loss_n, -means.chosen_n - theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.reward_chosen_n, theirs[1])


@pytest.mark.parametrize(("kind", "beta"), [("sigmoid", 0.3), ("ipo", 0.25)])
def test_dpo_and_ipo_are_trls(kind: str, beta: float) -> None:
    """The loss of TRL's DPO trainer, run on a model that gives these log-probabilities."""
    from trl import DPOTrainer

    pairs, _ = drawn()
    mine = LOSSES[kind](pairs, settings(f"objective.loss='{kind}'", f"objective.beta={beta}"))
    width = int(max(pairs.chosen_tokens_n.max(), pairs.rejected_tokens_n.max())) + 1
    lengths = torch.cat((pairs.chosen_tokens_n, pairs.rejected_tokens_n)).long()
    mask = (torch.arange(width)[None] >= 1) & (torch.arange(width)[None] <= lengths[:, None])
    sums = torch.cat((pairs.chosen_n, pairs.rejected_n))
    per_token = (sums / lengths)[:, None] * mask[:, 1:]

    class Stop(Exception):
        pass

    class Losses(SimpleNamespace):
        """Keeps the loss that the trainer comes to, and stops it before its bookkeeping."""

        def __getattr__(self, name: str) -> Any:
            raise Stop(name)

    def model(**given: Any) -> Any:
        return Losses(log_probs=per_token)

    self = Losses(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
    )
    inputs = {
        "input_ids": torch.ones(32, width, dtype=torch.int64),
        "completion_mask": mask.long(),
        "ref_chosen_logps": pairs.reference_chosen_n,
        "ref_rejected_logps": pairs.reference_rejected_n,
    }
    loss = _local_loss(DPOTrainer._compute_loss, self, model, inputs, Stop)
    torch.testing.assert_close(mine.loss_n.mean(), loss.float(), rtol=1e-5, atol=1e-5)


def _local_loss(compute: Any, self: Any, model: Any, inputs: Any, stop: type[Exception]) -> torch.Tensor:
    """The variable `loss` of TRL's method when it first asks for something that only a whole trainer has."""
    try:
        found = compute(self, model, inputs, False)
    except stop as error:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is compute.__code__:
                loss: torch.Tensor = trace.tb_frame.f_locals["loss"]
                return loss
            trace = trace.tb_next
        raise
    result: torch.Tensor = found
    return result
