"""One run per folder, proved with real second processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rush.errors import MachineError
from rush.records.lock import FolderLock

HOLDER = """
import os, sys, time
from pathlib import Path
from rush.records.lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
child = os.fork() if sys.argv[2] == "with-child" else 0
if not child:  # a child speaks once it is fully born
    print(f"held {os.getpid()}", flush=True)
time.sleep(60)
"""


def start_holder(folder: Path, kind: str = "alone") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def wait_until_held(process: subprocess.Popen[str]) -> int:
    """The id of the holder's child (or of itself), once the lock is held."""
    assert process.stdout is not None
    word, number = process.stdout.readline().split()
    assert word == "held"
    return int(number)


def test_a_second_process_is_refused_with_the_holders_pid_until_the_holder_is_killed(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        assert wait_until_held(holder) == holder.pid
        with pytest.raises(MachineError, match=f"process {holder.pid} on") as caught:
            FolderLock(tmp_path)
        assert str(tmp_path) in str(caught.value)
    finally:
        stop(holder)
    FolderLock(tmp_path).release()


def test_a_forked_child_that_outlives_the_killed_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, "with-child")
    child = wait_until_held(holder)
    try:
        with pytest.raises(MachineError):
            FolderLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        stop(holder)


def test_a_forked_child_does_not_release_the_parents_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(MachineError, match=f"process {os.getpid()}"):
            FolderLock(tmp_path)


def test_the_lock_can_be_taken_again_after_release_and_releasing_twice_is_harmless(tmp_path: Path) -> None:
    for _ in range(3):
        lock = FolderLock(tmp_path)
        lock.release()
        lock.release()


def test_of_many_processes_at_once_exactly_one_gets_in(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom rush.errors import MachineError\n"
        "from rush.records.lock import FolderLock\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "try: lock = FolderLock(Path(sys.argv[1]))\n"
        "except MachineError: sys.exit(4)\n"
        "time.sleep(2)"
    )
    start = str(time.time() + 1.5)
    crowd = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), start]) for _ in range(4)]
    assert sorted(process.wait() for process in crowd) == [0, 4, 4, 4]


def test_a_holder_that_left_no_readable_name_is_still_respected(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        lock.path.write_text("")
        with pytest.raises(MachineError, match="another process"):
            FolderLock(tmp_path)


def test_a_folder_that_is_not_there_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="Cannot write"):
        FolderLock(tmp_path / "nowhere")
