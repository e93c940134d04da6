"""A life finds what is broken, and names the part. Each test breaks one thing, in the run's folder or by a planted technique."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rush.lab.life.checks import Broken, check_repeated, check_stderr, check_whole, last_error, rounding
from rush.lab.life.life import EVERY, Lives, short
from rush.lab.life.logits import largest_difference
from rush.lab.trial.starter import Starter
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe
from rush.records.run_folder import RunFolder
from tests.forks import shared_starter
from tests.fresh_cache import fresh_cache
from tests.small_recipe import write_small_recipe

PLANTED = "tests.lab.planted.life_plant"
"""Imported by the forking process only: here it would be on the list of techniques for all other tests, too."""
WHOLE = tuple(part for part in EVERY if part not in ("chat", "merge", "adapter"))


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    starter = shared_starter([PLANTED])
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return short(load_recipe(str(write_small_recipe(tmp_path_factory.mktemp("recipe")))))


@pytest.fixture(scope="module")
def lives(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lives]:
    environment = {"RUSH_CACHE": str(fresh_cache(tmp_path_factory.mktemp("cache")))}
    return lambda folder, **options: Lives(starter, folder, environment, **options)


@pytest.fixture(scope="module")
def lived(lives: Callable[..., Lives], recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole life, in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("lived")
    life = lives(folder).live(recipe)
    assert life.problem is None
    assert [part.name for part in life.parts] == list(WHOLE)
    return folder


@pytest.fixture
def copied(lived: Path, tmp_path: Path) -> Path:
    """That life, to be damaged."""
    return shutil.copytree(lived, tmp_path / "life", ignore=shutil.ignore_patterns("undisturbed", "exported"))


def _planted(recipe: Recipe, kind: str) -> Recipe:
    return changed(recipe, {"techniques": [{"name": "life_plant", "kind": kind}]})


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("needs gradients", "train: exit code 4: error: the validation after step "),
        ("warns", "train: an unexplained warning: "),
        pytest.param("forgets", "resume: before the kill: ", marks=pytest.mark.slow),
        pytest.param("hangs", "train: `rush train` was not done after 5 s", marks=pytest.mark.slow),
    ],
)
def test_a_technique_that_breaks_in_the_course_of_a_run_is_found_in_its_part(
    lives: Callable[..., Lives], recipe: Recipe, tmp_path: Path, kind: str, problem: str
) -> None:
    limit = {"limit_s": 5.0} if kind == "hangs" else {}
    found = lives(tmp_path, **limit).live(_planted(recipe, kind), ("train", "resume")).problem
    assert (found or "").startswith(problem), found


def test_a_validation_that_computes_otherwise_is_found_by_evaluating(
    lives: Callable[..., Lives], recipe: Recipe, tmp_path: Path
) -> None:
    otherwise = _planted(recipe, "validates otherwise")
    found = lives(tmp_path).live(otherwise, ("train", "resume", "evaluate")).problem
    assert (found or "").startswith("evaluate: rush evaluate finds "), found


def _lose_a_row(run: RunFolder) -> None:
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:1] + lines[2:]))


def _lose_a_sample(run: RunFolder) -> None:
    run.samples.write_text(run.samples.read_text().splitlines(keepends=True)[-1])


def _spoil_a_loss(run: RunFolder) -> None:
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rows[3]["loss"] = None
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _lose_a_checkpoint(run: RunFolder) -> None:
    shutil.rmtree(run.checkpoints.path(4))


def _flip_a_byte(run: RunFolder) -> None:
    weights = run.checkpoints.path(4) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def _save_twice(run: RunFolder) -> None:
    run.saves.write_text(run.saves.read_text() + run.saves.read_text().splitlines(keepends=True)[-1])


def _leave_litter(run: RunFolder) -> None:
    (run.checkpoints.folder / ".writing-step-000004").mkdir()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_lose_a_row, "metrics.jsonl has the steps"),
        (_lose_a_sample, "samples after the steps [6], due after [3, 6]"),
        (_spoil_a_loss, "loss is None at step 4"),
        (_lose_a_checkpoint, "checkpoints after the steps [2, 6], due after [2, 4, 6]"),
        (_save_twice, "saves.jsonl has the steps"),
        (_flip_a_byte, "model.safetensors"),
        (_leave_litter, "left among the checkpoints: .writing-step-000004"),
    ],
)
def test_what_a_finished_run_lacks_is_named(
    copied: Path, recipe: Recipe, damage: Callable[[RunFolder], None], problem: str
) -> None:
    run = RunFolder(copied / "run")
    check_whole(run, recipe)
    damage(run)
    with pytest.raises(Broken) as found:
        check_whole(run, recipe)
    assert problem in str(found.value)


def test_a_resumed_run_that_saved_other_bytes_is_found_by_repeating_it(
    lives: Callable[..., Lives], copied: Path, recipe: Recipe
) -> None:
    _flip_a_byte(RunFolder(copied / "run"))
    found = lives(copied).live(recipe, ("repeat",)).problem
    assert found == "repeat: after a resume these files differ: checkpoints/step-000004/model.safetensors"


def test_a_run_that_samples_what_it_does_not_say_later_is_found_by_generating(
    lives: Callable[..., Lives], copied: Path, recipe: Recipe
) -> None:
    samples = RunFolder(copied / "run").samples
    *others, last = [json.loads(line) for line in samples.read_text().splitlines()]
    last["text"] += "!"
    samples.write_text("".join(json.dumps(row) + "\n" for row in (*others, last)))
    found = lives(copied).live(recipe, ("generate",)).problem
    assert (found or "").startswith("generate: it says "), found


def test_a_folder_that_transformers_reads_otherwise_is_found_by_its_logits(
    lived: Path, tmp_path: Path
) -> None:
    exported = shutil.copytree(lived / "exported", tmp_path / "exported")
    assert largest_difference(lived / "run", exported, 32) < 1e-5
    weights = load_file(exported / "model.safetensors")
    name = next(name for name in sorted(weights) if "mlp" in name and weights[name].dim() == 2)
    save_file({**weights, name: weights[name].flip(0)}, exported / "model.safetensors", {"format": "pt"})
    assert largest_difference(lived / "run", exported, 32) > 1e-3


def test_what_is_no_weight_is_not_rounded_to_the_stored_dtype(tmp_path: Path) -> None:
    """Gemma multiplies its embedding by the root of the width: 6.3246, and in bf16 6.3125."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=64,
        dtype="bfloat16",
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    assert largest_difference(tmp_path, tmp_path, 32) < 1e-5


