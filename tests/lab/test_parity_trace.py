from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rush.hardware import probe
from rush.lab.parity.trace import SKETCH, sketch, trace
from rush.recipe_io import load_recipe
from rush.training.corpus import open_corpus
from tests.fresh_cache import fresh_cache


def test_a_folded_difference_is_as_long_as_the_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(300, 1000, generator=generator)
    second = first + 0.03 * torch.randn(300, 1000, generator=generator)
    one, other = sketch(first, "some.weight"), sketch(second, "some.weight")
    assert one.shape == (SKETCH,)
    true = float((second - first).norm() / first.norm())
    folded = float((other - one).norm() / one.norm())
    assert (
        abs(folded / true - 1) < 4 * (2 / SKETCH) ** 0.5
    )  # two lengths, each known to 1/√(2·SKETCH), fourfold
    assert torch.equal(one, sketch(first, "some.weight"))
    assert not torch.equal(one, sketch(first, "another.weight"))


def test_folding_misses_no_value() -> None:
    values = torch.zeros(2 * 1024 * SKETCH + 7)
    for place in (0, SKETCH, 1024 * SKETCH, 2 * 1024 * SKETCH + 6):
        values.zero_()
        values[place] = 3.0
        assert float(sketch(values, "w").abs().sum()) == 3.0


def test_packings_are_compared_on_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However documents are packed, a step of a trace learns from the same ones: the losses agree, the shapes do not."""
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    rows = [
        {"prompt": f"Count to {n}.", "completion": " ".join(str(i) for i in range(n % 9 + 1))}
        for n in range(80)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [
        "data.source=files", f"data.files=['{tmp_path}/rows.jsonl']", "model.shape.vocab_size=300", "batch.micro=4",
        "batch.sequence=64", "batch.total_tokens=256", "model.shape.num_layers=1", "schedule.steps=3", "schedule.warmup=1",
        "data.validation=0.1",
    ]  # fmt: skip
    machine, found = probe("cpu"), {}
    for packing in ("[]", "['pack_best_fit']", "['flatten']"):
        recipe = load_recipe("sft-tiny", [*data, f"techniques={packing}"])
        corpus = open_corpus(recipe, None, lambda text: None)
        found[packing] = trace(recipe, machine, corpus, tmp_path / "gradients.safetensors").losses
    for losses in found.values():
        assert losses == pytest.approx(found["[]"], rel=1e-5)
