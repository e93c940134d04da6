"""Every ready recipe lives a whole life on a CPU: its own techniques, as far as they run here, at a small size.

A new file in `recipes/` is included by being there. Recipes that differ in nothing but their size live one life here, which is
named after all of them. What compiles has one layer here, its graphs are traced and interpreted (`quick_compiler.py`), and it
is not trained a third time; nor is it killed, resumed, evaluated and exported, if another has all its techniques and is. In `make test-all` it has two
layers, compiled, and all of it. What this machine cannot run stands in the name of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rush.hardware import probe
from rush.lab.life.life import EVERY, Lives, short
from rush.lab.trial.starter import COMMANDS, Starter
from rush.models import SIZES
from rush.ready import RECIPES
from rush.recipe_io import changed
from rush.techniques.api.rounding import trains_adapters
from tests.lives.living import Living
from tests.lives.ready_recipes import FEW, Lived, LocalData, as_far_as_it_runs, as_published, small

INTERPRETED = ("TRITON_INTERPRET", "1")
"""With it our Triton kernels run on a CPU, slowly; each kernel asks when it is defined, so the forking process needs it."""
LIMIT_S = 600.0
"""Of a command: a C++ compiler on busy cores."""
FEWER = {"schedule.steps": 3, "run.save_every": 1}
"""The same events in three steps, where each goes through interpreted graphs and kernels."""
NEEDS_CUDA = {"cudnn_attention", "pin_memory"}


def _lived(name: str) -> Lived:
    recipe = changed(small(as_published(name)), {"run.device": "cpu"})
    with pytest.MonkeyPatch.context() as surroundings:
        surroundings.setenv(*INTERPRETED)
        return as_far_as_it_runs(name, recipe, probe("cpu"))


READY = [_lived(name) for name in RECIPES.names()]


def _without_size(lived: Lived) -> str:
    """All that is left of a small recipe but which model it was made of."""
    rest = lived.recipe.model_dump_json(exclude={"about": True, "model": {"name"}})
    return f"{rest} {lived.recipe.shape()} {lived.left_out}"


def _together() -> list[Lived]:
    """One of those that are equal, with all their names."""
    equal: dict[str, list[Lived]] = {}
    for lived in READY:
        equal.setdefault(_without_size(lived), []).append(lived)
    return [replace(several[0], name=", ".join(one.name for one in several)) for several in equal.values()]


def _compiles(lived: Lived) -> bool:
    return any(name == "compile" for name, _ in lived.recipe.technique_uses())


def _names(lived: Lived) -> set[str]:
    return {name for name, _ in lived.recipe.technique_uses()}


def _parts(lived: Lived, others: list[Lived]) -> list[str]:
    """All parts; of what compiles no third training. Nor is it killed and resumed, where one of the `others` that is has all its
    techniques; and if that is of its family and objective, with adapters or without as this is, it is not evaluated and exported,
    too."""
    if not _compiles(lived):
        return list(EVERY)
    place = others.index(lived)
    have = [
        other
        for other in others
        if _names(lived) < _names(other) or (_names(lived) == _names(other) and others.index(other) < place)
    ]
    trained = ["whole"] if have else ["train", "resume"]
    if any(_kind(other) == _kind(lived) for other in have):
        return [*trained, "generate"]
    return [*trained, *(part for part in EVERY if part not in ("train", "resume", "repeat"))]


def _kind(lived: Lived) -> tuple[str, str, bool]:
    """What decides, with the techniques, what commands do with a trained recipe."""
    recipe = lived.recipe
    return recipe.shape().family, recipe.objective.kind, trains_adapters(recipe)


@pytest.fixture(scope="module")
def starter(living: Living) -> Iterator[Starter]:
    with pytest.MonkeyPatch.context() as surroundings:
        surroundings.setenv(*INTERPRETED)
        yield living.starters[True]


@pytest.fixture(scope="module")
def compiling_starter() -> Iterator[Starter]:
    with pytest.MonkeyPatch.context() as surroundings:
        surroundings.setenv(*INTERPRETED)
        starter = Starter(("tests.quick_interpreter", *COMMANDS), dismantle=False)
        yield starter
        starter.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> LocalData:
    return LocalData(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def environment(session_folder: Path, session_cache: str) -> dict[str, str]:
    """Compiled graphs are shared by all recipes and all workers, but not with other sessions: one that is killed while the
    C++ compiler writes leaves half a library behind, which ends every process that finds it."""
    return {"RUSH_CACHE": session_cache, "TORCHINDUCTOR_CACHE_DIR": str(session_folder / "inductor")}


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    ("lived", "parts"),
    [pytest.param(lived, _parts(lived, _together()), id=lived.id) for lived in _together()],
)
def test_a_ready_recipe_lives_a_whole_life(
    lived: Lived,
    parts: list[str],
    starter: Starter,
    data: LocalData,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    compiled = _compiles(lived)
    recipe = changed(lived.recipe, {"model.shape.num_layers": 1}) if compiled else lived.recipe
    steps = {**FEW, **(FEWER if compiled else {})}
    life = Lives(starter, tmp_path, environment, LIMIT_S).live(short(data.of(recipe), **steps), parts)
    assert life.problem is None


FAMILIES = sorted(name for name in SIZES if name.endswith("-tiny") and name != "llama-tiny")
QUICK = ("gemma3-tiny", "qwen3-tiny")
"""Families whose life is part of `make test`: between them they have windows, norms of every kind, and scales."""


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_lives(
    name: str, starter: Starter, data: LocalData, environment: dict[str, str], tmp_path: Path
) -> None:
    """Trained, killed, resumed, exported (transformers computes the same logits), generated from."""
    changes: dict[str, object] = {"model.name": name, "run.device": "cpu", "techniques": []}
    recipe = small(changed(as_published("llama-tiny"), changes))
    if SIZES[name].has_windows:
        recipe = changed(recipe, {"model.shape.window": 9})
    life = Lives(starter, tmp_path, environment, LIMIT_S).live(
        short(data.of(recipe), **FEW), ("train", "resume", "export", "generate")
    )
    assert life.problem is None


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    "lived",
    [pytest.param(lived, id=lived.id) for lived in READY if _compiles(lived)],
)
def test_a_recipe_that_compiles_lives_with_inductor(
    lived: Lived, compiling_starter: Starter, data: LocalData, environment: dict[str, str], tmp_path: Path
) -> None:
    life = Lives(compiling_starter, tmp_path, environment, LIMIT_S).live(
        short(data.of(lived.recipe), **FEW), ("train", "resume", "repeat", "generate")
    )
    assert life.problem is None


@pytest.mark.parametrize("parts", [("whole",), pytest.param(("train", "resume"), marks=pytest.mark.slow)])
def test_a_recipe_lives_in_processes_that_import_everything_themselves(
    parts: tuple[str, ...], data: LocalData, environment: dict[str, str], tmp_path: Path
) -> None:
    recipe = short(data.of(next(lived.recipe for lived in READY if lived.name == "tiny")), **FEW)
    life = Lives(Starter(fork=False), tmp_path, environment).live(recipe, parts)
    assert life.problem is None


def test_every_technique_of_a_ready_recipe_that_compiles_is_killed_and_resumed_with_it() -> None:
    compiled = [lived for lived in _together() if _compiles(lived)]
    resumed = [lived for lived in compiled if "resume" in _parts(lived, _together())]
    assert 2 < len(resumed) < len(compiled)
    for lived in compiled:
        assert any(_names(lived) <= _names(other) for other in resumed), lived.name


def test_every_ready_recipe_is_in_a_life() -> None:
    assert sorted(name for lived in _together() for name in lived.name.split(", ")) == sorted(RECIPES.names())


def test_what_is_left_out_on_a_cpu_is_what_needs_a_gpu() -> None:
    assert {name for lived in READY for name in lived.left_out} <= NEEDS_CUDA
    kept = next(lived.recipe for lived in READY if lived.name == "llama-3.2-1b-fp8")
    assert {"fused_projections", "compile", "fp8"} <= {name for name, _ in kept.technique_uses()}
