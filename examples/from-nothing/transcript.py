"""A conversation with `rush chat`, typed by a script: the transcript is what a person at a terminal sees.

    python examples/from-nothing/transcript.py chat.txt -- rush chat RUN --temperature 0

Each line of the file is typed once the prompt `you>` is there. A pseudo-terminal stands in for the person, because
`rush chat` prints neither prompt nor question when its input is a pipe.
"""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

PROMPT = b"you> "


def main() -> None:
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    command = sys.argv[3:] if sys.argv[2] == "--" else sys.argv[2:]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "dumb"  # no colors, no line editing
        os.execvp(command[0], command)
    seen = b""
    for line in [*lines, "/quit"]:
        while not seen.endswith(PROMPT):
            piece = more(terminal)
            if not piece:
                break
            seen += piece
        os.write(terminal, line.encode() + b"\n")
        seen += more(terminal)  # at least the echo, so that the prompt is not taken for the next one
    while piece := more(terminal):
        seen += piece
    _, status = os.waitpid(child, 0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", seen.decode("utf-8", "replace"))
    sys.stdout.write(text.replace("you> /quit\n", ""))
    sys.exit(os.waitstatus_to_exitcode(status))


def more(terminal: int) -> bytes:
    """What comes next; nothing at the end."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


if __name__ == "__main__":
    main()
