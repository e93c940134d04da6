"""What to tell when a run breaks off: where it was, whose code stands on the stack, what to do, where the log lies.

A run is always at something (`RunStatus`). Whatever is raised that is no message for people yet becomes one here: the
traceback goes to `failure.log` in the run's folder, and one sentence after another says what failed, which technique to
take out, and how the run goes on from its last checkpoint, which a failure never touches. An error for which nobody but this
package can be blamed asks to be reported.
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

from rush.errors import Outage, OwnFault, RunFailed, RushError
from rush.files import append_log
from rush.hardware import Machine, in_gaps, out_of_memory
from rush.parallel import AXES, Ranks, started_rank
from rush.parallel.store_channel import FROM_RANK_0
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.run_folder import RunFolder
from rush.techniques import Use, resolve_uses
from rush.techniques.api.own_files import given
from rush.techniques.api.stacks import Suspect, chain, compiler_failed, suspects
from rush.version import __version__

LONGEST = 300
"""Characters of an error's own words in a message; the log has all of them."""
_DEVICE = (
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
    """What a run can be at."""

    BUILD = "the build"
    STEP = "step {step}"
    COPIES = "the comparison of copies after step {step}"
    RECORD = "the record of step {step}"
    VALIDATION = "the validation after step {step}"
    SAMPLE = "the sample after step {step}"
    SAVE = "the checkpoint of step {step}"
    END = "the end, after step {step}"
    ONE_BATCH = "the training on one batch"


@dataclass
class RunStatus:
    """What a run is at now, for the watch over its ranks, and for the message if it fails there."""

    folder: RunFolder | None
    """None where nothing is kept."""
    recipe: Recipe | None = None
    machine: Machine | None = None
    ranks: Ranks = field(default_factory=Ranks)
    phase: Phase = Phase.BUILD
    step: int = 0

    def at(self, phase: Phase, step: int) -> None:
        self.phase, self.step = phase, step
        self.ranks.set_phase(str(self))

    def __str__(self) -> str:
        return self.phase.value.format(step=self.step)

    def uses(self) -> list[Use]:
        """The techniques that are on."""
        with suppress(RushError):
            return resolve_uses(self.recipe) if self.recipe is not None else []
        return []


@contextmanager
def explained(doing: RunStatus) -> Iterator[None]:
    """Make a message of whatever is raised in the block and is none yet."""
    try:
        yield
    except RushError:
        raise
    except (Exception, SystemExit) as error:
        if doing.ranks.watchdog is not None:
            doing.ranks.watchdog.claim_report()
        raise explain(error, doing) from error


def explain(error: BaseException, doing: RunStatus) -> RushError:
    """The message for a run that broke off with this error, once the log is written."""
    uses = doing.uses()
    found, where = _look_into(error, doing, str(doing), uses)
    kind, says = _diagnosis(error, doing, uses, found)
    failed = kind(f"{says} {where} {_how_to_go_on(doing)}".rstrip())
    if FROM_RANK_0 in getattr(error, "__notes__", ()):
        failed.add_note(FROM_RANK_0)
    return failed


def report_late(doing: RunStatus, uses: list[Use], error: BaseException, at: str) -> None:
    """Say in one sentence what was raised where nobody could catch it (a callback at exit, a thread); of ranks, the first."""
    found, where = _look_into(error, doing, at, uses)
    whose = f" {_say_suspects(found)}" if found else ""
    if started_rank() == 0:
        says = f"{words(error)} was raised {at}; the run and its files are not touched by it.{whose} {where}"
        print(f"rush: {says}", file=sys.stderr, flush=True)  # noqa: T201


def _look_into(error: BaseException, doing: RunStatus, at: str, uses: list[Use]) -> tuple[list[Suspect], str]:
    """Whose code stands on the stack, and where the log of it lies, in words."""
    try:
        found, trouble = suspects(error, uses), ""
    except Exception:  # the first error is the one to tell of
        found, trouble = [], f"\nWhose code it is was not found out:\n{traceback.format_exc()}"
    places = [doing.folder.failures] if doing.folder is not None else []
    places.append(Path(tempfile.gettempdir()) / "rush-failure.log")
    log = append_log(_entry(error, doing, at, uses, found) + trouble, *places)
    return (
        found,
        f"The full log is {log}." if log else "No log could be written; --debug shows the traceback.",
    )


def words(error: BaseException) -> str:
    """An error in one line: its kind and its first line, and those of what it came from, where that says something else."""
    first, *others = (_line(one) for one in chain(error))
    root = others[-1] if others else first
    return first if root == first else f"{first} (from {root})"


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A compiler's first line is a heading.
    lines[1:] = [line for line in lines if line.startswith("Explanation: ")]
    shown = f"{type(error).__name__}: {'. '.join(lines)}" if lines else type(error).__name__
    return (shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…").rstrip(".:")


def _diagnosis(
    error: BaseException, doing: RunStatus, uses: list[Use], found: list[Suspect]
) -> tuple[type[RushError], str]:
    """The kind of failure, and what failed and what to do, in words."""
    memory = next((one for one in chain(error) if out_of_memory(one)), None)
    if memory is not None:
        return RunFailed, _say_memory(memory, doing)
    failed = f"{doing} failed with {words(error)}."
    on_device = any(_of_device(one) for one in chain(error))
    of_system = any(isinstance(one, OSError) for one in chain(error))
    hint = " A device tells of errors late: CUDA_LAUNCH_BLOCKING=1 shows the true place." if on_device else ""
    if found:
        kind = Outage if on_device else RunFailed
        return kind, f"{failed} {_say_suspects(found, compiler=compiler_failed(error))}{hint}"
    names = ", ".join(use.technique.name for use in uses)
    nobody = f"No technique's code stands on the stack; on are: {names}." if uses else "No technique is on."
    if on_device or of_system:
        return Outage, f"{failed} {nobody}{hint}"
    if compiler_failed(error):
        return RunFailed, f"{failed} {nobody}"
    return (
        OwnFault,
        f"{failed} {nobody} This looks like a mistake in rush {__version__}: please report it, with the log.",
    )


def _of_device(error: BaseException) -> bool:
    """Whether the device or its libraries failed."""
    kinds = tuple(
        kind for name in ("AcceleratorError",) if isinstance(kind := getattr(torch, name, None), type)
    )
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE)
    )


