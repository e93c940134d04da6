"""Files of a repository on the hub: in the hub's cache, downloaded once, checked by size and hash.

The cache is huggingface_hub's, so rush shares downloads with other tools. An interrupted download resumes
where it stopped. One process per host downloads and the others wait. The hub gives the SHA-256 of a large
file and the git hash of a small one; each file is verified once, and remembered with its size and
modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.data.hub_client import HubId, client, endpoint, hub_api, not_here, offline, sentence
from rush.data.readers import import_extra
from rush.data.storage import folder_lock
from rush.errors import DataError, MachineError
from rush.files import cache_folder, write_atomic, writing

LARGE = 8 << 20
"""Size from which interrupted downloads resume in the middle."""
ADVICE = "Free space, or set HF_HOME to a folder on another disk."


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it."""

    name: str
    size: int
    sha256: str | None
    """SHA-256 of a large file."""
    git: str
    """Hash of the git object."""

    @property
    def etag(self) -> str:
        return self.sha256 or self.git

    def matches(self, path: Path) -> bool:
        """Whether the file at `path` has this size and hash."""
        if path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            if self.sha256 is not None:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
            whole = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
            whole.update(file.read())
            return whole.hexdigest() == self.git


def list_files(repo: HubId) -> dict[str, RemoteFile]:
    """The files at the top of a repository, at its commit."""
    try:
        entries = list(hub_api().list_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision))
    except Exception as error:
        if (problem := sentence(error, repo)) is None:
            raise
        raise problem from error
    files = [entry for entry in entries if hasattr(entry, "blob_id")]
    return {
        file.path: RemoteFile(file.path, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)
        for file in files
    }


def snapshot(repo: HubId) -> Path:
    """The folder of a commit in the hub's cache."""
    assert repo.commit is not None
    return repo.folder / "snapshots" / repo.commit


def cached(repo: HubId) -> list[str]:
    """Names of the files that the cache has of a commit."""
    folder = snapshot(repo)
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if os.path.isdir(folder) else []


def ready(repo: HubId, role: str) -> Path | None:
    """The folder of a commit, where the files for this role were downloaded and checked before; None otherwise."""
    checked = _Checked(repo)
    names = checked.roles.get(role, [])
    whole = bool(names) and all(checked.has(name) for name in names)
    return snapshot(repo) if whole else None


def fetch(repo: HubId, files: Sequence[RemoteFile], role: str = "") -> Path:
    """Download what the cache lacks of these files and check each; the folder of the commit.

    `role` is what they are together, for `ready`.
    """
    locks = _own_folder(repo)
    with writing(locks):
        locks.mkdir(parents=True, exist_ok=True)
    with folder_lock(locks, wait=True):
        folder, checked = snapshot(repo), _Checked(repo)
        missing = [file for file in files if not (folder / file.name).is_file()]
        if missing and offline():
            raise MachineError(not_here(repo, "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"))
        _check_room(repo, missing)
        with _bar(repo, sum(file.size for file in missing)) as bar:
            for file in missing:
                with _explained(repo, file):
                    _download(repo, file, bar)
        for file in files:
            checked.check(file)
        if role:
            checked.finish(role, [file.name for file in files])
    return folder


def _own_folder(repo: HubId) -> Path:
    """Where rush keeps its lock and its notes about a repository."""
    return cache_folder() / "hub" / repo.folder.name


@contextmanager
def _explained(repo: HubId, file: RemoteFile) -> Iterator[None]:
    """Turn errors of a download into messages."""
    try:
        with writing(repo.folder, f"{file.name} of {repo.name} into the cache ", ADVICE):
            yield
    except Exception as error:
        if (problem := sentence(error, repo)) is not None:
            raise problem from error
        if isinstance(error, OSError) and "Consistency check failed" in str(error):
            raise MachineError(
                f"{file.name} of {repo} did not come as a whole ({file.size:,} bytes were expected); run it again."
            ) from error
        raise


