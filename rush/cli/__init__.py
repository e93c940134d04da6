"""The command line. Each command is a thin call; one file each in this folder.

Errors that a user can fix end in one message and an exit code: 2 recipe or arguments, 3 data, 4 machine or environment,
5 the run diverged. Anything else is a bug: one message, the traceback in a log, and exit code 1. `--debug`, anywhere on the
line, shows the traceback.
"""

from __future__ import annotations

import errno
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer

from rush.cli import (
    bench,
    compare,
    data,
    evaluate,
    explain,
    export,
    generate,
    ladder,
    launch,
    merge,
    overfit,
    plan,
    probe,
    push,
    race,
    recipes,
    report,
    scale,
    start,
    train,
    tune,
    watch,
)
from rush.cli.output import print_error
from rush.cli.shutdown import (
    ExitStatus,
    Readers,
    exit_before_finalization,
    first_line,
    install_exception_hooks,
    log_unexpected,
)
from rush.errors import MachineError, Outage, RushError, readable
from rush.libraries import hush_matmul_fallback, silence_stderr
from rush.version import __version__

LONGEST_COMPLAINT = 600


class Commands(typer.core.TyperGroup):
    """All commands. Typer's error message about an option repeats the typed text: this class shortens a long one."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        with _shortened():
            return super().make_context(*given, **named)

    def invoke(self, *given: Any) -> Any:
        with _shortened():
            return super().invoke(*given)


@contextmanager
def _shortened() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(
            complaint := getattr(error, "message", None), str
        ):  # of typer, which does not export the class
            error.message = readable(complaint, LONGEST_COMPLAINT)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="rush",
    cls=Commands,
    help="Measure, prove, tune and train language models on the machine you have.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 2 recipe or arguments, 3 data, 4 machine, 5 the run diverged. "
    "Put --debug anywhere for a traceback.",
)
app.command("start")(start.start)
app.command("ladder")(ladder.ladder)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("race")(race.race)
app.command("scale")(scale.scale)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("probe")(probe.probe)
app.command("explain")(explain.explain)
app.command("watch")(watch.watch)
app.command("train")(train.train)
app.command("launch")(launch.launch)
app.command("overfit")(overfit.overfit)
app.command("evaluate")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("chat")(generate.chat)
app.command("export")(export.export)
app.command("merge")(merge.merge)
app.command("push")(push.push)
app.add_typer(bench.app, name="bench")
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@cache
def command() -> Callable[..., object]:
    """All commands with their options. Building it takes longer than some commands run."""
    tree = typer.main.get_command(app)
    _reflow(tree)
    return tree


def _reflow(command: Any) -> None:
    """Join the lines of a paragraph: the terminal wraps them at its own width."""
    command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or "")
    for inner in getattr(command, "commands", {}).values():
        _reflow(inner)


def _without_torch(error: BaseException) -> str | None:
    """The message where torch is not installed, which a package for several machines may leave to each of them."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"{sys.executable} has no torch. Install it ({sys.executable} -m pip install torch), or take the Python that has it."
    return None


def _of_own_file(error: BaseException) -> str | None:
    """The message for what the file of a `--technique` raises outside of a run, as in its `requires`."""
    from rush.techniques.api.own_files import MODULE_PREFIX

    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(MODULE_PREFIX)
    ]
    return (
        f"{first_line(error)}. {lines[-1]}, given by --technique, is on the stack: fix it." if lines else None
    )


def _of_this_machine(error: BaseException) -> str | None:
    """The message for an error of the operating system: memory, a file, a disk. None for errors that are bugs."""
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM):
        where = f" {error.filename}" if error.filename is not None else " a file"
        return f"Cannot read or write{where}: {error.strerror or error}. Give another path, or look at the system's limits."
    from rush.hardware.memory_use import out_of_memory

    if out_of_memory(error):
        return f"out of memory ({first_line(error)}). Take a smaller model, batch or file, or a machine with more memory."
    return None


def main(arguments: list[str] | None = None) -> None:
    """The entry point of `rush` and `python -m rush`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    readers = Readers() if arguments is None and not debug else None
    status = exit_before_finalization() if arguments is None else ExitStatus()
    try:
        hush_matmul_fallback()
        if arguments is None and not debug:
            install_exception_hooks()
        command()([word for word in words if word != "--debug"], prog_name="rush")
        status.code = 0
    except SystemExit as left:
        status.code = left.code if isinstance(left.code, int) else 1 if left.code else 0
        cause = left.__context__
        if isinstance(cause, typer.Exit) and isinstance(cause.__cause__, KeyboardInterrupt):
            typer.secho("interrupted", err=True)  # which Typer turns into a silent exit
        # Typer takes any broken pipe for its own output's, as in `rush … | head`, and exits silently.
        if readers is None or not isinstance(cause, BrokenPipeError) or readers.left():
            raise
        print_error(
            "a process started by this command ended too early; run the command again. "
            f"{log_unexpected(cause, f'rush {shlex.join(words)}')}"
        )
        status.code = MachineError.exit_code
        sys.exit(MachineError.exit_code)
    except RushError as error:
        if debug:
            raise
        print_error(str(error))
        if isinstance(error, Outage) and arguments is None:
            silence_stderr()
        status.code = error.exit_code
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.secho("interrupted", err=True)
        status.code = 130
        sys.exit(130)
    except BaseException as error:
        if debug:
            raise
        if (refusal := _without_torch(error) or _of_own_file(error) or _of_this_machine(error)) is not None:
            print_error(f"{refusal} {log_unexpected(error, f'rush {shlex.join(words)}')}")
            status.code = MachineError.exit_code
            sys.exit(MachineError.exit_code)
        print_error(
            f"{first_line(error)}. This looks like a bug in rush {__version__}: please report it, with the log. "
            f"{log_unexpected(error, f'rush {shlex.join(words)}')}"
        )
        sys.exit(1)
