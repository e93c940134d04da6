"""The wheel: what PyPI would show of it, and the first hour from an empty folder of an environment that has nothing else of ours."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    have = subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True, check=False)
    isolation = [] if have.returncode else ["--no-build-isolation"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *isolation,
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not have.returncode:
        pytest.fail(done.stderr)
    if done.returncode:
        pytest.skip("hatchling is not installed, and the package index that has it cannot be reached")
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_page_on_pypi_has_no_link_that_leads_nowhere_there(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        told = email.message_from_string(archive.read(name).decode())
        names = archive.namelist()
    text = str(told.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert all("/raw/" in link for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text))
    assert told["Description-Content-Type"] == "text/markdown"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {line.split(", ")[0] for line in told.get_all("Project-URL", [])} == {*project["urls"]}
    assert {"rush/py.typed", "rush/_recipes/tiny.toml", "rush/_ladders/tiny.toml"} <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "docs/", "results/"))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_hour_works_from_an_installed_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    hour = [sys.executable, str(ROOT / "scripts" / "first_hour.py"), "--wheel", str(wheel), "--chats", "150"]
    hour += [
        "--changes",
        "batch.micro=2 batch.sequence=128",
        "--budget",
        "180s",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(hour, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    record = json.loads((tmp_path / "out" / "first_hour.json").read_text())
    assert len(record["commands"]) <= 10
    assert all(one["code"] == 0 for one in record["commands"])
    assert record["winner"]["parity"] == "equal"
