"""`python -m tests.documented PAGE …`: run the commands of pages and show how each ended."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from tests.documented.environment import make_environment
from tests.documented.pages import commands
from tests.documented.runner import run
from tests.documented.scene import make_models, set_scene

if __name__ == "__main__":
    # In the background of a shell Ctrl-C is ignored, also by what is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp())
    variables = make_environment(folder)
    make_models(folder, variables)
    kind = "gpu" if "--gpu" in sys.argv else ""
    only = [word.removeprefix("--only=") for word in sys.argv if word.startswith("--only=")]
    for number, name in enumerate(word for word in sys.argv[1:] if not word.startswith("--")):
        there = folder / f"page-{number}"
        there.mkdir()
        shown = commands(Path(name).resolve())
        chosen = [one for one in shown if not one.has("not") and one.has("gpu") == bool(kind)]
        set_scene(there, folder, chosen)
        for command in chosen:
            if only and not any(word in command.line for word in only):
                continue
            result = run(command, there, variables)
            end = "" if result.problem is None else "\n" + result.output[-1500:]
            sys.stdout.write(
                f"{name} {result.seconds:6.1f} s  {result.problem or 'ok'}: {command.to_run}{end}\n"
            )
            sys.stdout.flush()
