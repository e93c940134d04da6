"""Atomic writing: the old file or the new one, also on a full disk and in a folder that is not ours."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rush.errors import MachineError
from rush.files import (
    json_safe,
    remove_temporaries,
    replacing,
    sha256_file,
    temporary_name,
    write_atomic,
    write_json_atomic,
    writing,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    write_atomic(path, "old")
    write_atomic(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["recipe.toml"]


def test_sha256_is_that_of_the_standard_and_of_hashlib(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    content = os.urandom(3_000_001)
    path.write_bytes(content)
    assert sha256_file(path) == hashlib.sha256(content).hexdigest()


def test_a_full_disk_keeps_the_old_content_and_leaves_no_litter(small_disk: Path) -> None:
    path = small_disk / "machine.json"
    write_atomic(path, b"a" * 300_000)
    with pytest.raises(MachineError, match="disk is full") as caught:
        write_atomic(path, b"b" * 2_000_000)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"a" * 300_000
    assert names(small_disk) == ["machine.json"]


def test_a_file_system_gone_read_only_is_a_message_and_keeps_the_old_content(small_disk: Path) -> None:
    path = small_disk / "machine.json"
    write_atomic(path, b"old")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(MachineError, match="the disk is read-only"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


FILE_SIZE_LIMIT = """
import resource, sys
from pathlib import Path
from rush.errors import MachineError
from rush.files import write_atomic

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_atomic(Path(sys.argv[1]), b"b" * 200_000)
except MachineError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_the_file_size_limit_of_a_process_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_atomic(path, b"old")
    child = subprocess.run(
        [sys.executable, "-c", FILE_SIZE_LIMIT, str(path)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 4, child.stderr
    assert str(path) in child.stdout
    assert "file size limit" in child.stdout
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["report.html"]


NOT_OURS = """
import os, sys
from pathlib import Path
from rush.errors import MachineError
from rush.files import write_atomic

if os.geteuid() == 0:
    os.setuid(65534)
try:
    write_atomic(Path(sys.argv[1]), b"new")
except MachineError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_folder_without_write_permission_is_a_message_naming_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o555)
    child = subprocess.run(
        [sys.executable, "-c", NOT_OURS, str(folder / "x")], capture_output=True, text=True, check=False
    )
    assert child.returncode == 4, child.stderr
    assert str(folder / "x") in child.stdout
    assert "permission" in child.stdout
    assert names(folder) == []


def test_a_missing_folder_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=os.strerror(errno.ENOENT)):
        write_atomic(tmp_path / "nowhere" / "x", b"")


def test_json_is_standard_json_and_refuses_nan(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "x.json", {"ü": [1, 2.5, None]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"ü": [1, 2.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(tmp_path / "x.json", float("nan"))
    assert json.loads((tmp_path / "x.json").read_text()) == {"ü": [1, 2.5, None]}


def test_numbers_that_json_lacks_become_null_and_are_named() -> None:
    clean, lost = json_safe({"a": float("nan"), "b": [1.0, float("-inf")], "c": {"d": float("inf")}, "e": 1})
    assert clean == {"a": None, "b": [1.0, None], "c": {"d": None}, "e": 1}
    assert lost == {"a": "nan", "b[1]": "-inf", "c.d": "inf"}


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.replace

    def flush(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def replace(old: Path, new: Path) -> None:
        done.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "x", b"content")
    assert done == ["file", "rename", "folder"]


def test_a_block_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with replacing(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["weights"]


def test_a_message_can_say_what_was_written_and_what_to_do(tmp_path: Path) -> None:
    def fail(error: OSError) -> str:
        with pytest.raises(MachineError) as caught, writing(tmp_path, "the plan in ", "Ask Ada."):
            raise error
        return str(caught.value)

    full = fail(OSError(errno.ENOSPC, "No space left on device"))
    assert full == (
        f"Cannot write the plan in {tmp_path}: the disk is full (No space left on device). Ask Ada."
    )
    assert "no permission" in fail(PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(OSError, match="not a gzipped file"), writing(tmp_path):
        raise OSError("not a gzipped file")


def test_two_temporary_names_of_one_file_differ_and_are_recognized_as_ours(tmp_path: Path) -> None:
    first, second = temporary_name(tmp_path / "a.bin"), temporary_name(tmp_path / "a.bin")
    assert first != second
    for path in (first, second):
        path.touch()
    remove_temporaries(tmp_path)
    assert names(tmp_path) == []


def test_a_deep_sweep_reaches_the_folders_below_and_a_plain_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    litter = temporary_name(tmp_path / "train" / "00000.bin")
    litter.touch()
    (tmp_path / "train" / "00000.bin").touch()
    remove_temporaries(tmp_path)
    assert litter.exists()
    remove_temporaries(tmp_path, deep=True)
    assert names(tmp_path / "train") == ["00000.bin"]


def test_only_our_own_temporary_files_are_removed(tmp_path: Path) -> None:
    for name in (".recipe.toml.123.0a1b2c3d.tmp", ".lock", "notes.tmp", ".hidden.tmp", "metrics.jsonl"):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path)
    assert names(tmp_path) == [".hidden.tmp", ".lock", "metrics.jsonl", "notes.tmp"]
