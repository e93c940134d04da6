"""The parity verdict of a trial: what is promised against plain fp32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rush.lab.bench import Bench
from rush.lab.judge import parity_of
from rush.lab.trial import Outcome
from rush.recipe import Recipe
from rush.recipe_io import load_recipe


@pytest.mark.parametrize(
    ("micro", "off", "said"),
    [
        (8, 0.0, ("EXACT", "equal")),
        (8, 2e-7, ("EXACT", "different")),
        (4, 2e-7, ("CLOSE", "equal")),
        (4, 0.01, ("CLOSE", "different")),
    ],
)
def test_the_same_bits_are_promised_only_where_the_micro_batch_is_the_same(
    tmp_path: Path, micro: int, off: float, said: tuple[str, str]
) -> None:
    plain, other = (
        load_recipe("tiny", [f"run.seed={seed}", f"batch.micro={size}"])
        for seed, size in ((0, 8), (1, micro))
    )
    files = {plain.digest: tmp_path / "plain.safetensors", other.digest: tmp_path / "other.safetensors"}
    for digest, error in ((plain.digest, 0.0), (other.digest, off)):
        save_file({"weight": torch.ones(4) * (1 + error)}, files[digest])

    def trace(recipe: Recipe, rounded: bool = False) -> dict[str, Any]:
        return {"losses": [3.0, 2.0], "grad_norms": [1.0, 1.0], "skipped": 0}

    bench = SimpleNamespace(
        parity_recipe=lambda recipe: recipe, trace=trace, gradients=lambda recipe: files[recipe.digest]
    )
    outcome = Outcome("ok", None, {"techniques": {}, "timing": {"dtype": "float32"}})
    found = parity_of(cast(Bench, bench), other, plain, outcome)
    assert (found["class"], found["verdict"]) == said
