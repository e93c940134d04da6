"""Several updates in a row, against AdamW written out in float64.

The first update alone hides most mistakes: with bias correction it is the sign of the gradient, whatever betas and eps are.
"""

from __future__ import annotations

import torch

from rush.data import Batch
from rush.training.build import Run
from rush.training.step import train_step
from tests.training.test_step import gradients, make_batch, make_run

RATES = (0.01, 0.003, 0.02, 0.005)
"""None of them but the first is the recipe's."""
BETA1, BETA2, EPS, DECAY = 0.7, 0.95, 1e-3, 0.3


def test_several_updates_are_adamw_as_the_paper_writes_it() -> None:
    run = make_run(
        f"optimizer.beta1={BETA1}", f"optimizer.beta2={BETA2}", f"optimizer.eps={EPS}",
        f"optimizer.weight_decay={DECAY}", "optimizer.clip=0",
    )  # fmt: skip
    seen: dict[str, torch.Tensor] = {}
    run.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(run)))
    wanted = {name: p.detach().double().clone() for name, p in run.model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in wanted.items()}
    second = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for step, rate in enumerate(RATES, start=1):
        batch = make_batch(2, seed=step)
        expected = gradients_of_one_pass(run, batch)
        train_step(run, step, rate, [batch])
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(
                seen[name], expected[name], msg="the gradient is that of this step alone"
            )
            g = seen[name].double()
            first[name] = BETA1 * first[name] + (1 - BETA1) * g
            second[name] = BETA2 * second[name] + (1 - BETA2) * g * g
            m, v = first[name] / (1 - BETA1**step), second[name] / (1 - BETA2**step)
            decay = DECAY if parameter.dim() >= 2 else 0.0
            wanted[name] = wanted[name] * (1 - rate * decay) - rate * m / (v.sqrt() + EPS)
            torch.testing.assert_close(parameter.detach().double(), wanted[name], rtol=1e-5, atol=1e-6)


def gradients_of_one_pass(run: Run, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss, by a pass of its own."""
    loss = run.model(batch.tokens_bt, batch.labels_bt) / batch.num_labels
    names, parameters = zip(*run.model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