def _check_room(repo: HubId, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.size for file in missing)
    there = next(path for path in (repo.folder, *repo.folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise MachineError(
            f"{repo} takes {needed / 1e9:,.2f} GB, and the disk of the cache ({repo.folder.parent}) has {free / 1e9:,.2f} GB left. {ADVICE}"
        )


def _download(repo: HubId, file: RemoteFile, bar: type[Any]) -> None:
    place = {"repo_type": repo.kind, "revision": repo.commit, "endpoint": endpoint()}
    if file.size >= LARGE:
        _download_large(repo, file, place, bar)
    client().hf_hub_download(
        repo.name, file.name, cache_dir=repo.folder.parent, tqdm_class=bar, **place
    )  # links it, if it is there


def _download_large(repo: HubId, file: RemoteFile, place: dict[str, Any], bar: type[Any]) -> None:
    """Download to `blobs`, resuming an earlier download.

    huggingface_hub restarts a file in every process, and with hf_xet it fetches from another server: that faster library is
    used if nothing has been downloaded yet.
    """
    blob = repo.folder / "blobs" / file.etag
    part = blob.with_name(f"{blob.name}.part")
    if blob.exists():
        return
    hub, download = client(), import_extra("huggingface_hub.file_download", "hub", "Downloading")
    utils = import_extra("huggingface_hub.utils", "hub", "Downloading")
    url = hub.hf_hub_url(repo.name, file.name, **place)
    found = hub.get_hf_file_metadata(url, token=utils.get_token(), endpoint=endpoint())
    if getattr(found, "xet_file_data", None) is not None and utils.is_xet_available() and not part.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as content:
        done = content.tell()
        if done > file.size:
            content.truncate(done := 0)
        # Redirects drop the token where they lead to another host.
        headers = utils.build_hf_headers() | {"Accept-Encoding": "identity"}
        download.http_get(
            url, content, resume_size=done, headers=headers, expected_size=file.size, tqdm_class=bar
        )
    if not file.matches(part):
        part.unlink()
        raise _damaged(repo, file)
    os.replace(part, blob)


def _damaged(repo: HubId, file: RemoteFile) -> DataError:
    return DataError(
        f"{file.name} of {repo} is damaged: its hash is not {file.etag[:12]}…, which the hub names. It was removed; run this again "
        "to download it again."
    )


class _Checked:
    """Files that were verified already, with hash, size and time; and the files of each role."""

    def __init__(self, repo: HubId) -> None:
        self.repo, self.path = repo, _own_folder(repo) / f"{repo.commit}.json"
        try:
            found = json.loads(self.path.read_text())
            self.files, self.roles = dict(found["files"]), dict(found["roles"])
        except (OSError, ValueError, KeyError, TypeError):
            self.files, self.roles = {}, {}

    def has(self, name: str) -> bool:
        """Whether a file is unchanged since it was verified."""
        path = snapshot(self.repo) / name
        known = self.files.get(name)
        return known is not None and os.path.isfile(path) and known[1:] == _stamp(path)

    def check(self, file: RemoteFile) -> None:
        """Verify a file's hash. A wrong file is removed, so that it is downloaded again."""
        path = snapshot(self.repo) / file.name
        if self.has(file.name) and self.files[file.name][0] == file.etag:
            return
        if not file.matches(path):
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise _damaged(self.repo, file)
        self.files[file.name] = [file.etag, *_stamp(path)]
        self._write()

    def finish(self, role: str, names: list[str]) -> None:
        if self.roles.get(role) != names:
            self.roles[role] = names
            self._write()

    def _write(self) -> None:
        write_atomic(self.path, json.dumps({"files": self.files, "roles": self.roles}))


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


@contextmanager
def _bar(repo: HubId, num_bytes: int) -> Iterator[type[Any]]:
    """A progress bar on standard error for what is downloaded, as the class that huggingface_hub calls."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    tqdm: Any = import_extra("tqdm", "hub", "Downloading").tqdm
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), SpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(f"Downloading {repo.name}", total=num_bytes, visible=num_bytes > 0)

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})
                shown.update(task, advance=options.get("initial") or 0)

            def update(self, n: float | None = 1) -> None:
                shown.update(task, advance=n or 0)

        yield Bar
