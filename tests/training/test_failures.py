"""A run that breaks off, wherever it is: one message with the place, the log, and a checkpoint to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rush
from rush.checkpoint import writer
from rush.errors import MachineError, Outage, OwnFault, RecipeError, RunFailed, RushError
from rush.recipe_io import load_recipe
from rush.records.checkpoint_store import verify
from rush.records.run_folder import RunFolder
from rush.training import loop, sample, session, validation
from rush.training.failures import Phase, RunStatus, failure_message
from rush.training.loop import train_recipe
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import rows, small_recipe, write_corpus


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    path = tmp_path / "small.toml"
    often = {"validate_every": 2, "sample_every": 2}
    path.write_text(
        small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 6, "warmup": 1}, run=often)
    )
    return path


def failing(inner: Callable[..., Any], error: BaseException, nth: int) -> Callable[..., Any]:
    """The function, which raises at its n-th call."""
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise error
        return inner(*args, **options)

    return call


MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CASES: dict[str, tuple[Any, str, BaseException, int, type[RushError], str, int]] = {
    "a bug in a step": (session, "launch_step", ZeroDivisionError("bug"), 3, OwnFault,
        "step 3 failed with ZeroDivisionError: bug. No technique is on. This looks like a mistake in rush", 2),
    "memory at a step": (session, "launch_step", MEMORY, 3, RunFailed, "out of memory at step 3 on CPU", 2),
    "a bug in a validation": (validation, "validate_local", ZeroDivisionError("bug"), 2, OwnFault,
        "the validation after step 4 failed with ZeroDivisionError: bug", 3),
    "a bug in a sample": (sample, "sample_text", ZeroDivisionError("bug"), 2, OwnFault,
        "the sample after step 4 failed with ZeroDivisionError: bug", 3),
    "memory at a save": (writer, "save_tensors", MemoryError("bytes"), 4, RunFailed,
        "out of memory at the checkpoint of step 2 on CPU", 1),
    "a save that breaks": (writer, "save_tensors", ValueError("bad"), 4, OwnFault,
        "the checkpoint of step 2 failed with ValueError: bad.", 1),
    "a CUDA error": (session, "launch_step", RuntimeError("CUDA error: unspecified launch failure\nlong"), 3, Outage,
        "step 3 failed with RuntimeError: CUDA error: unspecified launch failure. No technique is on.", 2),
    "a network drive": (session, "launch_step", OSError(116, "Stale file handle"), 3, Outage, "step 3 failed with OSError", 2),
    "somebody's exit": (session, "launch_step", SystemExit(3), 3, OwnFault, "step 3 failed with SystemExit: 3", 2),
    "the build": (loop, "build", RuntimeError("bad"), 1, OwnFault, "the build failed with RuntimeError: bad.", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_whatever_fails_the_message_names_the_phase_and_the_run_resumes_from_its_checkpoint(
    case: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, error, nth, kind, said, saved = CASES[case]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing(getattr(module, name), error, nth))
        with pytest.raises(RushError) as caught:
            train_recipe(load_recipe(str(recipe)), out)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error, "--debug shows where it came from"
    message = str(caught.value)
    assert message.startswith(said), message
    assert f"The full log is {out / 'failure.log'}." in message
    assert "\n" not in message
    log = (out / "failure.log").read_text()
    assert f"{type(error).__name__}" in log
    assert "Traceback" in log
    assert all(word in log for word in ("[schedule]", "steps = 6")), "the recipe"
    store = RunFolder(out).checkpoints
    assert store.steps()[-1:] == ([saved] if saved else [])
    if saved:
        assert f"The last checkpoint (step-{saved:06d}) is intact" in message
        assert verify(store.path(saved)).step == saved
    train_recipe(load_recipe(str(recipe)), out, resume=bool(saved))
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6]


def test_the_messages_of_our_own_keep_their_words_and_kind_and_say_where_the_run_was(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    error = MachineError("out of memory in validation: not even one row fits.")
    monkeypatch.setattr(validation, "validate_local", failing(validation.validate_local, error, 2))
    with pytest.raises(MachineError) as caught:
        train_recipe(load_recipe(str(recipe)), out)
    assert type(caught.value) is MachineError
    assert str(caught.value).startswith(
        f"the validation after step 4 failed: {error} The full log is {out / 'failure.log'}."
    )
    assert "The last checkpoint (step-000003) is intact" in str(caught.value)
    told = json.loads(RunFolder(out).last_failure.read_text())
    message = f"the validation after step 4 failed: {error}"
    assert told == {
        "error": "MachineError",
        "phase": "validation",
        "step": 4,
        "techniques": [],
        "disk_full": False,
        "message": message,
    }


def test_a_refusal_before_the_first_step_stays_as_it_is(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(loop, "build", failing(loop.build, MachineError("as it is."), 1))
    with pytest.raises(MachineError, match=r"^as it is\.$"):
        train_recipe(load_recipe(str(recipe)), out)
    assert not (out / "failure.log").exists()


def test_a_run_that_ran_out_of_memory_goes_on_with_the_micro_batch_that_the_message_names(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same samples in every step, so the same losses up to the order of sums."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    train_recipe(load_recipe(str(recipe)), whole)
    with monkeypatch.context() as patch:
        patch.setattr(session, "launch_step", failing(session.launch_step, MEMORY, 3))
        with pytest.raises(RunFailed, match=r"which a resumed run may do: batch\.micro=1\. ") as caught:
            train_recipe(load_recipe(str(recipe)), out)
    assert "Halve batch.micro" in str(caught.value)
    stored = str(RunFolder(out).recipe)
    train_recipe(load_recipe(stored, ["batch.micro=1"]), out, resume=True)
    assert load_recipe(stored).micro == 1, "the next resume needs no word"
    losses, expected = ([row["loss"] for row in rows(one)] for one in (out, whole))
    assert losses[:2] == expected[:2]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_micro_batch_that_changes_the_step_is_refused_with_the_word_that_is_missing(recipe: Path) -> None:
    text = recipe.read_text()
    alone = text.replace("total_tokens = 64\n", "")
    assert alone != text
    recipe.write_text(alone)
    stored = load_recipe(str(recipe))
    with pytest.raises(
        RecipeError, match=r"batch\.micro: 2 → 1.*With batch\.micro set batch\.total_tokens=32, too\."
    ):
        loop.resumed_recipe(stored, load_recipe(str(recipe), ["batch.micro=1"]))
    given = load_recipe(str(recipe), ["batch.micro=1", "batch.total_tokens=32"])
    assert loop.resumed_recipe(stored, given).micro == 1


def test_a_loader_thread_that_dies_ends_the_run_with_its_own_words(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rush.data.loader import Loader

    monkeypatch.setattr(Loader, "_finished", failing(Loader._finished, EOFError("the shard is cut"), 7))
    with pytest.raises(OwnFault, match=r"^step \d failed with EOFError: the shard is cut\."):
        train_recipe(load_recipe(str(recipe), ["techniques=['loader_workers']"]), tmp_path / "run")


def test_a_second_failure_is_added_to_the_log_and_the_first_stays(tmp_path: Path) -> None:
    status = RunStatus(RunFolder(tmp_path))
    for number in (1, 2):
        status.enter(Phase.SAMPLE, number)
        failure_message(ValueError(f"number {number}"), status)
    log = (tmp_path / "failure.log").read_text()
    assert log.index("at: the sample after step 1") < log.index("at: the sample after step 2")
    assert log.count("=== 20") == 2


def test_a_folder_that_takes_no_log_has_it_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    elsewhere = tmp_path / "temporary" / "rush-failure.log"
    folder = tmp_path / "file"
    folder.write_text("")
    message = str(failure_message(ValueError("bad"), RunStatus(RunFolder(folder))))
    assert f"The full log is {elsewhere}." in message
    assert "ValueError: bad" in elsewhere.read_text()


@pytest.mark.parametrize(
    ("file", "techniques", "said"),
    [
        ("techniques/optimizer/fused_adamw.py", "['fused_adamw', 'compile']",
         "The code of the technique fused_adamw (rush/techniques/optimizer/fused_adamw.py:1, in <module>) is on the stack: take it "
         "out with techniques-=fused_adamw. Please report it, with the log."),
        ("techniques/parallel/ddp.py", "[]", "is on the stack: take it out with layout.ddp=1."),
        ("train/step.py", "['fused_adamw', 'compile']",
         "No technique's code is on the stack; enabled are: compile, ddp, fused_adamw. This looks like a mistake in rush"),
    ],
)  # fmt: skip
def test_a_technique_of_ours_is_named_too_and_how_to_take_it_out(
    file: str, techniques: str, said: str, recipe: Path, tmp_path: Path
) -> None:
    code = compile("1 / 0", str(Path(rush.__file__).resolve().parent / file), "exec")
    status = RunStatus(
        RunFolder(tmp_path), load_recipe(str(recipe), [f"techniques={techniques}", "layout.ddp=2"])
    )
    with pytest.raises(ZeroDivisionError) as caught:
        exec(code)
    assert said in str(failure_message(caught.value, status))


def test_an_error_without_words_or_with_too_many_fits_into_one_line(tmp_path: Path) -> None:
    status = RunStatus(RunFolder(tmp_path))
    assert "failed with KeyError. " in str(failure_message(KeyError(), status))
    long = str(failure_message(ValueError("x" * 10_000 + "\nmore"), status))
    assert len(long) < 1000
    assert "more" not in long
    assert "x" * 10_000 in (tmp_path / "failure.log").read_text()
