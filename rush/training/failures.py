"""The message of a failing run: where it failed, whose code is on the stack, what to do, the path of the log.

A run is always in a phase (`RunStatus`). Any error that is not a `RushError` yet becomes one here: the traceback goes to
`failure.log` in the run's folder, and the message names what failed, which technique to remove, and how to resume from the
last checkpoint, which a failure never touches. A `RushError` that is raised once the run trains (a kernel refuses a width, not
one row of a validation fits) gets the same around its own sentence. For an error of this package itself it asks for a report.
"""

from __future__ import annotations

import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from rush.errors import (
    CannotWrite,
    Diverged,
    Outage,
    OwnFault,
    RankLost,
    RecipeError,
    RunFailed,
    RushError,
    text_of,
)
from rush.files import append_log, is_disk_full, write_json_atomic
from rush.hardware import Machine, fragmentation_hint, out_of_memory
from rush.parallel import AXES, Ranks, started_rank, started_world
from rush.parallel.store_channel import FROM_RANK_0
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.run_folder import RunFolder
from rush.techniques import Use, resolve_uses
from rush.techniques.api.own_files import given
from rush.techniques.api.stacks import Suspect, chain, compiler_failed, suspects
from rush.training.crashes import set_phase, watch_for_crashes
from rush.version import __version__

LONGEST = 300
"""Characters of an error's text in a message; the log has all of them."""
_DEVICE_ERRORS = (
    "CUDA error",
    "CUDA driver error",
    "cuBLAS",
    "CUBLAS_STATUS",
    "cuDNN error",
    "CUDNN_STATUS",
    "NCCL error",
    "HIP error",
)


class Phase(Enum):
    """The phases of a run."""

    BUILD = "the build"
    STEP = "step {step}"
    REPLICAS = "the comparison of replicas after step {step}"
    RECORD = "the record of step {step}"
    VALIDATION = "the validation after step {step}"
    SAMPLE = "the sample after step {step}"
    SAVE = "the checkpoint of step {step}"
    END = "the end, after step {step}"
    ONE_BATCH = "the training on one batch"


@dataclass
class RunStatus:
    """The phase of a run, for the watchdog and for the message if it fails."""

    folder: RunFolder | None
    """None without a run folder."""
    recipe: Recipe | None = None
    machine: Machine | None = None
    ranks: Ranks = field(default_factory=Ranks)
    phase: Phase = Phase.BUILD
    step: int = 0

    def enter(self, phase: Phase, step: int) -> None:
        self.phase, self.step = phase, step
        self.ranks.set_phase(str(self))
        set_phase(str(self))

    def __str__(self) -> str:
        return self.phase.value.format(step=self.step)

    def uses(self) -> list[Use]:
        """The enabled techniques."""
        with suppress(RushError):
            return resolve_uses(self.recipe) if self.recipe is not None else []
        return []


@contextmanager
def reporting_failures(status: RunStatus) -> Iterator[None]:
    """Turn any error of the block into a `RushError` that says where the run was. (A panic of a library in Rust is no
    `Exception`.)"""
    try:
        yield
    except CannotWrite as error:
        raise _cannot_write(error, status) from error
    except Diverged as error:
        _record_failure(error, status, [], str(error))
        raise
    except RushError as error:
        if isinstance(error, RankLost) or status.phase in (Phase.BUILD, Phase.ONE_BATCH):
            raise
        raise _refused_mid_run(error, status) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise failure_message(error, status) from error


def _cannot_write(error: CannotWrite, status: RunStatus) -> CannotWrite:
    """The rank that could not write (nodes may have different disks), and how to resume."""
    _record_failure(error, status, [], str(error))
    notes = getattr(error, "__notes__", ())
    whose = "" if status.ranks.alone or FROM_RANK_0 in notes else f"rank {status.ranks.rank}: "
    at = "" if status.phase in (Phase.BUILD, Phase.ONE_BATCH) else f" That was in {status}."
    failed = CannotWrite(f"{whose}{error}{at} {_how_to_resume(status)}".rstrip())
    for note in notes:
        failed.add_note(note)
    return failed


def _refused_mid_run(error: RushError, status: RunStatus) -> RushError:
    """The same kind of error, with the phase, whose code refused, the log, and how to resume."""
    uses = status.uses()
    found, where = _log_failure(error, status, str(status), uses)
    found = found if isinstance(error, RecipeError) else []
    said = f"{str(error).rstrip('.')}."
    at = "" if said.startswith(str(status)) else f"{status} failed: "
    whose = [_suspects_message(found)] if found else []
    message = " ".join([f"{at}{said}", *whose])
    suspected = [one.technique.name for one in _suspected(found, compiler=False)]
    _record_failure(error, status, suspected, message)
    failed = type(error)(f"{message} {where} {_how_to_resume(status)}".rstrip())
    for note in getattr(error, "__notes__", ()):
        failed.add_note(note)
    return failed


