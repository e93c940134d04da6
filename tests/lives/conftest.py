from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rush.lab.starter import COMMANDS, Starter
from tests.lives.living import Living
from tests.lives.small import write_data


@pytest.fixture(scope="session")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """One process that has imported everything, for all lives of this worker."""
    folder = tmp_path_factory.mktemp("lives")
    # What one worker has compiled the others find.
    session = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    environment = {
        "RUSH_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(session / "compiled"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    starter = Starter(COMMANDS, dismantle=False)
    yield Living(starter, folder, write_data(folder / "data"), environment)
    starter.close()
