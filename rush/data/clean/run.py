"""Run a cleaning pipeline: check, plan, run every step with datatrove, write the report.

All state is in a hidden folder next to the output. Finished tasks are marked there, and an interrupted run resumes from the
marks if pipeline, inputs and output are unchanged; otherwise it starts anew. The folder is removed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.utils.logging import setup_default_logger

from rush.data.clean.failure import first_error
from rush.data.clean.join import Join, JoinTarget, exists
from rush.data.clean.language import check_languages
from rush.data.clean.output import input_schema
from rush.data.clean.plan import CleaningLayout, Step, plan
from rush.data.clean.report import REPORT
from rush.data.clean.row_files import Inputs, find_inputs
from rush.data.clean.stages import CleaningPipeline, Language, Tokens
from rush.data.clean.workers import detecting_dead_workers
from rush.data.pipeline import check_executor, engine_running, make_executor, submit
from rush.data.published_tokenizers import find_tokenizer
from rush.data.storage import folder_lock
from rush.data.worker_pool import check_workers
from rush.errors import MachineError, RecipeError
from rush.files import remove_temporaries, write_json_atomic, writing

VERSION = 1
EXAMPLES = 20
SMALL_BYTES = 32 << 20
PATIENCE_S = 2.0


@dataclass(frozen=True)
class CleanProgress:
    """Progress over the tasks of all steps, and the current step."""

    step: str
    done: int
    total: int


def clean(
    pipeline: CleaningPipeline,
    files: Sequence[str],
    output: str | Path,
    *,
    format: str | None = None,
    executor: str = "local",
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    force: bool = False,
    examples: int = EXAMPLES,
    progress: Callable[[CleanProgress], None] | None = None,
) -> dict[str, Any] | None:
    """Clean `files` into `output` and return the report; None where a Slurm job was submitted.

    The same bytes for any number of `workers` and any executor. `options` go to datatrove's executor.
    """
    check_executor(executor, options or {})
    check_workers(workers)
    inputs = find_inputs(files)
    target = JoinTarget.of(output, format, inputs.parquet)
    _check_target(target, inputs, force)
    _check_pipeline(pipeline)
    if target.format == "parquet" and inputs.parquet:
        input_schema(inputs)
    if workers is None and executor == "local" and inputs.num_bytes < SMALL_BYTES:
        workers = 1  # starting processes for every step would take longer
    layout = CleaningLayout(target.working)
    with writing(target.path, "the cleaned data to "):
        target.path.parent.mkdir(parents=True, exist_ok=True)
        layout.folder.mkdir(exist_ok=True)
        with _locked(layout.folder):
            _open(layout, _key(pipeline, inputs, target, examples))
            _save_tokenizers(pipeline, layout)
            steps = plan(pipeline, inputs, layout, parquet=target.format == "parquet", examples=examples)
            steps.append(Step("joining", [Join(pipeline, inputs, target, examples, force)], 1))
            runners = _executors(steps, layout, executor, workers, options or {})
            if executor == "slurm":
                with quiet(layout.folder / "log.txt"):
                    submit(runners[-1], f"in {layout.folder / 'log.txt'}")
                return None
            _run(steps, runners, executor, layout, progress)
            report = _read_report(target)
        shutil.rmtree(layout.folder)
    return report


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder's lock, with a short wait: the processes of a killed run take a moment to end."""
    patience = time.monotonic() + PATIENCE_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder_lock(folder, wait=False))
                break
            except MachineError:
                if time.monotonic() > patience:
                    raise
                time.sleep(0.1)
        yield


def _check_target(target: JoinTarget, inputs: Inputs, force: bool) -> None:
    if target.path.exists() and not force:
        raise RecipeError(exists(target.path))
    if target.path.exists() and target.path.is_dir() == target.one_file:
        kind = "a folder" if target.path.is_dir() else "a file"
        raise RecipeError(
            f"{target.path} is {kind} and is not replaced by another kind; choose another --output."
        )
    for path in inputs.paths:
        if Path(path) == target.path or target.path in Path(path).parents:
            raise RecipeError(
                f"--output {target.path} would replace the input {path}; choose another --output."
            )
    report_folder = target.removed if target.one_file else target.path
    if not report_folder.is_dir() or not any(report_folder.iterdir()):
        return
    if not (report_folder / REPORT).is_file():
        raise RecipeError(
            f"{report_folder} was not written by a cleaning run and is not replaced; move it, or choose another --output."
        )
    if not force and not target.working.is_dir():  # a run killed between its last two renames leaves both
        raise RecipeError(exists(report_folder))


