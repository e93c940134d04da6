"""One sentence where a signal ends the run: a segmentation fault in a kernel, an abort in a C++ library.

No Python code of this process runs after such a signal. `faulthandler` writes the Python stacks to a file in memory. A shell
that has waited since the start prints the sentence and appends the stacks to the run's `failure.log`. It learns of the end
when its pipe closes. If no stacks were written, it says nothing: the run ended in another way.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_PHASE_BYTES = 128
_phase: mmap.mmap | None = None
_WATCHER = r"""
trap '' INT TERM HUP
cat >/dev/null
[ -s /proc/self/fd/3 ] || exit 0
stacks=$(cat /proc/self/fd/3)
phase=$(tr -d '\000' </proc/self/fd/4)
signal=$(printf '%s\n' "$stacks" | sed -n 's/^Fatal Python error: //p' | head -n 1)
place=$(printf '%s\n' "$stacks" | sed -n '/^Current thread/,$p' | sed -n 's/^  File "\([^"]*\)", line \([0-9]*\).*/\1:\2/p' | grep -F "$OWN" | head -n 1)
whose="No technique's code is on the stack."
[ -z "$place" ] || whose="The code of a technique ($place) is on the stack: fix it, or take the technique out."
printf '=== %s ===\nat: %s\n\n%s\n\n' "$(date '+%Y-%m-%d %H:%M:%S %z')" "$phase" "$stacks" >>"$LOG" 2>/dev/null && where="The full log is $LOG. " || where=
printf 'error: %s failed: a signal ended the process (%s). %s %s%s\n' "$phase" "${signal:-unknown}" "$whose" "$where" "$ADVICE" >&2
"""


def set_phase(phase: str) -> None:
    """Report what the run does now."""
    if _phase is not None:
        _phase[:] = phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")


def watch_for_crashes(log: Path, advice: str, own_files: Sequence[Path]) -> None:
    """Start the shell. It needs Linux; elsewhere the system's own words have to do.

    `own_files` are techniques that were given by file: their code may be on the stack, too.
    """
    global _phase
    shell = shutil.which("sh")
    if sys.platform != "linux" or shell is None or _phase is not None:
        return
    stacks, phase = os.memfd_create("stacks"), os.memfd_create("phase")
    os.truncate(phase, _PHASE_BYTES)
    _phase = mmap.mmap(phase, _PHASE_BYTES)
    set_phase("the build")
    until_closed, kept = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    own = "\n".join(["/rush/techniques/", "/rush/kernels/", *(str(file.absolute()) for file in own_files)])
    streams = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in ((0, until_closed), (1, null), (3, stacks), (4, phase))]  # fmt: skip
    os.posix_spawn(
        shell,
        [shell, "-c", _WATCHER],
        {**os.environ, "LOG": str(log), "ADVICE": advice, "OWN": own},
        file_actions=streams,
    )
    for descriptor in (until_closed, null):
        os.close(descriptor)
    os.register_at_fork(after_in_child=lambda: os.close(kept))  # a worker may outlive this process
    faulthandler.enable(stacks)
