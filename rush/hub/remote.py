"""Models and adapters by id: `OWNER/NAME` or `OWNER/NAME@REVISION` on the Hugging Face hub, wherever a folder is accepted.

Only the files that rush reads are downloaded: settings, tokenizer, chat template and safetensors; never pickles or code.
`rush.data.hub_files` implements the cache, the hashes and resumed downloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rush.data.hub_client import HubId, not_here, offline, parse_id, pinned
from rush.data.hub_files import RemoteFile, cached, fetch, list_files, ready, snapshot
from rush.errors import DataError, MachineError
from rush.hub.json_files import read_json

Note = Callable[[str], None]
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
SETTINGS = (CONFIG, "generation_config.json", ADAPTER_CONFIG, *TOKENIZER)
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


def _quiet(text: str) -> None: ...


def local_folder(path: str | Path, note: Note = _quiet) -> Path:
    """The folder itself, or that of a model or an adapter on the hub, downloaded where the cache does not have it."""
    repo = parse_id(str(path))
    return Path(path) if repo is None else model_folder(repo, note)


def local_config(path: str | Path, note: Note = _quiet) -> Path:
    """The config.json in a folder, a file itself, or that of a model on the hub, without its weights."""
    repo = parse_id(str(path))
    if repo is None:
        return Path(path) / CONFIG if os.path.isdir(path) else Path(path)
    repo = pinned(repo, note)
    if (found := ready(repo, "config")) is not None:
        return found / CONFIG
    if offline():
        if CONFIG in cached(repo):
            return snapshot(repo) / CONFIG
        raise MachineError(not_here(repo, "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"))
    listed = list_files(repo)
    if CONFIG not in listed:
        raise DataError(f"{repo} has no {CONFIG}, so there is nothing to plan with; found {_some(listed)}.")
    return fetch(repo, [listed[CONFIG]], "config") / CONFIG


def local_settings(path: str | Path, note: Note = _quiet) -> Path:
    """The folder itself, or that of a model on the hub with its settings and tokenizer, without its weights."""
    repo = parse_id(str(path))
    if repo is None:
        return Path(path)
    repo = pinned(repo, note)
    if (found := ready(repo, "settings")) is not None:
        return found
    if offline():
        if {CONFIG, TOKENIZER[0]} <= set(cached(repo)):
            return snapshot(repo)
        raise MachineError(not_here(repo, "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"))
    listed = list_files(repo)
    return fetch(repo, [listed[name] for name in SETTINGS if name in listed], "settings")


def pinned_name(path: str | None, note: Note = _quiet) -> str | None:
    """An id with its current commit, for the recipe of a run; a folder stays unchanged."""
    repo = None if path is None else parse_id(path)
    return path if repo is None else str(pinned(repo, note))


def same_repository(one: str | None, other: str | None) -> bool:
    """Whether two names are of one repository, the second without a commit of its own."""
    first, second = (None if name is None else parse_id(name) for name in (one, other))
    return first is not None and second is not None and first.name == second.name and second.commit is None


def model_folder(repo: HubId, note: Note = _quiet) -> Path:
    """The folder of a model or an adapter on the hub."""
    repo = pinned(repo, note)
    if (found := ready(repo, "model")) is not None:
        return found
    if offline():
        return _cached_model(repo)
    listed = list_files(repo)
    settings = [listed[name] for name in SETTINGS if name in listed]
    if INDEX in listed:
        folder = fetch(repo, [*settings, listed[INDEX]])
        weights = [listed[INDEX], *_shards(repo, folder / INDEX, listed)]
    else:
        weights = [_single(repo, listed)]
    return fetch(repo, [*settings, *weights], "model")


def _single(repo: HubId, listed: Mapping[str, RemoteFile]) -> RemoteFile:
    """The one weight file of a model or an adapter."""
    for name in (WEIGHTS, ADAPTER_WEIGHTS):
        if name in listed:
            return listed[name]
    if CONFIG not in listed and ADAPTER_CONFIG not in listed:
        raise DataError(
            f"{repo} is neither a model nor an adapter: it has no {CONFIG}; found {_some(listed)}."
        )
    if pickles := [name for name in listed if name.endswith(OTHER_WEIGHTS)]:
        raise DataError(
            f"{repo} has its weights as {_some(pickles)}, not as safetensors, and rush reads safetensors only: a pickle can run any "
            "code when it is opened. Take a revision with safetensors, or convert it once with transformers and give the folder."
        )
    raise DataError(f"{repo} has no weights ({WEIGHTS} or {INDEX}); found {_some(listed)}.")


def _shards(repo: HubId, index: Path, listed: Mapping[str, RemoteFile]) -> list[RemoteFile]:
    """The weight files that the index names."""
    names = _indexed(index)
    if bad := [name for name in names if "/" in name or not name.endswith(".safetensors")]:
        raise DataError(f"{repo}: {INDEX} names {_some(bad)}, and rush reads safetensors files only.")
    if lost := [name for name in names if name not in listed]:
        raise DataError(
            f"{repo} is incomplete: {INDEX} names {_some(lost)}, which the hub does not have at this revision. Take another revision."
        )
    return [listed[name] for name in names]


def _indexed(index: Path) -> list[str]:
    found: Any = read_json(index)
    table = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise DataError(f"{index}: weight_map must name a file for every tensor.")
    return sorted(set(table.values()))


def _cached_model(repo: HubId) -> Path:
    """Files that other tools have downloaded, if the hub must not be contacted."""
    names, folder = cached(repo), snapshot(repo)
    if INDEX in names:
        whole = set(_indexed(folder / INDEX)) <= set(names)
    else:
        whole = bool({WEIGHTS, ADAPTER_WEIGHTS} & set(names))
    if not whole or not {CONFIG, ADAPTER_CONFIG} & set(names):
        raise MachineError(not_here(repo, "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"))
    return folder


def _some(names: Any) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return f"{', '.join(ordered[:4])}{more}" or "nothing"
