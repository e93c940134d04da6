"""The manifest of a checkpoint: its files, their sizes, and their SHA-256.

The manifest is written last, so a folder with a manifest was once complete. It also contains a digest of its own content, in a
canonical form: a change of a single bit in a step, size, hash or metric is detected. This finds damage and careless edits. It
is not a signature: someone who recomputes the digest can forge one, which is why loading a checkpoint must never run code from
it.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from rush.errors import DataError, MachineError
from rush.files import json_safe, parse_json, read_file, sha256_file
from rush.records.typed import wrong_field

MANIFEST_NAME = "manifest.json"
FORMAT = "rush-checkpoint"
FORMAT_VERSION = 1


class CheckpointDamaged(DataError):
    """A checkpoint is not what was sealed; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileEntry:
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """The files of a checkpoint; `meta` is free (metrics, recipe hash, versions)."""

    step: Annotated[int, Field(ge=0)]
    files: Mapping[str, FileEntry]
    meta: Mapping[str, Any]

    def render(self) -> str:
        """The one text of this manifest, digest included."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "step": self.step,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            "meta": json_safe(dict(self.meta))[0],
        }
        body["digest"] = _digest(body)
        return json.dumps(body, indent=2, allow_nan=False) + "\n"

    @property
    def digest(self) -> str:
        """Identifies the manifest, and by it the content of all files."""
        return str(json.loads(self.render())["digest"])


_SCHEMA = TypeAdapter(CheckpointManifest)


def describe_files(folder: Path, known: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file; the hash of `known` ones is not recomputed. A checkpoint is flat: anything but
    plain files is our bug."""
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.iterdir()):
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode), f"{path} is not a plain file"
        entry = known.get(path.name) or FileEntry(status.st_size, sha256_file(path))
        if entry.size_bytes != status.st_size:
            raise MachineError(
                f"{path} has {status.st_size} bytes, {entry.size_bytes} were written; all ranks must see the same folder."
            )
        entries[path.name] = entry
    if missing := sorted(known.keys() - entries.keys()):
        raise MachineError(
            f"{folder} lacks {missing[0]}, which a rank wrote; all ranks must see the same folder."
        )
    return entries


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint folder, or say in CheckpointDamaged why it cannot be trusted."""
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointDamaged(f"{folder}: there is no such checkpoint folder.")
    if not path.is_file():
        raise _damaged(folder, MANIFEST_NAME, "is missing")
    try:
        text = read_file(path).decode()
        body = parse_json(text)
    except OSError as error:
        raise _damaged(folder, MANIFEST_NAME, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _damaged(folder, MANIFEST_NAME, f"is not valid JSON ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _damaged(folder, MANIFEST_NAME, f'does not say "format": "{FORMAT}"')
    if body.get("version") != FORMAT_VERSION:
        raise _damaged(
            folder,
            MANIFEST_NAME,
            f"has format version {body.get('version')!r}, this rush reads {FORMAT_VERSION}",
        )
    try:
        manifest = _SCHEMA.validate_python(body)
    except ValidationError as error:
        raise _damaged(folder, MANIFEST_NAME, f"lacks or misspells a field ({wrong_field(error)})") from None
    # Rendering recomputes the digest, so this one comparison finds edited values and edited text alike.
    if manifest.render() != text:
        raise _damaged(folder, MANIFEST_NAME, "was changed after it was written (its digest does not fit)")
    return manifest


def check_sizes(folder: Path, manifest: CheckpointManifest) -> None:
    """The quick part of verification: the right files under the right name, with the right sizes."""
    # The folder's name holds the step as well: that is how the newest one is found.
    if folder.resolve().name != folder_name(manifest.step):
        raise _damaged(
            folder,
            MANIFEST_NAME,
            f"is of step {manifest.step}, whose folder would be called {folder_name(manifest.step)}",
        )
    present = {path.name for path in folder.iterdir()} - {MANIFEST_NAME}
    for name in sorted(manifest.files.keys() - present):
        raise _damaged(folder, name, "is missing")
    for name in sorted(present - manifest.files.keys()):
        raise _damaged(folder, name, "does not belong to it (it is not in the manifest)")
    for name, entry in manifest.files.items():
        status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(folder, name, "is not a plain file")
        if status.st_size != entry.size_bytes:
            raise _damaged(folder, name, f"has {status.st_size} bytes, the manifest says {entry.size_bytes}")


def check_contents(folder: Path, manifest: CheckpointManifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """The thorough part: SHA-256 of every byte. Returns the files that were read: all, or with several readers (`share`: index,
    count) those of this one."""
    number, count = share
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].size_bytes, item[0]))
    read = []
    for name, entry in by_size[number::count]:
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise _damaged(folder, name, f"cannot be read ({error.strerror})") from error
        if found != entry.sha256:
            raise _damaged(
                folder,
                name,
                f"has other content than was saved (SHA-256 {found[:12]}…, not {entry.sha256[:12]}…)",
            )
        read.append(name)
    return read


def folder_name(step: int) -> str:
    """`step-000123`: sorts by name up to a million steps, and by number beyond."""
    assert step >= 0, f"negative step {step}"
    return f"step-{step:06d}"


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _damaged(folder: Path, name: str, problem: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"Checkpoint {folder} is damaged: {name} {problem}.")