def failure_message(error: BaseException, status: RunStatus) -> RushError:
    """Write the log and return the error with the message."""
    uses = status.uses()
    found, where = _log_failure(error, status, str(status), uses)
    kind, message = _diagnosis(error, status, uses, found)
    names = [one.technique.name for one in _blamed(error, found) if one.technique.name not in AXES]
    _record_failure(error, status, names, message)
    failed = kind(f"{message} {where} {_how_to_resume(status)}".rstrip())
    if FROM_RANK_0 in getattr(error, "__notes__", ()):
        failed.add_note(FROM_RANK_0)
    return failed


def _record_failure(error: BaseException, status: RunStatus, techniques: list[str], message: str) -> None:
    """Write the failure as JSON for programs, which need not parse the message."""
    if status.folder is None:
        return
    failure = {
        "error": type(error).__name__,
        "phase": status.phase.name.lower(),
        "step": status.step,
        "techniques": techniques,
        "disk_full": any(map(is_disk_full, chain(error))),
        "message": message,
    }
    with suppress(RushError):
        write_json_atomic(status.folder.last_failure, failure)


def report_late(status: RunStatus, uses: list[Use], error: BaseException, at: str) -> None:
    """Print, on rank 0, an error that was raised where nothing could catch it (a callback at exit, a thread)."""
    found, where = _log_failure(error, status, at, uses)
    whose = f" {_suspects_message(found)}" if found else ""
    if started_rank() == 0:
        message = (
            f"{one_line(error)} was raised {at}; it does not affect the run or its files.{whose} {where}"
        )
        print(f"rush: {message}", file=sys.stderr, flush=True)  # noqa: T201


def report_crashes(status: RunStatus) -> None:
    """Print the message, too, where a signal ends this process."""
    if status.folder is not None and started_world() == 1:  # several ranks have a launcher that reports it
        advice = f"What was saved is intact: resume with `{_resume_command(status.folder, status)}`, or start a new run."
        watch_for_crashes(status.folder.failures, advice, list(given().values()))


def _log_failure(
    error: BaseException, status: RunStatus, at: str, uses: list[Use]
) -> tuple[list[Suspect], str]:
    """Write the log; return whose code is on the stack, and a sentence with the log's path."""
    try:
        found, trouble = suspects(error, uses), ""
    except Exception:  # the first error is the one to report
        found, trouble = [], f"\nFinding whose code it is failed:\n{traceback.format_exc()}"
    places = [status.folder.failures] if status.folder is not None else []
    places.append(Path(tempfile.gettempdir()) / "rush-failure.log")
    log = append_log(_entry(error, status, at, uses, found) + trouble, *places)
    return (
        found,
        f"The full log is {log}." if log else "No log could be written; --debug shows the traceback.",
    )


def _blamed(error: BaseException, found: list[Suspect]) -> list[Suspect]:
    """The innermost technique on the stack; for a failure of the compiler also those that compile. None after an OOM."""
    if any(out_of_memory(one) for one in chain(error)):
        return []
    return _suspected(found, compiler=compiler_failed(error))


def _suspected(found: list[Suspect], *, compiler: bool) -> list[Suspect]:
    return [*found[:1], *(other for other in found[1:] if compiler and other.compiles)]


def one_line(error: BaseException) -> str:
    """An error in one line: its type and first line, and those of its root cause where they differ."""
    first, *others = (_line(one) for one in chain(error))
    root = others[-1] if others else first
    return first if root == first else f"{first} (from {root})"


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    # A compiler's first line is a heading.
    lines[1:] = [line for line in lines if line.startswith("Explanation: ")]
    shown = f"{type(error).__name__}: {'. '.join(lines)}" if lines else type(error).__name__
    return (shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…").rstrip(".:")


def _diagnosis(
    error: BaseException, status: RunStatus, uses: list[Use], found: list[Suspect]
) -> tuple[type[RushError], str]:
    """The error type and the message: what failed and what to do."""
    memory = next((one for one in chain(error) if out_of_memory(one)), None)
    if memory is not None:
        return RunFailed, _memory_message(memory, status)
    failed = f"{status} failed with {one_line(error)}."
    on_device = any(_is_device_error(one) for one in chain(error))
    of_system = any(
        isinstance(one, OSError) or "can't start new thread" in text_of(one) for one in chain(error)
    )
    hint = (
        " CUDA errors are reported asynchronously: CUDA_LAUNCH_BLOCKING=1 shows the true place."
        if on_device
        else ""
    )
    if found:
        kind = Outage if on_device else RunFailed
        return kind, f"{failed} {_suspects_message(found, compiler=compiler_failed(error))}{hint}"
    names = ", ".join(use.technique.name for use in uses)
    nobody = f"No technique's code is on the stack; enabled are: {names}." if uses else "No technique is on."
    if on_device or of_system:
        return Outage, f"{failed} {nobody}{hint}"
    if compiler_failed(error):
        return RunFailed, f"{failed} {nobody}"
    return (
        OwnFault,
        f"{failed} {nobody} This looks like a mistake in rush {__version__}{_report_advice(uses)}",
    )


def _report_advice(uses: list[Use]) -> str:
    """To report it; a technique of one's own may have left something behind that fails elsewhere."""
    own = [use.technique.name for use in uses if use.technique.name in given()]
    if not own:
        return ": please report it, with the log."
    named = " or ".join(f"{name} ({given()[name]})" for name in own)
    return f", or in {named}: if it fails without that, too, please report it, with the log."


def _is_device_error(error: BaseException) -> bool:
    """Whether the device or one of its libraries failed."""
    kinds = tuple(
        kind for name in ("AcceleratorError",) if isinstance(kind := getattr(torch, name, None), type)
    )
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(text in text_of(error) for text in _DEVICE_ERRORS)
    )


