"""Published tokenizers by name: local, or from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from rush.data.hub_client import offline, parse_id, pinned
from rush.data.hub_files import cached, fetch, list_files, ready, snapshot
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError, MachineError, nearest

TOKENIZERS = {"gpt2": "openai-community/gpt2", "llama-3": "meta-llama/Llama-3.1-8B"}
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def find_tokenizer(name: str, key: str = "data.tokenizer", *, trainable: bool = True) -> Tokenizer:
    """A tokenizer by path (a tokenizer.json or its folder), by our short name, or by hub name OWNER/NAME.

    `key` and `trainable` (whether one could be trained instead) are for messages.
    """
    path = Path(name).expanduser()
    if os.path.exists(path):  # a name of 300 characters exists nowhere; Path would raise
        return Tokenizer.load(path)
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"No tokenizer at {name}: the path does not exist.")
    if name not in TOKENIZERS and "/" not in name:
        allowed = [*TOKENIZERS, "OWNER/NAME on the hub", "a path to tokenizer.json", *["train"] * trainable]
        raise DataError(f"No tokenizer called {name!r}: {nearest(name, allowed)}")
    return Tokenizer.load(_fetch(TOKENIZERS.get(name, name), key, trainable))


def _fetch(name: str, key: str, trainable: bool) -> Path:
    """The folder of a tokenizer's files in the hub's cache, downloaded if necessary."""
    repo = parse_id(f"hub:{name}")
    if repo is None:
        raise DataError(f"No tokenizer called {name!r}: allowed on the hub is OWNER/NAME[@REVISION].")
    try:
        repo = pinned(repo)
        if (found := ready(repo, "tokenizer")) is not None:
            return found
        if offline() and "tokenizer.json" in cached(repo):
            return snapshot(repo)
        listed = list_files(repo)
        if "tokenizer.json" not in listed:
            raise DataError(f"{repo} has no tokenizer.json, so its tokenizer cannot be read.")
        return fetch(repo, [listed[file] for file in _FILES if file in listed], "tokenizer")
    except MachineError as error:
        instead = f", or set {key}='train'" if trainable else ""
        raise MachineError(
            f"Cannot fetch the tokenizer of {repo}. {error} Or copy its tokenizer.json here and set {key} to its path{instead}."
        ) from error
