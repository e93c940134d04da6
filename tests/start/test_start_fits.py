"""Every shape of data, for every size of memory: a recipe that the planner says fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rush import plan_recipe, start_recipe
from rush.errors import RecipeError
from rush.plan.target import target_of
from rush.recipe_io import load_recipe
from rush.records.start import FILE
from rush.start.fitting import find_place
from rush.start.methods import METHODS
from tests.start.small_data import OBJECTIVES, SHAPES, config_only, write_rows

MEMORY_GB = (8.0, 24.0, 80.0, 141.0)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_only(tmp_path_factory.mktemp("models") / "llama-8b", "llama-3.1-8b")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_recipe_fits_the_memory_it_was_started_for(shape: str, large: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / f"{shape}.jsonl", SHAPES[shape])
    learned = []
    for memory in MEMORY_GB:
        file = tmp_path / f"{memory:g}.toml"
        made = start_recipe(large, data, memory=memory, out=file)
        record, planned = made.record, plan_recipe(file, machine=made.record["plan"]["machine"])
        FILE.check(record, "the record")
        assert load_recipe(str(file)) == made.recipe
        assert planned.fits
        assert not planned.tight
        assert not planned.problems
        assert planned.life.total <= memory * (1e9 if memory == 8 else 2**30)
        assert planned.life.total == pytest.approx(record["plan"]["memory_bytes"], rel=1e-6)
        assert record["objective"] == OBJECTIVES[shape] == made.recipe.objective.kind
        learned.append(record["method"])
    # More memory never means a method that learns less: adapters of 4 bits, adapters, every weight.
    assert [METHODS.index(method) for method in learned] == sorted(map(METHODS.index, learned), reverse=True)
    assert (learned[0], learned[1], learned[-1]) == ("qlora", "lora", "full")


def test_the_micro_batch_is_the_planners_and_another_device_gets_other_techniques(
    large: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chat.jsonl", SHAPES["chat"])
    names = {}
    for device in ("t4", "h200-sxm", "mi300x", "cpu"):
        made = start_recipe(large, data, device=device)
        names[device] = [name for name, _ in made.recipe.technique_uses()]
        assert plan_recipe(made.recipe, machine=device).fits
        assert not plan_recipe(made.recipe, machine=device).problems
    assert "amp_fp16" in names["t4"]
    assert {"pure_bf16", "flatten", "fused_loss"} <= set(names["h200-sxm"])
    assert not {"pure_bf16", "flash_attention", "compile"} & set(names["cpu"])


def test_what_fits_nowhere_is_refused_with_what_it_would_take(large: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chat.jsonl", SHAPES["chat"])
    with pytest.raises(RecipeError, match=r"Nothing fits the 2\.0 GB .*qlora.* GB at .*--device"):
        start_recipe(large, data, memory=2)


def test_memory_alone_names_a_device_and_a_limit_only_where_it_is_one() -> None:
    limited, whole = find_place(None, 20), find_place("h200-sxm", 141)
    if limited.machine is not None:  # a machine with a GPU of its own plans for that
        assert limited.machine == "4090"
    assert limited.limit_gb == 20
    assert limited.target.memory_bytes == 20e9
    assert whole.limit_gb is None
    assert whole.target.memory_bytes == target_of("h200-sxm").memory_bytes
    with pytest.raises(RecipeError, match=re.escape("--memory is -1")):
        find_place(None, -1)
    with pytest.raises(RecipeError, match="no machine 'h20'"):
        find_place("h20", None)


def test_without_a_name_this_machine_is_planned_for_with_its_own_memory() -> None:
    from rush.hardware import probe

    here, place = probe(), find_place(None, None)
    assert place.machine is None
    assert place.limit_gb is None
    assert place.target.memory_bytes == here.memory_bytes
    assert place.target.kind == here.device
