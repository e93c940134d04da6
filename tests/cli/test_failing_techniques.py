"""Techniques of a user's own that fail, through the real command line: one clear message, and nothing of the run is lost."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rush.cli import main
from rush.errors import KernelRefusal
from rush.files import sha256_file
from rush.records.checkpoint_store import verify
from rush.records.run_folder import RunFolder
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import rows, rush, rush_alone, small_recipe, write_corpus

FAILING = Path(__file__).parent / "failing"
STEPS = 5
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    corpus = write_corpus(folder / "corpus")
    often = {"validate_every": 2, "sample_every": 0, "keep": 1000}
    for family in ("gpt2", "llama"):
        text = small_recipe(corpus, family, schedule={"steps": STEPS, "warmup": 1}, run=often)
        (folder / f"{family}.toml").write_text(text)
    return folder


def file_of(world: Path, name: str, *, broken: bool) -> Path:
    """The technique as it is, or mended, always in the same place."""
    file = world / f"{name}.py"
    text = (FAILING / f"{name}.py").read_text()
    assert broken or "BROKEN = True" in text
    file.write_text(text if broken else text.replace("BROKEN = True", "BROKEN = False"))
    return file


def train(
    world: Path, name: str, out: Path, *words: str, run: Run = rush
) -> subprocess.CompletedProcess[str]:
    line = ["train", world / "gpt2.toml", f"techniques=['{name}']", "--technique", world / f"{name}.py"]
    return run(*line, "--out", out, *words, cache=world / "cache")


def in_this_process(world: Path, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(world / "cache")))
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def the_message(done: subprocess.CompletedProcess[str]) -> str:
    """The one message; there is nothing after it."""
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    message = done.stderr[done.stderr.index("error: ") :].strip()
    assert "\n" not in message, message
    assert message.endswith("."), message
    return message


def checked_log(out: Path, message: str, *said: str) -> None:
    """The log that the message names has the traceback, and what one needs to look into it elsewhere."""
    assert f"The full log is {out / 'failure.log'}." in message
    log = (out / "failure.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert re.search(r"recipe: [0-9a-f]{64}", log)
    assert "versions: rush" in log
    assert all(part in log for part in said), log


def goes_on(world: Path, out: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint is that of `step` and verifies, and with the technique mended the run comes to its end."""
    store = RunFolder(out).checkpoints
    assert store.steps()[-1] == step
    assert verify(store.path(step)).step == step
    file = file_of(world, name, broken=False)
    assert in_this_process(world, monkeypatch, "train", "--out", out, "--resume", "--technique", file) == 0
    assert [row["step"] for row in rows(out)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("name", "at", "raised", "saved"),
    [
        ("in_forward", "step 3", "RuntimeError: planted in forward", 2),
        ("in_backward", "step 3", "KeyError: 'planted in backward'", 2),
        ("no_exception", "step 3", "Panic: planted panic", 2),
        ("under_no_grad", "the validation after step 2", "TypeError: planted under no_grad", 1),
    ],
)
def test_a_technique_that_raises_mid_run_is_named_and_the_run_resumes_once_it_is_fixed(
    name: str, at: str, raised: str, saved: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = file_of(world, name, broken=True), tmp_path / "run"
    done = train(world, name, out)
    assert done.returncode == 4, done.stderr
    message = the_message(done)
    assert message.startswith(f"error: {at} failed with {raised}. The code of the technique {name} ({file}:")
    assert f"fix it, or take it out with techniques-={name}." in message
    assert f"The last checkpoint (step-{saved:06d}) is intact" in message
    assert f"`rush train --out {out} --resume --technique {file}`" in message
    checked_log(out, message, f"at: {at}\n", raised, f"on the stack: {name} (")
    goes_on(world, out, name, saved, monkeypatch)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SIGSEGV", "Segmentation fault"),
        pytest.param("SIGABRT", "Aborted", marks=pytest.mark.slow),
        pytest.param("SIGKILL", None, marks=pytest.mark.slow),
    ],
)
def test_a_signal_that_ends_the_run_is_reported_and_the_run_resumes(
    name: str, reason: str | None, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = file_of(world, "in_forward", broken=True), tmp_path / "run"
    monkeypatch.setenv("PLANTED_SIGNAL", name)
    done = train(world, "in_forward", out, run=rush_alone)
    assert done.returncode == -signal.Signals[name]
    if reason is None:  # nothing crashed: somebody, or the system when memory ran out, killed it
        assert "error: " not in done.stderr
    else:
        message = the_message(done)
        assert message.startswith(f"error: step 3 failed: a signal ended the process ({reason}). The code of")
        lines = file.read_text().splitlines()
        line = 1 + next(
            i for i, line in enumerate(lines) if {"SIGSEGV": "string_at", "SIGABRT": "abort"}[name] in line
        )
        assert (
            f"The code of a technique ({file}:{line}) is on the stack: fix it, or take the technique out."
            in message
        )
        assert f"resume with `rush train --out {out} --resume --technique {file}`" in message
        log = (out / "failure.log").read_text()
        assert "at: step 3\n" in log
        assert f"Fatal Python error: {reason}" in log
    saved = RunFolder(out).checkpoints.steps()[-1]
    assert saved in (1, 2)  # the second may still have been on its way
    goes_on(world, out, "in_forward", saved, monkeypatch)


def test_what_refuses_mid_run_says_where_and_how_to_resume_and_keeps_its_exit_code(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is a sentence already; once the run trains it is a failure of the run, too."""
    file, out = file_of(world, "refuses", broken=True), tmp_path / "run"
    done = train(world, "refuses", out)
    assert done.returncode == KernelRefusal.exit_code, done.stderr
    message = the_message(done)
    assert message.startswith(
        f"error: the validation after step 2 failed: planted: no rows of 17. The code of the technique refuses ({file}:"
    )
    assert (
        f"The last checkpoint (step-000001) is intact: resume from it with `rush train --out {out}" in message
    )
    checked_log(out, message, "at: the validation after step 2\n", "on the stack: refuses (")
    told = json.loads((out / "failure.json").read_text())
    assert (told["phase"], told["step"], told["techniques"]) == ("validation", 2, ["refuses"])
    goes_on(world, out, "refuses", 1, monkeypatch)


def test_a_technique_that_raises_in_apply_is_named_and_the_run_is_not_touched(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, out = "in_apply", tmp_path / "run"
    file = file_of(world, name, broken=True)
    done = train(world, name, out)
    assert done.returncode == 4, done.stderr
    message = the_message(done)
    assert message.startswith(
        "error: the build failed with ValueError: planted in apply. The code of the technique in_apply ("
    )
    assert message.endswith("Nothing had been trained yet.")
    checked_log(out, message, "planted in apply")
    # The folder can be used again; and a run that once worked fails in its build without losing anything.
    words = ["train", world / "gpt2.toml", f"techniques=['{name}']", "--technique", file, "--out", out]
    file_of(world, name, broken=False)
    assert in_this_process(world, monkeypatch, *words) == 0
    for step in range(3, STEPS + 1):
        shutil.rmtree(out / "checkpoints" / f"step-{step:06d}")
    file_of(world, name, broken=True)
    done = train(world, name, out, "--resume")
    assert done.returncode == 4, done.stderr
    assert "The last checkpoint (step-000002) is intact" in the_message(done)
    assert "changed since the run was started" in done.stderr
    goes_on(world, out, name, 2, monkeypatch)


def test_a_technique_that_raises_or_aborts_at_exit_is_named_and_the_result_stands(
    world: Path, tmp_path: Path
) -> None:
    file, out = file_of(world, "at_exit", broken=True), tmp_path / "run"
    done = train(world, "at_exit", out, run=rush_alone)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert f"Done at step {STEPS} of {STEPS}" in done.stdout
    assert done.stderr.count("rush: ") == 1, done.stderr
    message = done.stderr[done.stderr.index("rush: ") :].strip()
    assert message.startswith("rush: OSError: planted at exit was raised at exit, after the work was done;")
    assert f"The code of the technique at_exit ({file}:" in message
    assert "\n" not in message
    checked_log(out, message, "planted at exit")
    assert verify(RunFolder(out).checkpoints.path(STEPS)).step == STEPS
    assert len(rows(out)) == STEPS


@pytest.mark.slow
def test_without_its_own_way_out_that_run_would_end_in_a_traceback_and_exit_134(
    world: Path, tmp_path: Path
) -> None:
    """What the test above is worth: the same in a plain interpreter."""
    file = file_of(world, "at_exit", broken=True)
    code = f"from rush.techniques.api.own_files import *; add_technique(Path({str(file)!r})); registry()['at_exit'].apply(None, {{}})"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -6
    assert "Traceback" in done.stderr


@pytest.mark.slow
def test_what_the_compiler_cannot_trace_is_named_with_the_compiler(world: Path, tmp_path: Path) -> None:
    file, out = file_of(world, "traced", broken=True), tmp_path / "run"
    techniques = "techniques=['traced', {name='compile', scope='block'}]"
    done = rush(
        "train", world / "llama.toml", techniques, "--technique", file, "--out", out, cache=world / "cache"
    )
    assert done.returncode == 4, done.stderr
    message = the_message(done)
    assert message.startswith("error: the validation after step 2 failed with Unsupported: ")
    assert "save_for_backward" in message
    assert f"The code of the technique traced ({file}:" in message
    assert "under compile: fix it, or take one out with techniques-=traced or techniques-=compile." in message
    assert "The last checkpoint (step-000001) is intact" in message
    checked_log(out, message, "on the stack: traced (", "torch/_dynamo")


def test_a_run_remembers_the_files_of_its_techniques_and_asks_for_them(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = file_of(world, "in_forward", broken=False), tmp_path / "run"
    words = ["train", world / "gpt2.toml", "techniques=['in_forward']", "--out", out]
    assert in_this_process(world, monkeypatch, *words, "--technique", file) == 0
    told = json.loads((out / "techniques.json").read_text())
    assert told == {"in_forward": {"file": file.name, "sha256": sha256_file(file)}}
    assert str(file) not in (out / "recipe.toml").read_text()
    for more in ([], ["--nproc", "1"]):
        capfd.readouterr()
        assert in_this_process(world, monkeypatch, "train", "--out", out, "--resume", *more) == 2
        said = capfd.readouterr().err
        assert f"'in_forward', which is none here: the run was started with --technique {file.name}." in said
        assert said.count("error: ") == 1
    # What needs only the weights needs no technique.
    assert in_this_process(world, monkeypatch, "generate", out, "--prompt", "def ", "--max-tokens", "2") == 0


def test_another_command_takes_the_file_too(
    world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["overfit", world / "gpt2.toml", "techniques=['in_apply']", "--steps", "10"]
    assert in_this_process(world, monkeypatch, *words) == 2
    assert "techniques names 'in_apply', which does not exist" in capfd.readouterr().err
    file = file_of(world, "in_apply", broken=False)
    assert in_this_process(world, monkeypatch, *words, "--technique", file) in (0, 5)
    file_of(world, "in_apply", broken=True)
    monkeypatch.setattr("tempfile.tempdir", str(world))
    capfd.readouterr()
    assert in_this_process(world, monkeypatch, *words, "--technique", file) == 4
    said = capfd.readouterr().err
    assert "the training on one batch failed with ValueError: planted in apply." in said
    assert said.endswith(f"The full log is {world / 'rush-failure.log'}.\n")


def test_what_a_file_raises_outside_of_a_run_is_named_with_its_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (FAILING / "in_apply.py").read_text()
    head, tail = text.split("technique = Technique(")
    file = tmp_path / "in_requires.py"
    file.write_text(
        f"{head}from rush.techniques.api.contract import Requirement\n\n\ndef met(machine, recipe):\n"
        f"    raise ValueError('planted in requires')\n\n\ntechnique = Technique("
        f"requires=(Requirement('planted', met),),{tail}"
    )
    words = ["plan", world / "gpt2.toml", "techniques=['in_apply']", "--technique", file]
    assert in_this_process(world, monkeypatch, *words) == 4
    said = capfd.readouterr().err
    assert said.startswith(f"error: ValueError: planted in requires. {file}:")
    assert "given by --technique, is on the stack: fix it. The full log is " in said
    assert "bug in rush" not in said


BAD_FILES = {
    "missing": (None, "which does not exist; --technique takes a Python file that defines `technique`"),
    "raises": ("x = 1\nraise ValueError('planted\\non import')\n", "which cannot be imported: line 2 raises ValueError: planted on import. Fix the file"),
    "syntax": ("def f(:\n", "which cannot be imported: line 1 raises SyntaxError"),
    "leaves": ("import sys\nsys.exit(7)\n", "which cannot be imported: line 2 raises SystemExit: 7."),
    "empty": ("name = 'technique'\n", "which defines no `technique`"),
    "wrong": ("technique = 'compile'\n", "is a str; --technique takes"),
    "built_in": ("from rush.techniques.host.compile import technique\n", "defines the technique 'compile', and rush has one of that name"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_technique_is_refused_in_one_sentence(
    kind: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text, said = BAD_FILES[kind]
    file = tmp_path / f"{kind}.py"
    if text is not None:
        file.write_text(text)
    words = ["train", world / "gpt2.toml", "--technique", file, "--out", tmp_path / "run"]
    assert in_this_process(world, monkeypatch, *words) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert str(file) in err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('conflicts=("compile")', "its conflicts is a str, and must be a tuple of str, as in (one,) or ()"),
        ("requires=(1,)", "its requires is another tuple, and must be a tuple of Requirement"),
        ("knobs=None", "its knobs is a NoneType, and must be a Mapping"),
        ("summary='words'", "its summary is a str, and must be a function"),
    ],
)
def test_a_technique_with_a_field_of_another_type_is_refused(
    given: str,
    said: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "typed.py"
    file.write_text((FAILING / "in_apply.py").read_text().replace("stage=Stage.", f"{given}, stage=Stage."))
    words = ["train", world / "gpt2.toml", "--technique", file, "--out", tmp_path / "run"]
    assert in_this_process(world, monkeypatch, *words) == 2
    assert f"`technique` in {file} is not complete: {said}" in capfd.readouterr().err


def test_two_files_with_one_name_are_refused(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = file_of(world, "in_apply", broken=False)
    second = tmp_path / "second.py"
    second.write_text(first.read_text())
    words = ["train", world / "gpt2.toml", "--technique", first, "--technique", second]
    assert in_this_process(world, monkeypatch, *words) == 2
    assert f"{second} defines the technique 'in_apply', and so does {first}" in capfd.readouterr().err
