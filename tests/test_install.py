"""The lock and the set-up: every platform resolves, what is written down is what is locked, torch is left alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


lock = script("lock")
install = script("install")


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", (ROOT / "locks" / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["cuda.txt", "cpu.txt"])
def test_every_requirement_of_every_extra_is_pinned_within_its_range(name: str) -> None:
    project = lock._project()["project"]
    locked = pins(name)
    for line in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        wanted = Requirement(line)
        if wanted.name != project["name"]:
            assert wanted.specifier.contains(locked[wanted.name.lower()], prereleases=True), line


def test_a_gpu_user_gets_the_pair_that_was_proven_on_a_gpu() -> None:
    assert (pins("cuda.txt")["torch"], pins("cuda.txt")["triton"]) == ("2.11.0", "3.6.0")
    assert "nvidia-cublas" in pins("cuda.txt")
    assert not [name for name in pins("cpu.txt") if name.startswith(("nvidia-c", "cuda-"))]


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_the_tables_of_platforms_show_what_is_locked(page: str) -> None:
    table = (ROOT / page).read_text().split("<!-- platforms: begin")[1].split("<!-- platforms: end")[0]
    for platform in lock.PLATFORMS:
        rows = [line for line in table.splitlines() if line.startswith(f"| {platform.name} ")]
        assert len(rows) == (1 if page == "README.md" else len(lock.PYTHONS))
        locked = pins(f"{platform.lock.name}.txt")
        for row in rows:
            assert locked["torch"] in row
            assert (locked["triton"] in row) == ("macOS" not in platform.name)


def test_the_cpu_builds_require_what_the_lock_says_of_them() -> None:
    if not importlib.metadata.version("torch").endswith("+cpu"):
        pytest.skip("this torch is no CPU build")
    if importlib.metadata.version("torch").split("+")[0] != pins("cpu.txt")["torch"]:
        pytest.skip("this torch is another version than locks/cpu.txt has")
    said = {line for line in importlib.metadata.requires("torch") or [] if "extra ==" not in line}
    assert said == set(lock.CPU_BUILD_REQUIRES)


def test_changed_requirements_ask_for_a_new_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(lock, "ROOT", tmp_path)
        text = (ROOT / "pyproject.toml").read_text()
        (tmp_path / "pyproject.toml").write_text(text.replace('"numpy>=1.26"', '"numpy>=2"'))
        assert lock.check(offline=True) == 2
    assert "Run: make lock" in capsys.readouterr().out
    assert lock.check(offline=True) == 0
    assert "OFFLINE=1" in capsys.readouterr().out


@pytest.mark.slow  # it asks the package index; `make check` resolves every platform anyway
def test_a_triton_that_torch_does_not_demand_has_no_solution(tmp_path: Path) -> None:
    """The lock that could not be installed: triton 3.9.0 beside a torch from PyPI."""
    platform = lock.PLATFORMS[0]
    good = lock.resolve(platform, "3.12", "runtime")
    if not good.versions and not lock.index_answers():
        pytest.skip("the package index cannot be reached")
    assert good.versions["triton"] == "3.6.0", good.reason
    text = (ROOT / "locks" / "cuda.txt").read_text()
    (tmp_path / "cuda.txt").write_text(text.replace("triton==3.6.0", "triton==3.9.0"))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(lock, "LOCKS", tmp_path)
        bad = lock.resolve(platform, "3.12", "runtime")
    assert not bad.versions
    assert "triton" in bad.reason
    assert "NO SOLUTION" in bad.row


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_one_sentence_and_no_pass(tmp_path: Path) -> None:
    nowhere = {
        "UV_DEFAULT_INDEX": "https://index.invalid/simple",
        "UV_CACHE_DIR": str(tmp_path),
        "UV_HTTP_RETRIES": "0",
    }
    command = [sys.executable, str(ROOT / "scripts" / "lock.py"), "check"]
    environment = {name: value for name, value in os.environ.items() if name != "OFFLINE"}
    done = subprocess.run(
        command, env={**environment, **nowhere}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1
    assert "https://index.invalid/simple cannot be reached" in done.stdout
    assert done.stderr == ""


def set_up(folder: Path, kind: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [python, str(ROOT / "scripts" / "install.py"), str(folder), "--torch", kind]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_installed_torch_is_seen_and_not_pinned_to_another(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    assert set_up(folder, "installed").returncode == 0
    ask = [
        str(folder / "bin" / "python"),
        "-c",
        "import torch; from importlib.metadata import version; print(version('torch'))",
    ]
    version = importlib.metadata.version("torch")
    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() == version
    lines = install.constraints_for("installed").splitlines()
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={version}"]
    assert not [line for line in lines if line.startswith(("sympy==", "setuptools=="))]
    assert f"pydantic=={pins('cpu.txt')['pydantic']}" in lines
    # The environment keeps its kind, and its mark its time, until another is asked for.
    before = (folder / ".torch").stat().st_mtime_ns
    assert set_up(folder, "auto").stdout == ""
    assert (folder / ".torch").stat().st_mtime_ns == before
    assert set_up(folder, "cpu").stdout.startswith(f"{folder} was made with TORCH=installed")
    assert (folder / ".torch").read_text() == "cpu\n"
    assert subprocess.run(ask, capture_output=True, check=False).returncode != 0


def test_no_torch_to_use_and_an_unknown_kind_are_one_sentence_each(tmp_path: Path) -> None:
    import venv

    venv.create(tmp_path / "bare", symlinks=True)
    done = set_up(tmp_path / "venv", "installed", str(tmp_path / "bare" / "bin" / "python"))
    assert done.returncode == 4
    assert done.stderr.endswith("has no torch. Use TORCH=cuda or TORCH=cpu.\n")
    done = set_up(tmp_path / "venv", "rocm")
    assert done.returncode == 2
    assert done.stderr == "TORCH=rocm is unknown. It can be auto, cuda, cpu, installed, proven.\n"
    assert not (tmp_path / "venv").exists()


def test_the_machine_decides_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("an NVIDIA driver is here")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.kind_here() == "cpu"
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert install.kind_here() == ("cuda" if sys.platform == "linux" else "cpu")
