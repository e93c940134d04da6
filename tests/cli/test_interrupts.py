"""Ctrl-C in the first seconds of a command, while it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.small_runs import ROOT, environment

SWALLOWS = """
    import time
    open("importing", "w").close()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            pass  # as C code and destructors do
"""
ENDLESS = """
    import time
    open("importing", "w").close()
    time.sleep(90)
"""
SCRIPT = """
    import signal, time
    from rush import interrupts
    {before}
    interrupts.defer_interrupts_in_imports()
    try:
        import imported
        print("imported", flush=True)
        time.sleep(90)
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted")
"""
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def _interrupted(folder: Path, imported: str, before: str = "") -> str:
    """What a script says that gets a Ctrl-C while it imports this module."""
    (folder / "imported.py").write_text(textwrap.dedent(imported))
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT.format(before=before)))
    surroundings = environment(folder / "cache") | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=folder, env=surroundings, stdout=subprocess.PIPE, text=True
    )
    _wait_for(process, (folder / "importing").exists)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=15)[0]


def _wait_for(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not reached() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)


def test_it_waits_until_the_import_is_done(tmp_path: Path) -> None:
    assert _interrupted(tmp_path, SWALLOWS) == "imported\ninterrupted\n"


def test_it_does_not_wait_for_an_import_that_does_not_end(tmp_path: Path) -> None:
    assert _interrupted(tmp_path, ENDLESS, "interrupts.LONGEST_S = 0.3") == "interrupted\n"


def test_what_ignores_ctrl_c_goes_on_ignoring_it(tmp_path: Path) -> None:
    waits_less = "sleep = time.sleep; time.sleep = lambda seconds: sleep(seconds / 100)"
    assert _interrupted(tmp_path, SWALLOWS, f"{IGNORED}; {waits_less}") == "imported\nnot interrupted\n"


@pytest.mark.parametrize(
    "library", ["libtorch_cpu", pytest.param("_multiarray_umath", marks=pytest.mark.slow)]
)
def test_a_command_that_is_importing_ends_with_130_and_says_so(library: str, tmp_path: Path) -> None:
    """Seen before: exit code 1 without a word, a bug report about a half imported numpy, and a ladder that just went on."""
    words = [sys.executable, "-m", "rush", "ladder", "tiny", "--out", str(tmp_path / "ladder")]
    process = subprocess.Popen(
        words, env=environment(tmp_path / "cache"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, text=True,
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        process.kill()
        pytest.skip("what a process has loaded is seen under /proc")
    _wait_for(process, lambda: library in maps.read_text())
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "Stopped; all processes have ended." in said or said.endswith("interrupted\n")
