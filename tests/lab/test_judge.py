"""The parity verdict of a trial: what is promised against plain fp32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rush.lab.parity.judge import parity_of, parity_with_plain
from rush.lab.trial.runner import Bench
from rush.lab.trial.trial import Outcome
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


def test_what_differs_by_design_is_held_against_its_like_and_not_called_equal(tmp_path: Path) -> None:
    """Adapters train other tensors than plain fp32 does: there is nothing to compare, but with adapters in plain fp32 there is."""
    base = load_recipe("tiny", ["techniques=[]"])
    adapted = load_recipe("tiny", ["techniques=['chunked_loss', {name='lora', rank=4}]"])
    made: list[list[str]] = []

    def of(recipe: Recipe) -> str:
        return ",".join(name for name, _ in recipe.technique_uses()) or "plain"

    def gradients(recipe: Recipe, rounded: bool = False) -> Path:
        return tmp_path / f"{of(recipe)}.safetensors"

    def trace(recipe: Recipe, rounded: bool = False) -> dict[str, Any] | None:
        there = gradients(recipe).exists() and not rounded
        return {"losses": [3.0, 2.0], "grad_norms": [1.0, 1.0], "skipped": 0} if there else None

    def run(recipe: Recipe, kind: str, **how: bool) -> None:
        made.append([of(recipe), kind])
        save_file({"adapter": torch.ones(4)}, gradients(recipe))

    bench = SimpleNamespace(
        parity_recipe=lambda recipe: recipe,
        trace=trace,
        gradients=gradients,
        run=run,
        known=lambda *_: None,
    )
    declared = {"chunked_loss": {"parity": "CLOSE"}, "lora": {"parity": "CHANGES"}}
    outcome = Outcome("ok", None, {"techniques": declared, "timing": {"dtype": "float32"}})
    for error, said in ((0.0, "not judged"), (0.5, "different")):
        save_file({"adapter": torch.ones(4) * (1 + error)}, gradients(adapted))
        found, _ = parity_with_plain(cast(Bench, bench), adapted, outcome, base)
        assert (found["class"], found["verdict"]) == ("CLOSE", said)
        told = "another gradient: that of adapter is off by 5.0e-01" if error else "the "
        assert found["why"].startswith(
            f"what is learned differs by design; compared with plain fp32 with lora: {told}"
        )
        # Where the base has the adapters, too, the rung learns what it should.
        beside, _ = parity_with_plain(
            cast(Bench, bench), adapted, outcome, base.model_copy(update={"techniques": adapted.techniques})
        )
        assert beside["verdict"] == {"not judged": "equal"}.get(said, said)
        assert beside["against"] == "plain fp32 with lora"
    assert made == [["lora", "reference"]]