def _check_pipeline(pipeline: CleaningPipeline) -> None:
    for stage in pipeline.stage:
        if isinstance(stage, Language):
            check_languages(stage.languages)


def _key(pipeline: CleaningPipeline, inputs: Inputs, target: JoinTarget, examples: int) -> str:
    described = {
        "version": VERSION,
        "pipeline": pipeline.model_dump(),
        "inputs": inputs.describe(),
        "format": target.format,
        "examples": examples,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _open(layout: CleaningLayout, key: str) -> None:
    """Keep the state of an interrupted run with the same key; remove everything else."""
    path = layout.folder / "key.json"
    known = json.loads(path.read_bytes())["key"] if path.is_file() else None
    if known != key:
        for entry in layout.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()
        write_json_atomic(path, {"key": key})
    shutil.rmtree(layout.errors, ignore_errors=True)
    remove_temporaries(layout.folder, deep=True)
    for folder in (layout.counts, layout.parts):
        Path(folder).mkdir(exist_ok=True)


def _save_tokenizers(pipeline: CleaningPipeline, layout: CleaningLayout) -> None:
    """Save tokenizers for the workers, which may have no network."""
    for number, stage in enumerate(pipeline.stage):
        if isinstance(stage, Tokens):
            found = find_tokenizer(stage.tokenizer, "the tokenizer of the tokens stage", trainable=False)
            found.save(layout.tokenizer(number))


def _executors(
    steps: Sequence[Step],
    layout: CleaningLayout,
    executor: str,
    workers: int | None,
    options: Mapping[str, Any],
) -> list[Any]:
    made: list[Any] = []
    for number, step in enumerate(steps):
        made.append(
            make_executor(
                executor,
                step.blocks,
                tasks=step.tasks,
                workers=workers,
                options=options,
                logging_dir=_logs(layout, number),
                job_name=f"rush-clean-{number + 1}",
                depends=made[-1] if made and executor == "slurm" else None,
                skip_completed=True,
                purpose="Cleaning data",
            )
        )
    return made


def _logs(layout: CleaningLayout, number: int) -> str:
    return str(layout.folder / "pipeline" / f"{number:02d}")


def _run(
    steps: Sequence[Step],
    runners: Sequence[Any],
    executor: str,
    layout: CleaningLayout,
    progress: Callable[[CleanProgress], None] | None,
) -> None:
    with _reporting(steps, layout, progress), quiet(layout.folder / "log.txt"), engine_running(executor):
        for step, runner in zip(steps, runners, strict=True):
            several = executor == "local" and runner.workers > 1
            try:
                with detecting_dead_workers(step.name) if several else contextlib.nullcontext():
                    runner.run()
            except Exception as error:
                raise (first_error(layout.errors) or error) from error
            unfinished = runner.get_incomplete_ranks(skip_completed=True)
            if unfinished:
                raise first_error(layout.errors) or MachineError(
                    f"{len(unfinished)} of {step.tasks} tasks did not finish while {step.name}; the logs are in "
                    f"{runner.logging_dir.path}/logs. Run the same command again: finished tasks are kept."
                )


@contextlib.contextmanager
def _reporting(
    steps: Sequence[Step], layout: CleaningLayout, progress: Callable[[CleanProgress], None] | None
) -> Iterator[None]:
    """Report progress from the marks of finished tasks, which all executors write."""
    if progress is None:
        yield
        return
    total = sum(step.tasks for step in steps)
    stop = threading.Event()

    def look() -> CleanProgress:
        done, current = 0, steps[0].name
        for number, step in enumerate(steps):
            marks = Path(_logs(layout, number)) / "completions"
            finished = len(os.listdir(marks)) if marks.is_dir() else 0
            done += finished
            current = step.name
            if finished < step.tasks:
                break
        return CleanProgress(current, done, total)

    def watch() -> None:
        while not stop.wait(0.2):
            progress(look())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    progress(look())


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Redirect the logs of datatrove and its workers to a file."""
    sys.stderr.flush()
    saved = os.dup(2)
    with log.open("a") as file, contextlib.redirect_stderr(file):
        os.dup2(file.fileno(), 2)
        setup_default_logger()  # datatrove's logger keeps the stream it started with
        try:
            yield
        finally:
            file.flush()
            os.dup2(saved, 2)
            os.close(saved)
    setup_default_logger()


def _read_report(target: JoinTarget) -> dict[str, Any]:
    path = (target.removed if target.one_file else target.path) / REPORT
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found
