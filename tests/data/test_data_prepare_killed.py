"""A preparation killed without warning, at several instants, continues to the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rush.data import Preparation, TokenDataset, prepare, verify_shards
from rush.errors import DataError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from rush.data import Preparation, prepare, sources
sources.MIN_UNIT_BYTES = 16384
if __name__ == "__main__":
    what = Preparation("files", (sys.argv[1],), tokenizer=sys.argv[2], validation=0.2)
    prepare(what, sys.argv[3], workers=2)
"""


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def big_preparation(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_folder: Path
) -> Preparation:
    path = tmp_path_factory.mktemp("big") / "big.jsonl"
    rows = [json.dumps({"text": f"{n}: {text * 3}"}) + "\n" for n in range(6) for text in texts]
    path.write_text("".join(rows), encoding="utf-8")
    return Preparation("files", (str(path),), tokenizer=str(tokenizer_folder), validation=0.2)


@pytest.fixture(scope="module")
def undisturbed(big_preparation: Preparation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rush.data.sources.MIN_UNIT_BYTES", 16384)
        return prepare(big_preparation, tmp_path_factory.mktemp("undisturbed"), workers=1)


@pytest.mark.parametrize(
    "after_units",
    [60, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 5, 10, 20, 40))],
)
def test_a_killed_preparation_resumes_to_the_same_bytes(
    big_preparation: Preparation,
    undisturbed: Path,
    tmp_path: Path,
    after_units: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rush.data.sources.MIN_UNIT_BYTES", 16384)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = tmp_path / "cache"
    folder = cache / undisturbed.name
    process = subprocess.Popen(
        [sys.executable, str(script), *big_preparation.files, big_preparation.tokenizer, str(cache)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 60
    while not (folder / "tokenizer").is_dir() or len(records(folder)) < after_units:
        assert process.poll() is None, "it ended before it could be killed; make the corpus larger"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not psutil.wait_procs(family, timeout=10)[1], "workers must not outlive the killed process"

    assert not (folder / "manifest.json").exists()
    with pytest.raises(DataError, match="not prepared data"):
        TokenDataset(folder, "train", 16)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.bin") if finished(folder, path)}
    prepare(big_preparation, cache, workers=1)
    verify_shards(folder, full=True)
    assert contents(folder) == contents(undisturbed)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "finished shards are not redone"
    assert len(kept) >= after_units


def records(folder: Path) -> list[Path]:
    return list((folder / "units").glob("*.json"))


def finished(folder: Path, shard: Path) -> bool:
    return (folder / "units" / f"{shard.stem}.json").exists()
