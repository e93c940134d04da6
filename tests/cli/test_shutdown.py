"""A command that meets an unexpected error: one message and a log, its own exit code, and never an abort."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rush.errors import MachineError
from tests.training.small_runs import ROOT, environment


def command(
    code: str, folder: Path, *words: str, stdout: int = subprocess.PIPE, **more: str
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with one more command, which does what `code` says."""
    script = folder / "script.py"
    head = "import atexit, ctypes, os, subprocess, sys, threading, time\nimport typer\nfrom rush.cli import app, main\nfrom rush.errors import *\n"
    body = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    script.write_text(f"{head}\n\n@app.command('planted')\ndef planted() -> None:\n{body}\n\n\nmain()\n")
    return subprocess.run(
        [sys.executable, script, "planted", *words],
        check=False,
        cwd=ROOT,
        env=environment(folder / "cache") | more,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


def test_an_unexpected_error_is_one_sentence_and_a_log(tmp_path: Path) -> None:
    done = command("print('begun'); raise ZeroDivisionError('by nothing\\nin detail')", tmp_path)
    assert done.returncode == 1
    assert done.stdout == "begun\n"
    log = tmp_path / "cache" / "failure.log"
    assert done.stderr.startswith("error: ZeroDivisionError: by nothing. This looks like a bug in rush")
    assert done.stderr.endswith(f"please report it, with the log. The full log is {log}.\n")
    assert done.stderr.count("\n") == 1
    assert "Traceback" in log.read_text()
    assert "in detail" in log.read_text()
    assert "at: rush planted" in log.read_text()


def test_debug_shows_its_traceback_and_writes_nothing(tmp_path: Path) -> None:
    done = command("raise ZeroDivisionError('by nothing')", tmp_path, "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert not (tmp_path / "cache" / "failure.log").exists()


@pytest.mark.slow
def test_where_the_cache_cannot_be_written_the_log_is_among_temporary_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a file where a folder should be")
    done = command(
        "raise ZeroDivisionError('by nothing')", tmp_path, TMPDIR=str(tmp_path), RUSH_CACHE=str(file)
    )
    assert f"The full log is {tmp_path / 'rush-failure.log'}." in done.stderr
    assert (tmp_path / "rush-failure.log").is_file()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(None)", 0),
        ("raise typer.Exit(5)", 5),
        ("raise DataError('none.')", 3),
    ],
)
def test_every_other_end_has_the_code_it_had_before(code: str, expected: int, tmp_path: Path) -> None:
    done = command(code, tmp_path)
    assert done.returncode == expected, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache" / "failure.log").exists()


def test_an_interrupted_command_says_so(tmp_path: Path) -> None:
    done = command("raise KeyboardInterrupt", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_command_that_said_what_it_left_says_no_more(tmp_path: Path) -> None:
    left = """
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    """
    done = command(left, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_broken_pipe_to_a_process_of_its_own_is_one_sentence_and_a_log(tmp_path: Path) -> None:
    """It went unnoticed: exit code 1 and not a word."""
    done = command(
        """
        child = subprocess.Popen(["true"], stdin=subprocess.PIPE, bufsize=0)
        child.wait()
        child.stdin.write(b"work")
        """,
        tmp_path,
    )
    log = tmp_path / "cache" / "failure.log"
    assert done.returncode == MachineError.exit_code
    assert done.stderr == (
        "error: a process started by this command ended too early; run the command again. "
        f"The full log is {log}.\n"
    )
    assert "BrokenPipeError" in log.read_text()


WRITES = {"print": "print('a word\\n' * 99_999)", "rich": "import rich; rich.print('a word\\n' * 9_999)"}


@pytest.mark.parametrize("how", WRITES)
def test_who_stops_reading_its_output_hears_no_more_of_it(how: str, tmp_path: Path) -> None:
    """As in `rush … | head`."""
    read, write = os.pipe()
    os.close(read)
    done = command(WRITES[how], tmp_path, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
    assert not (tmp_path / "cache" / "failure.log").exists()


def test_a_ctrl_c_during_a_destructor_is_not_lost(tmp_path: Path) -> None:
    done = command(
        """
        class Held:
            def __del__(self) -> None:
                raise KeyboardInterrupt

        Held()
        time.sleep(90)
        print("not interrupted")
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


ABORTS = {
    "a destructor of C++": """
        library = ctypes.CDLL(None)
        library.__cxa_atexit(library.abort, None, None)
        print("done")
        """,
    "a thread inside C++": """
        import torch

        def work() -> None:
            x = torch.ones(64, 64)
            while True:
                torch.mm(x, x)

        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
        print("done")
        """,
}


@pytest.mark.parametrize(
    "kind", ["a destructor of C++", pytest.param("a thread inside C++", marks=pytest.mark.slow)]
)
def test_nothing_aborts_a_command_that_has_done_its_work(kind: str, tmp_path: Path) -> None:
    done = command(ABORTS[kind], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_exit_callbacks_and_threads_are_waited_for_and_their_errors_reported(tmp_path: Path) -> None:
    done = command(
        """
        from concurrent.futures import ThreadPoolExecutor

        def later() -> None:
            time.sleep(0.3)
            print("the thread is done")

        def fail() -> None:
            raise ValueError("in a thread")

        ThreadPoolExecutor(1).submit(time.sleep, 0)  # idle; ends only when it is told to
        threading.Thread(target=later).start()
        threading.Thread(target=fail, name="planted").start()
        atexit.register(print, "the callback is done")
        atexit.register(lambda: 1 / 0)
        raise MachineError("no.")
        """,
        tmp_path,
    )
    assert done.returncode == 4
    assert done.stdout == "the thread is done\nthe callback is done\n"
    assert "Traceback" not in done.stderr
    said = sorted(done.stderr.splitlines())
    log = tmp_path / "cache" / "failure.log"
    assert said == [
        "error: no.",
        f"rush: ValueError: in a thread in the thread planted. The full log is {log}.",
        f"rush: ZeroDivisionError: division by zero at exit, after the work was done. The full log is {log}.",
    ]
    assert log.read_text().count("Traceback") == 2


def test_a_fork_of_the_command_has_an_end_of_its_own(tmp_path: Path) -> None:
    done = command(
        """
        child = os.fork()
        if child == 0:
            sys.exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "9\n")
