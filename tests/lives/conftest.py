from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rush import kernels
from rush.files import cache_folder
from tests.forks import shared_starter
from tests.fresh_cache import fresh_cache
from tests.lives.living import Living
from tests.lives.small import write_data

LIBRARIES = ("bitsandbytes", "torchao")
QUICK = ("tests.lives.quick_compiler",)
KERNELS = tuple(
    f"rush.kernels.{path.parent.name}.triton"
    for path in sorted(Path(kernels.__path__[0]).glob("*/triton.py"))
)
"""Each is imported by the first run that needs it, and takes its time: Triton reads the source of every kernel."""


@pytest.fixture(scope="session")
def living(
    tmp_path_factory: pytest.TempPathFactory, session_folder: Path, session_cache: str
) -> Iterator[Living]:
    """Processes that have imported everything, for all lives of this worker; graphs are traced and interpreted."""
    yield from _living(tmp_path_factory.mktemp("lives"), session_folder, session_cache, QUICK, shallow=True)


@pytest.fixture(scope="session")
def compiled_living(
    tmp_path_factory: pytest.TempPathFactory, session_folder: Path, session_cache: str
) -> Iterator[Living]:
    """The same with Inductor, and two layers for interpreted kernels too."""
    yield from _living(tmp_path_factory.mktemp("lives"), session_folder, session_cache, (), shallow=False)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one worker has put here the others find."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def session_cache(session_folder: Path) -> str:
    """For `RUSH_CACHE`: corpora are prepared anew; C++ kernels are found where everybody's are, named after their sources."""
    everybodys = cache_folder() / "extensions"
    everybodys.mkdir(parents=True, exist_ok=True)
    made = fresh_cache(session_folder / "cache")
    with suppress(FileExistsError):
        (made / "extensions").symlink_to(everybodys)
    return str(made)


def _living(
    folder: Path, session: Path, cache: str, preloaded: tuple[str, ...], *, shallow: bool
) -> Iterator[Living]:
    environment = {"RUSH_CACHE": cache}
    with suppress(OSError):  # another worker was first
        write_data(folder / "data").rename(session / "data")
    # Where there is a GPU they ask for it when they are imported, which a process that forks must not.
    libraries = [] if torch.cuda.is_available() else [name for name in LIBRARIES if find_spec(name)]
    plain = (*preloaded, *libraries)
    interpreted = ("tests.quick_interpreter", *plain, *KERNELS)
    starters = shared_starter(plain), shared_starter(interpreted)
    yield Living(starters, folder, session / "data", environment, shallow)
    for starter in starters:
        starter.close()