def _memory_message(error: BaseException, status: RunStatus) -> str:
    advice = {
        Phase.SAMPLE: "Set run.sample_tokens=0, which a resumed run may do.",
        Phase.SAVE: "Set run.save_async=false, so that no copy of the state is made; a resumed run may do that.",
    }.get(status.phase) or _smaller_batch(status.recipe)
    on = f" on {status.machine.summary()}" if status.machine is not None else ""
    return f"out of memory at {status}{on}{fragmentation_hint(error)}. {advice}"


def _smaller_batch(recipe: Recipe | None) -> str:
    """Advice that reduces memory per step. A resumed run may change the micro batch if its loader counts samples."""
    halve = "Halve batch.micro (the total batch in tokens stays the same)"
    if recipe is None or recipe.auto or recipe.objective.kind != "lm":
        return f"{halve} in a new run, or shorten batch.sequence."
    if recipe.micro % 2:
        return "Take a smaller batch.micro, or shorten batch.sequence, in a new run."
    total = "" if recipe.batch.total_tokens else f" batch.total_tokens={recipe.step_tokens}"
    return f"{halve}, which a resumed run may do: batch.micro={recipe.micro // 2}{total}. Or shorten batch.sequence in a new run."


def _suspects_message(found: list[Suspect], *, compiler: bool = False) -> str:
    """Name the innermost technique and how to remove it; outer ones may only have passed the call on."""
    first, *others = found
    blamed = _suspected(found, compiler=compiler)
    under = "".join(f", under {one.technique.name}" for one in blamed[1:])
    further = ", ".join(one.technique.name for one in others if one not in blamed)
    beside = f" (further out: {further})" if further else ""
    fix = "fix it, or " if first.file else ""
    report = "" if first.file or compiler else " Please report it, with the log."
    return (
        f"The code of the technique {first.technique.name} ({first.place}) is on the stack{under}{beside}: {fix}take "
        f"{'it' if len(blamed) == 1 else 'one'} out with {' or '.join(map(_without, blamed))}.{report}"
    )


def _without(suspect: Suspect) -> str:
    """The override that removes a technique."""
    name = suspect.technique.name
    return f"layout.{name}=1" if name in AXES else f"techniques-={name}"


def _how_to_resume(status: RunStatus) -> str:
    folder = status.folder
    if folder is None:
        return ""
    if not (steps := folder.checkpoints.steps()):
        if folder.holds_run():
            return "No checkpoint had been saved yet: --resume starts at step 1, with the same techniques."
        return "Nothing had been trained yet."
    return (
        f"The last checkpoint ({folder.checkpoints.path(steps[-1]).name}) is intact: resume from it with "
        f"`{_resume_command(folder, status)}`, with the same techniques; without one of them start a new run."
    )


def _resume_command(folder: RunFolder, status: RunStatus) -> str:
    used = [name for name, _ in status.recipe.technique_uses()] if status.recipe is not None else []
    files = [str(file) for name, file in given().items() if name in used]
    many = ["--nproc", str(status.ranks.world)] if status.ranks.world > 1 else []
    line = ["rush", "train", "--out", str(folder.path), "--resume", *many]
    return shlex.join([*line, *(word for file in files for word in ("--technique", file))])


def _entry(error: BaseException, status: RunStatus, at: str, uses: list[Use], found: list[Suspect]) -> str:
    """The log entry of a failure: enough to debug it elsewhere."""
    rank = "" if status.ranks.alone else f" on rank {status.ranks.rank} of {status.ranks.world}"
    facts = {
        "at": f"{at}{rank}",
        "versions": f"rush {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        "machine": status.machine.summary() if status.machine is not None else "not probed yet",
        "recipe": status.recipe.digest if status.recipe is not None else "not read yet",
        "techniques": ", ".join(f"{use.technique.name} {dict(use.knobs) or ''}".strip() for use in uses)
        or "none",
        "on the stack": "; ".join(f"{one.technique.name} ({one.place})" for one in found) or "none of them",
    }
    header = "".join(f"{name}: {value}\n" for name, value in facts.items())
    recipe = f"\n{write_toml(status.recipe)}" if status.recipe is not None else ""
    trace = "".join(traceback.format_exception(error))
    return f"=== {time.strftime('%Y-%m-%d %H:%M:%S %z')} ===\n{header}\n{trace}{recipe}\n"
