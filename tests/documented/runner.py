"""Running one command: to its end, until it has begun, or until it has answered a request."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.documented.pages import Command

TYPED = "What is a list?\n"
"""What a person types into commands that ask; then the input ends."""
INTERRUPTED = 130
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Result:
    command: Command
    problem: str | None
    output: str
    seconds: float


def run(command: Command, folder: Path, variables: Mapping[str, str], limit_s: float = LIMIT_S) -> Result:
    began = time.monotonic()
    before = _progress(folder)
    log = folder / ".output"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command.to_run],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        assert process.stdin is not None
        try:
            if not (command.has("begin") or command.has("serve")):
                process.communicate(TYPED, timeout=limit_s)
                problem = f"exit code {process.returncode}" if process.returncode else None
            else:
                wait: Callable[[], bool] = lambda: _progress(folder) != before  # noqa: E731
                if command.has("serve"):
                    wait = lambda: _answers(log)  # noqa: E731
                problem = _until(process, wait, limit_s)
        except subprocess.TimeoutExpired:
            problem = f"it was not done after {limit_s:g} s"
        finally:
            process.stdin.close()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text("utf-8", "replace")
    if problem is None and "Traceback (most recent call last)" in text:
        problem = "it prints a traceback"
    return Result(command, problem, text, time.monotonic() - began)


def _until(process: subprocess.Popen[str], reached: Callable[[], bool], limit_s: float) -> str | None:
    """Wait for it, then Ctrl-C; a command that was stopped says so by its exit code."""
    deadline = time.monotonic() + limit_s
    while not reached():
        if process.poll() is not None:
            return (
                f"it ended with exit code {process.returncode} before it had begun"
                if process.returncode
                else None
            )
        if time.monotonic() > deadline:
            return f"it had not begun after {limit_s:g} s"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        return "it was still running 60 s after Ctrl-C"
    return None if code in (0, INTERRUPTED, -signal.SIGINT) else f"exit code {code} after Ctrl-C"


def _progress(folder: Path) -> int:
    """Steps, rungs and kernels on the disk: two of a run, or one of a ladder or a bench, count as begun."""
    steps = sum(len(path.read_bytes().splitlines()) // 2 for path in folder.glob("runs/**/metrics.jsonl"))
    rungs = sum(path.read_text().count('"tokens_per_s": {') for path in folder.glob("runs/**/ladder.json"))
    return steps + rungs + sum(len(list(folder.glob(f"runs/**/{one}/*.json"))) for one in ("trials", "ops"))


def _answers(log: Path) -> bool:
    found = re.search(r"http://127\.0\.0\.1:\d+/\S*", log.read_text("utf-8", "replace"))
    if found is None:
        return False
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(found[0], timeout=20) as answer:
        return bool(answer.status == 200 and b"<html" in answer.read())