def test_a_row_that_differs_after_the_resume_is_named() -> None:
    row = {"step": 1, "loss": 2.0, "lr": 0.1, "tokens": 64, "labels": 64}
    check_repeated([row], [{**row, "loss": 2.01}], to_the_bit=False)  # another order of sums, on a GPU
    for changes, exactly, problem in (
        ({"loss": 2.0000001}, True, "before the kill"),
        ({"loss": 2.1}, False, "the loss of step 1"),
        ({"tokens": 128}, False, "tokens of step 1"),
    ):
        with pytest.raises(Broken, match=problem):
            check_repeated([row], [{**row, **changes}], to_the_bit=exactly)


@pytest.mark.parametrize(
    "line",
    [
        "/lib/torch/x.py:3: UserWarning: something is deprecated",
        "W0712 10:11:12.345000 77 torch/_inductor/utils.py:9] not enough SMs",
        "[W712 10:11:12.345678901 Module.cpp:77] symbolizing",
        "Exception ignored in: <function PrefetchingLoader.__del__>",
        "Traceback (most recent call last):",
    ],
)
def test_a_line_that_helps_nobody_is_found_among_what_a_command_says(line: str) -> None:
    check_stderr("Corpus: 11 documents, 82,523 tokens\nstep 1/6 loss 6.2 W 3\n")
    with pytest.raises(Broken, match="an unexplained warning"):
        check_stderr(f"Corpus: 11 documents\n{line}\nDone.\n")


def test_the_error_of_a_command_is_reported_and_not_the_advice_after_it() -> None:
    said = "step 1/6\ntorch._dynamo.exc.InternalTorchDynamoError: it broke\n\nSet TORCHDYNAMO_VERBOSE=1 for more\n"
    assert last_error(said) == ("torch._dynamo.exc.InternalTorchDynamoError: it broke", None)
    assert last_error("one\nerror: batch.micro is 0\n") == ("error: batch.micro is 0", "batch.micro is 0")
    assert last_error("Killed\n") == ("Killed", None)


def test_how_far_numbers_may_be_apart_goes_by_the_matmuls_of_the_techniques(recipe: Recipe) -> None:
    def of(*techniques: Any) -> float:
        return rounding(changed(recipe, {"techniques": list(techniques)}))

    assert of() < 1e-4
    assert of("amp_bf16") == of("amp_bf16", "flash_attention") == 2**-8
    assert of("pure_bf16", "fp8") == 2**-4
