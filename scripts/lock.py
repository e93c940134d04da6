"""The lock: every dependency of every extra, pinned for every platform the project claims.

Two files, because two versions of torch are in use. `locks/cuda.txt` holds the pair that was proven on a GPU;
`locks/cpu.txt` holds the CPU builds of torch, and macOS. Each is one universal resolution (uv), so a pin that
differs between Pythons or systems carries a marker, and pip reads the file as it is.

    python scripts/lock.py            resolve anew; a pin that still holds is kept (--upgrade: take the newest)
    python scripts/lock.py check      resolve every platform again, through the lock, and print what each gets

The check asks the package index only for what uv has not seen yet. Where the index cannot be reached it fails
(exit 4), unless OFFLINE=1 is declared: then it only compares the locks with pyproject.toml, and says so.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
PYTHONS = ("3.11", "3.12", "3.13")
INSTALLS = ("runtime", "dev")


@dataclass(frozen=True)
class Lock:
    name: str
    pins: tuple[str, ...]  # what is decided by hand; the rest is what the resolver finds around it
    why: str


CUDA = Lock(
    "cuda",
    # torch 2.11.0 itself demands triton==3.6.0, whose interpreter turns one-element arrays into numbers in a way
    # that NumPy refuses from 2.4 on.
    pins=("torch==2.11.0", "numpy<2.4"),
    why="Linux with PyPI's CUDA builds. torch 2.11.0 with Triton 3.6.0 is what every figure and every green\n"
    "# `make test-gpu` was made with: it moves on only with a green `make test-gpu`.",
)
CPU = Lock(
    "cpu",
    # A CPU build demands no Triton; ours run in its interpreter, in the version that PyPI's torch 2.13.0 demands.
    pins=("torch==2.13.0", "triton==3.7.1"),
    why="Linux with CPU builds of torch, and macOS 14 or newer. (torch==2.13.0 admits 2.13.0+cpu.)",
)

# What the CPU builds of torch require: PyPI's list without CUDA and Triton. The index that holds them
# (download.pytorch.org/whl/cpu) need not be reachable to resolve for them.
CPU_BUILD_REQUIRES = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)


@dataclass(frozen=True)
class Platform:
    name: str
    target: str  # what uv calls it
    lock: Lock
    cpu_build: bool  # torch from PyTorch's CPU index rather than from PyPI


PLATFORMS = (
    Platform("Linux x86-64, CUDA", "x86_64-manylinux_2_28", CUDA, cpu_build=False),
    Platform("Linux aarch64, CUDA", "aarch64-manylinux_2_28", CUDA, cpu_build=False),
    Platform("Linux x86-64, CPU", "x86_64-manylinux_2_28", CPU, cpu_build=True),
    Platform("Linux aarch64, CPU", "aarch64-manylinux_2_28", CPU, cpu_build=True),
    Platform("macOS 14 arm64", "aarch64-apple-darwin", CPU, cpu_build=False),
)


@dataclass(frozen=True, eq=False)
class Resolution:
    platform: Platform
    python: str
    install: str
    versions: dict[str, str]  # empty where there is no solution
    reason: str  # the resolver's words, where there is none

    @property
    def row(self) -> str:
        head = f"{self.platform.name:<20} {self.python:<6} {self.install:<8}"
        if not self.versions:
            return f"{head} NO SOLUTION"
        torch, triton = self.versions["torch"], self.versions.get("triton", "none")
        return f"{head} torch {torch:<8} triton {triton:<6} {len(self.versions):>4} packages"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("write", "check"), default="write")
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions instead of keeping pins"
    )
    arguments = parser.parse_args()
    if arguments.command == "check":
        return check(offline=os.environ.get("OFFLINE", "") not in ("", "0"))
    if not index_answers():
        return _unreachable("no lock was written")
    for lock in (CUDA, CPU):
        write(lock, arguments.upgrade)
    return check(offline=False)


def write(lock: Lock, upgrade: bool) -> None:
    path = LOCKS / f"{lock.name}.txt"
    command = ["pyproject.toml", "--all-extras", "--universal", "--python-version", PYTHONS[0]]
    # What builds the project is installed by pip as well, so it is pinned as well.
    build = [*_project()["build-system"]["requires"], "editables"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pins").write_text("\n".join(lock.pins))
        (Path(folder) / "build.in").write_text("\n".join(build))
        # uv keeps the pins of the file it writes to, as far as they hold.
        kept = Path(folder) / "lock.txt"
        if path.exists() and not upgrade:
            shutil.copy(path, kept)
        done = _compile(
            [*command, f"{folder}/build.in", "-c", f"{folder}/pins", "-o", str(kept)],
            lock is CPU,
            offline=False,
        )
        if done.returncode != 0:
            sys.exit(f"locks/{lock.name}.txt: {done.stderr.strip()}")
        pins = kept.read_text()
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"# {lock.why}\n# Every dependency of every extra. Written by `make lock`; every install goes through it.\n"
        f"# pyproject: {digest(lock)}\n{pins}"
    )


def check(offline: bool) -> int:
    stale = [lock.name for lock in (CUDA, CPU) if f"# pyproject: {digest(lock)}\n" not in _text(lock)]
    if stale:
        names = " and ".join(f"locks/{name}.txt" for name in stale)
        print(f"{names} were made from other requirements than pyproject.toml has now. Run: make lock")
        return 2
    if offline:
        print("OFFLINE=1: the locks belong to pyproject.toml; no platform was resolved again.")
        return 0
    found = resolve_all()
    if any(not item.versions for item in found) and not index_answers():
        return _unreachable("the platforms were not resolved again (OFFLINE=1 leaves that out)")
    for item in found:
        print(item.row)
    failed = [item for item in found if not item.versions]
    for item in failed:
        print(f"\n{item.platform.name}, Python {item.python}, {item.install}:\n{item.reason}")
    if failed:
        print(
            f"\n{len(failed)} of {len(found)} installations have no solution. Fix pyproject.toml, or run: make lock"
        )
    return 2 if failed else 0


def resolve_all() -> list[Resolution]:
    """First from what uv has seen before: a version's files never change. The index is asked for the rest alone."""
    wanted = list(itertools.product(PLATFORMS, PYTHONS, INSTALLS))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: resolve(*one, offline=True), wanted))
        if all(item.versions for item in found) or not index_answers():
            return found
        return list(pool.map(lambda one, seen: seen if seen.versions else resolve(*one), wanted, found))


