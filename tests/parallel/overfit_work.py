"""Overfitting one batch on several ranks, as a function that a fresh process can find."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from rush.data import Batch
from rush.data.batch import IGNORED

SMALL = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.vocab_size=64", "model.shape.head_dim=8",
         "model.shape.intermediate=64", "batch.sequence=16", "batch.total_tokens=64", "batch.micro=1",
         "schedule.steps=50", "optimizer.lr=0.01"]  # fmt: skip


def micro_batch(seed: int) -> Batch:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = torch.tensor([2 * seed, 2 * seed + 1])  # beginnings that can be told apart
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def overfit_on_ranks(overrides: list[str], planted: str = "") -> dict[str, Any]:
    """The verdict of this rank; `planted` is what is wrong with the batch of the last data rank."""
    from rush.evaluate.overfit import overfit
    from rush.hardware import probe
    from rush.parallel import join
    from rush.recipe_io import load_recipe
    from rush.training.build import Run, build

    recipe = load_recipe("tiny", [*SMALL, *overrides])
    with join(recipe.layout.model_dump(), "cpu") as ranks:

        def make() -> Run:
            return build(recipe, probe("cpu"), None, ranks)

        own = [micro_batch(1 + ranks.data_rank * recipe.layout.pp + n) for n in range(recipe.layout.pp)]
        if ranks.data_rank == ranks.data_ranks - 1:
            if planted == "shifted":
                own = [replace(batch, labels_bt=batch.tokens_bt.clone()) for batch in own]
            if planted == "masked":
                own = [replace(batch, labels_bt=torch.full_like(batch.labels_bt, IGNORED)) for batch in own]
        return asdict(overfit(make, own, 60))
