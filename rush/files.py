"""Atomic file replacement: a reader sees the old file or the new one, never a partial one.

A plain `open(path, "w")` truncates the file first and fills it afterwards: a crash, a power cut or a full disk in between
leaves neither version. So we write to a temporary name in the same folder, fsync, and rename: a rename within one folder is
atomic. The folder is fsynced too, because the new name is an entry of the folder, not of the file. This costs a few
milliseconds per file, so it suits records and checkpoints, not a log line per step.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from rush.errors import CannotWrite

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the file size limit allows",
}
LARGEST_READ = 1 << 28
"""In bytes, the largest file that is read at once: a recipe, a record, a config or a tokenizer."""
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")


def is_disk_full(error: BaseException) -> bool:
    """Whether the operating system refused to write more."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def writing(path: Path, what: str = "", advice: str = "") -> Iterator[None]:
    """Turn an operating-system error while writing `path` into one message for a person.

    `what` stands before the path ("prepared data in "), `advice` instead of the usual one. An OSError
    without a number is not the system's (a damaged gzip file raises one) and passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = error.strerror or str(error)
        usual = ""
        if error.errno in _FULL:
            reason, usual = f"{_FULL[error.errno]} ({reason})", "Free space or choose another folder."
        elif error.errno == errno.EROFS:
            reason, usual = f"the disk is read-only ({reason})", "Make it writable or choose another folder."
        elif error.errno in _FORBIDDEN:
            reason, usual = f"no permission ({reason})", "Choose a folder you may write to."
        raise CannotWrite(f"Cannot write {what}{path}: {reason}. {advice or usual}".rstrip()) from error


def temporary_name(path: Path) -> Path:
    """A new temporary name in the folder of `path`: hidden, and unique among writers."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its real name, fsynced."""
    fsync_file(temporary)
    os.replace(temporary, path)
    fsync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write to, renamed to `path` if the block succeeds and removed if not."""
    temporary = temporary_name(path)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` atomically; on failure the old content stays and no temporary file remains."""
    data = content.encode() if isinstance(content, str) else content
    with writing(path), replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(data)


def open_file(path: Path | str) -> BufferedReader:
    """Open a file for reading. OSError for a pipe or a device in an untrusted folder: reading one may never end."""
    return open(path, "rb", opener=_open_without_waiting)


def read_file(path: Path | str, most: int = LARGEST_READ) -> bytes:
    """The content of a file that should be small; OSError for a pipe, a device, or more than `most` bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path))
        return file.read()


def _open_without_waiting(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer here
    mode = os.fstat(descriptor).st_mode
    given = path.startswith(("/dev/fd/", "/dev/stdin"))  # by the shell of whoever typed the command
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (given and stat.S_ISFIFO(mode)):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", path)


def parse_json(content: bytes | str) -> Any:
    """The value of JSON text; ValueError for anything else.

    Python's own reader accepts NaN and unpaired surrogates, which are not JSON and cannot be written again,
    and fails with a RecursionError on thousands of brackets. An untrusted file may contain all of these.
    """
    from pydantic_core import from_json

    return from_json(content, allow_inf_nan=False)


def write_json_atomic(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are not JSON: see `json_safe`."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def append_log(text: str, *paths: Path) -> Path | None:
    """Append `text` to the first of these files that takes it, in one write, so that two writers do not mix; which one."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                whole = text.encode(errors="backslashreplace")
                if os.write(descriptor, whole) == len(whole):
                    return path
            finally:
                os.close(descriptor)
    return None


def remove_temporaries(folder: Path, *, deep: bool = False) -> None:
    """Remove temporary files that a crash left in a folder (`deep`: and below it). Only while no other process writes there."""
    with writing(folder):
        for path in folder.rglob(".*.tmp") if deep else folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()


def fsync_file(path: Path) -> None:
    """fsync a file."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    """fsync a folder (a new, renamed or removed file is a change of its folder)."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """`$RUSH_CACHE`, else `$XDG_CACHE_HOME/rush`, else `~/.cache/rush`."""
    if chosen := os.environ.get("RUSH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rush"


def shareable(text: str) -> str:
    """A message as it is recorded in files that people share: the working folder is left out, the home folder is `~`."""
    for folder, short in ((Path.cwd(), ""), (Path.home(), f"~{os.sep}")):
        if folder != Path(folder.anchor):
            text = text.replace(f"{folder}{os.sep}", short)
    return text


def timestamp() -> str:
    """The time now in UTC, as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sha256_file(path: Path) -> str:
    """SHA-256 of a file as lower-case hex, read in pieces so that size does not matter."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_safe(value: Any) -> tuple[Any, dict[str, str]]:
    """`value` with every NaN or infinity replaced by None, and where they stood: {"grad_norm": "nan"}.

    JSON has no such numbers, and Python writes them anyway, which other readers refuse. The replaced values
    are returned, so that the caller can store them with the row.
    """
    lost: dict[str, str] = {}

    def clean(item: Any, where: str) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            lost[where] = str(item)
            return None
        if isinstance(item, dict):
            return {key: clean(inner, f"{where}.{key}" if where else str(key)) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [clean(inner, f"{where}[{index}]") for index, inner in enumerate(item)]
        return item

    return clean(value, ""), lost