def resolve(platform: Platform, python: str, install: str, offline: bool = False) -> Resolution:
    """What pip would install there. Wheels only: nobody should need a compiler to set up."""
    extra = [] if install == "runtime" else ["--extra", install]
    command = ["pyproject.toml", *extra, "--no-build", "-c", str(LOCKS / f"{platform.lock.name}.txt")]
    command += ["--python-platform", platform.target, "--python-version", python]
    done = _compile(command, platform.cpu_build, offline)
    if done.returncode != 0:
        return Resolution(platform, python, install, {}, done.stderr.strip())
    versions = dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", done.stdout, re.MULTILINE))
    return Resolution(platform, python, install, versions, "")


def digest(lock: Lock) -> str:
    """What a lock is made from: the requirements in pyproject.toml and the pins above."""
    project = _project()
    said = [project["build-system"]["requires"], project["project"]["requires-python"], lock.pins]
    said += [project["project"]["dependencies"], project["project"]["optional-dependencies"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def index_url() -> str:
    named = (os.environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"))
    return next((url for url in named if url), "https://pypi.org/simple").rstrip("/")


def index_answers() -> bool:
    try:
        urllib.request.urlopen(f"{index_url()}/uv/", timeout=20).close()
    except (urllib.error.URLError, TimeoutError):
        return False
    return True


def _compile(command: list[str], cpu_build: bool, offline: bool) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("The lock needs uv, which the extra `dev` brings: make check, make lock, or pip install uv")
    # Mirrors of the index often forbid caching, and then every resolution would load a hundred pages again.
    settings = f'[[index]]\nurl = "{index_url()}"\ndefault = true\n'
    settings += 'cache-control = { api = "max-age=3600", files = "max-age=365000000, immutable" }\n'
    if cpu_build:
        version = next(pin for pin in CPU.pins if pin.startswith("torch==")).removeprefix("torch==")
        settings += f'[[dependency-metadata]]\nname = "torch"\nversion = "{version}"\n'
        settings += f"requires-dist = {json.dumps(CPU_BUILD_REQUIRES)}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(settings)
        file.flush()
        return subprocess.run(
            [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--config-file", file.name]
            + (["--offline"] if offline else [])
            + command,
            cwd=ROOT,
            env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
            capture_output=True,
            text=True,
            check=False,
        )


def _unreachable(so: str) -> int:
    print(f"The package index {index_url()} cannot be reached: {so}.")
    return 4


def _project() -> dict[str, dict]:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _text(lock: Lock) -> str:
    path = LOCKS / f"{lock.name}.txt"
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
