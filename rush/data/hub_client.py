"""The Hugging Face hub: ids, the commit of a revision, and messages for its errors.

An id is `OWNER/NAME` or `OWNER/NAME@REVISION` (a branch, a tag or a commit). The environment is the hub's own: HF_ENDPOINT,
HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, and HF_TOKEN or what `hf auth login` stored. It is read at every call. Only
huggingface_hub uses the token: it is in none of our messages and files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rush.data.readers import import_extra
from rush.errors import DataError, MachineError, RushError

Kind = Literal["model", "dataset"]
Note = Callable[[str], None]
_ID = re.compile(r"(hub:)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp")
"""Libraries whose errors are those of a connection."""


@dataclass(frozen=True)
class HubId:
    """A repository on the hub."""

    name: str
    """OWNER/NAME."""
    revision: str | None = None
    kind: Kind = "model"

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The revision, where it is a commit."""
        return self.revision if self.revision is not None and _COMMIT.fullmatch(self.revision) else None

    @property
    def folder(self) -> Path:
        """Where the hub's cache keeps it."""
        return cache_dir() / f"{self.kind}s--{self.name.replace('/', '--')}"


def parse_id(text: str, kind: Kind = "model") -> HubId | None:
    """The repository that a text names; None for a path.

    A local folder of that name takes precedence; if OWNER is a local folder, the text is a path.
    `hub:OWNER/NAME` is always an id.
    """
    found = _ID.fullmatch(text)
    if found is None or ".." in text:
        return None
    if found[1] is None and (os.path.exists(text) or os.path.isdir(text.split("/", 1)[0])):
        return None
    return HubId(found[2], found[3], kind)


def cache_dir() -> Path:
    """The hub's cache: HF_HUB_CACHE, or `hub` in HF_HOME."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def client() -> Any:
    return import_extra("huggingface_hub", "hub", "Asking the Hugging Face hub")


def hub_api() -> Any:
    return client().HfApi(endpoint=endpoint())


def pinned(repo: HubId, note: Note = lambda text: None) -> HubId:
    """The same with the commit that its revision names now.

    The answer holds for this process. Where the hub cannot be asked, the commit is the one that the cache knows.
    """
    if repo.commit is not None:
        return repo
    commit, remark = resolved(repo, endpoint(), cache_dir(), offline())
    if remark:
        note(remark)
    return replace(repo, revision=commit)


@cache
def resolved(repo: HubId, server: str, folder: Path, silent: bool) -> tuple[str, str]:
    """The commit, and a remark if the hub was not contacted. The arguments after `repo` are cache keys."""
    ref = repo.folder / "refs" / (repo.revision or "main")
    known = ref.read_text().strip() if os.path.isfile(ref) else ""
    if silent:
        if not known:
            raise MachineError(not_here(repo, "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"))
        return known, ""
    try:
        found = hub_api().repo_info(repo.name, repo_type=repo.kind, revision=repo.revision)
    except Exception as error:
        problem = sentence(error, repo)
        if problem is None:
            raise
        if known and unreachable(error):
            return (
                known,
                f"The Hugging Face hub cannot be reached: {repo} is taken from the cache, at commit {known[:12]}.",
            )
        raise problem from error
    commit = str(found.sha)
    if known != commit:
        # Only for a call without network; a cache that others filled may be read-only.
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)
    return commit, ""


def not_here(repo: HubId, why: str) -> str:
    """What to do if a repository is neither in the cache nor reachable."""
    dataset = "--repo-type dataset " if repo.kind == "dataset" else ""
    use = "give its files here as data.files" if repo.kind == "dataset" else "give its folder here"
    return (
        f"{why}, and {repo} is not in its cache ({cache_dir()}). Where there is network run `hf download {dataset}{repo.name} "
        f"--local-dir FOLDER`, copy the folder and {use}; or copy the cache and set HF_HOME and HF_HUB_OFFLINE=1."
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and now not in seen:
        seen.append(now)
        yield now
        now = now.__cause__ or now.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status in an error or its causes."""
    for one in chain(error):
        code = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(code, int):
            return code
    return None


def unreachable(error: BaseException) -> bool:
    """Whether the hub did not answer, or answered that it cannot now."""
    status = status_of(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return any(
        isinstance(one, ConnectionError | TimeoutError) or type(one).__module__.split(".")[0] in _TRANSPORT
        for one in chain(error)
    )


def sentence(error: BaseException, repo: HubId) -> RushError | None:
    """The error of a hub library as ours; None where it is not the hub's."""
    names = {type(one).__name__ for one in chain(error)}
    what = f"the {repo.kind} {repo}"
    status = status_of(error)
    # `datasets` turns the hub's own error into a message.
    if (
        "GatedRepoError" in names
        or _header(error, "X-Error-Code") == "GatedRepo"
        or "a gated dataset" in str(error)
    ):
        return MachineError(
            f"{what} is gated: its owner must let you in. Accept its terms at {endpoint()}/{_page(repo)} and give your token "
            "(`hf auth login`, or HF_TOKEN); or give a folder with its files."
        )
    if status == 401 and "Invalid" in _header(error, "X-Error-Message"):
        return MachineError(
            f"The Hugging Face hub does not know the token that was given for {what}; log in again (`hf auth login`, or HF_TOKEN)."
        )
    if "RevisionNotFoundError" in names:
        return DataError(
            f"{what}: there is no revision {repo.revision!r} on the hub; name a branch, a tag or a commit."
        )
    if status in (401, 404) or names & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return DataError(
            f"there is no {repo.kind} {repo.name} on the hub ({endpoint()}), or it is private and needs your token (`hf auth "
            f"login`, or HF_TOKEN){_or_folder(repo)}. Check the spelling."
        )
    if status == 403:
        return MachineError(
            f"The Hugging Face hub refuses access to {what} (403): your token may not do this; give one that may (`hf auth login`, "
            "or HF_TOKEN)."
        )
    if status == 429:
        return MachineError(
            f"The Hugging Face hub answers no more requests for now (429), asked for {what}; wait some minutes, or log in (`hf auth "
            "login`), which raises the limit."
        )
    if status is not None and status >= 400:
        return MachineError(
            f"The Hugging Face hub could not give {what} (HTTP {status}); try again later. {_without(repo)}"
        )
    if "OfflineModeIsEnabled" in names:
        return MachineError(not_here(repo, "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"))
    if unreachable(error):
        return MachineError(
            not_here(repo, f"The Hugging Face hub ({endpoint()}) cannot be reached ({_reason(error)})")
        )
    return None


def _header(error: BaseException, name: str) -> str:
    for one in chain(error):
        headers = getattr(getattr(one, "response", None), "headers", None)
        if headers is not None:
            return str(headers.get(name) or "")
    return ""


def _page(repo: HubId) -> str:
    return repo.name if repo.kind == "model" else f"datasets/{repo.name}"


def _or_folder(repo: HubId) -> str:
    return f"; nor is there a folder {repo.name} here" if repo.kind == "model" else ""


def _without(repo: HubId) -> str:
    return "Files that were downloaded elsewhere work too: give " + (
        "them as data.files." if repo.kind == "dataset" else "their folder."
    )


def _reason(error: BaseException) -> str:
    """The innermost error in a few words, without addresses."""
    last = [*chain(error)][-1]
    text = (str(last).strip().splitlines() or [""])[0]
    return text[:120] if text and "://" not in text else type(last).__name__