def _say_memory(error: BaseException, doing: RunStatus) -> str:
    advice = {
        Phase.SAMPLE: "Set run.sample_tokens=0, which a resumed run may do.",
        Phase.SAVE: "Set run.save_async=false, so that no copy of the state is made; a resumed run may do that.",
    }.get(
        doing.phase,
        "Halve batch.micro (the total batch in tokens stays as it is), or shorten batch.sequence.",
    )
    on = f" on {doing.machine.summary()}" if doing.machine is not None else ""
    return f"out of memory at {doing}{on}{in_gaps(error)}. {advice}"


def _say_suspects(found: list[Suspect], *, compiler: bool = False) -> str:
    """Name the innermost, and what to do about it; techniques further out may only have passed the call on."""
    first, *others = found
    blamed = [first, *(other for other in others if compiler and other.compiles)]
    under = "".join(f", under {one.technique.name}" for one in blamed[1:])
    further = ", ".join(one.technique.name for one in others if one not in blamed)
    beside = f" (further out: {further})" if further else ""
    mend = "mend it, or " if first.file else ""
    report = "" if first.file or compiler else " Please report it, with the log."
    return (
        f"The code of the technique {first.technique.name} ({first.place}) stands on the stack{under}{beside}: {mend}take "
        f"{'it' if len(blamed) == 1 else 'one'} out with {' or '.join(map(_without, blamed))}.{report}"
    )


def _without(suspect: Suspect) -> str:
    """The override that takes a technique out."""
    name = suspect.technique.name
    return f"layout.{name}=1" if name in AXES else f"techniques-={name}"


def _how_to_go_on(doing: RunStatus) -> str:
    folder = doing.folder
    if folder is None:
        return ""
    if not (steps := folder.checkpoints.steps()):
        if folder.holds_run():
            return "No checkpoint had been saved yet: --resume begins with step 1, with the same techniques."
        return "Nothing had been trained yet."
    return (
        f"The last checkpoint ({folder.checkpoints.path(steps[-1]).name}) is intact: go on from it with "
        f"`{_resume_command(folder, doing)}`, with the same techniques; without one of them start a new run."
    )


def _resume_command(folder: RunFolder, doing: RunStatus) -> str:
    used = [name for name, _ in doing.recipe.technique_uses()] if doing.recipe is not None else []
    files = [str(file) for name, file in given().items() if name in used]
    many = ["--nproc", str(doing.ranks.world)] if doing.ranks.world > 1 else []
    line = ["rush", "train", "--out", str(folder.path), "--resume", *many]
    return shlex.join([*line, *(word for file in files for word in ("--technique", file))])


def _entry(error: BaseException, doing: RunStatus, at: str, uses: list[Use], found: list[Suspect]) -> str:
    """What is written down about a failure: enough to look into it elsewhere."""
    rank = "" if doing.ranks.alone else f" on rank {doing.ranks.rank} of {doing.ranks.world}"
    facts = {
        "at": f"{at}{rank}",
        "versions": f"rush {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        "machine": doing.machine.summary() if doing.machine is not None else "not probed yet",
        "recipe": doing.recipe.digest if doing.recipe is not None else "not read yet",
        "techniques": ", ".join(f"{use.technique.name} {dict(use.knobs) or ''}".strip() for use in uses)
        or "none",
        "on the stack": "; ".join(f"{one.technique.name} ({one.place})" for one in found) or "none of them",
    }
    told = "".join(f"{name}: {value}\n" for name, value in facts.items())
    recipe = f"\n{write_toml(doing.recipe)}" if doing.recipe is not None else ""
    trace = "".join(traceback.format_exception(error))
    return f"=== {time.strftime('%Y-%m-%d %H:%M:%S %z')} ===\n{told}\n{trace}{recipe}\n"
