"""Stands for the process that measures kernels: says what it does, and dies, hangs or raises in the op of that name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

spec = json.loads(Path(sys.argv[1]).read_text())
folder = Path(spec["folder"])
machine = {"device": "cpu", "devices": [{"name": "made up"}]}
(folder / "machine.json").write_text(json.dumps({"machine": machine, "ceilings": None, "packages": {}}))


def say(**words: object) -> None:
    print(f"@bench {json.dumps(words)}", flush=True)  # noqa: T201


print("a library's greeting on standard output", flush=True)  # noqa: T201
for name in spec["ops"]:
    say(op=name, doing="starting")
    if name == "gelu":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "rope":
        time.sleep(60)
    if name == "swiglu":
        sys.stderr.write("RuntimeError: the device is lost\n")
        sys.exit(1)
    op = {"op": name, "status": "ok", "reason": None, "complete": True, "rows": [], "targets": []}
    (folder / "ops" / f"{name}.json").write_text(json.dumps(op))
    say(op=name, done=True)
