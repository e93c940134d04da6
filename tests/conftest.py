"""What all tests share: where files, threads and kernels are; a browser; and a really small disk, to fill it up for real."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.report.browser import Browser, find_chromium

# Collecting tests, a traced graph or a profile make tens of thousands of objects of which none is garbage: look more rarely.
gc.set_threshold(20_000, 20, 50)
MEMORY_DISK, ROOM_BYTES = Path("/dev/shm"), 4 << 30
if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM_BYTES:
    # Temporary files live in memory: every checkpoint is forced to its disk, and a real one takes its time for that.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))
if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether it will be interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import tests.quick_interpreter  # noqa: F401
if find_spec("hypothesis"):  # which a GPU machine may lack
    from hypothesis import settings

    # On a busy machine any case may take long, whatever it does.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")
# Tests run side by side, on tensors that are small: threads would wait for each other, and compilers' helpers, which each
# process would start for itself, take longer to come up than what they compile. What tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Of the session (`tests/forks.py`), which its workers inherit; a socket's path must be short.
    os.environ["RUSH_TEST_FORKS"] = f"{tempfile.gettempdir()}/rush-tests-{os.getpid()}"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    # A shell that starts tests in the background has them ignore Ctrl-C, and they would hand that down to what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW_S = 1200
"""Limit of a slow test without one of its own: other tests on the same cores stretch it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_collection_finish() -> None:
    """What is there by now stays: without it, every full garbage collection of a test looks through a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What waits there ends when the session has (`tests/forks.py`)."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["RUSH_TEST_FORKS"], ignore_errors=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random data are the same in every run of a test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _give_back_card_memory() -> Iterator[None]:
    """Several workers share one card: what a test is done with must not stay in its worker's allocator."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all pages; each opens in a tab of its own."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on the PATH; on Debian: apt-get install chromium")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB; skipped where mounting is not allowed (process limits are tested anyway)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
