"""`rush` in forks of a process that has imported everything, for tests that start it many times: each is a real process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.forks import Process
from tests.parallel.rank_work import PRELOADED
from tests.training.small_runs import ROOT


class ForkedRush:
    """A command that is running: what `subprocess.Popen` tells of one, and does to it."""

    def __init__(self, *words: str | Path, cache: Path) -> None:
        self._process = Process(_be_rush, [str(word) for word in words], str(cache), preloaded=PRELOADED)

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _be_rush(words: list[str], cache: str) -> None:
    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.environ["RUSH_CACHE"] = cache
    os.chdir(ROOT)
    from rush.cli import main

    main(words)
