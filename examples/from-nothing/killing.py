"""Kill a training run in mid-step, as a power cut would, and keep what the cut takes away.

    python examples/from-nothing/killing.py --run RUN --at STEP --keep ROWS.jsonl -- rush train …

starts the command and sends SIGKILL to it and to its children once RUN/metrics.jsonl has row STEP. The rows after the
newest checkpoint, which a resumed run cuts away and writes again, are copied to ROWS.jsonl: what the resumed run writes
instead can be compared with them. A command that ends before STEP gives its exit code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--at", type=int, required=True, help="the step to kill after")
    parser.add_argument("--keep", type=Path, required=True, help="where the lost rows go")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    process = subprocess.Popen(command)
    while process.poll() is None:
        if last_step(options.run / "metrics.jsonl") >= options.at:
            children = psutil.Process(process.pid).children(recursive=True)
            for one in (process, *children):
                one.kill()
            process.wait()
            keep_lost(options.run, options.keep)
            return
        time.sleep(0.05)
    sys.exit(process.returncode or 1)


def last_step(metrics: Path) -> int:
    """The step of the last whole row; -1 where there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return -1
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].startswith(b"{") else -1


def keep_lost(run: Path, keep: Path) -> None:
    # A checkpoint's folder has its name only when it is whole.
    saved = max(
        (int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0
    )
    whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]  # the last row may be half written
    rows: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
    lost = [row for row in rows if row["step"] > saved]
    keep.parent.mkdir(parents=True, exist_ok=True)
    keep.write_text("".join(json.dumps(row) + "\n" for row in lost))
    sys.stdout.write(
        f"Killed after step {rows[-1]['step']}; the newest checkpoint is of step {saved}: {len(lost)} steps to repeat.\n"
    )


if __name__ == "__main__":
    main()
