from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch

from rush.lab.trial.starter import COMMANDS, Starter
from tests.lives.living import Living
from tests.lives.small import write_data

LIBRARIES = ("bitsandbytes", "torchao")


QUICK = ("tests.lives.quick_compiler",)


@pytest.fixture(scope="session")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """Processes that have imported everything, for all lives of this worker; graphs are traced and interpreted."""
    yield from _living(tmp_path_factory, QUICK)


@pytest.fixture(scope="session")
def compiled_living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """The same with Inductor."""
    yield from _living(tmp_path_factory, ())


def _living(tmp_path_factory: pytest.TempPathFactory, preloaded: tuple[str, ...]) -> Iterator[Living]:
    folder = tmp_path_factory.mktemp("lives")
    # What one worker has prepared and measured the others find; graphs are found where torch keeps them for everybody.
    session = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    environment = {"RUSH_CACHE": str(session / "cache")}
    with suppress(OSError):  # another worker was first
        write_data(folder / "data").rename(session / "data")
    # Where there is a GPU they ask for it when they are imported, which a process that forks must not.
    libraries = [] if torch.cuda.is_available() else [name for name in LIBRARIES if find_spec(name)]
    plain = (*preloaded, *COMMANDS, *libraries)
    interpreted = ("tests.quick_interpreter", *plain)
    starters = Starter(plain, dismantle=False), Starter(interpreted, dismantle=False)
    yield Living(starters, folder, session / "data", environment)
    for starter in starters:
        starter.close()
