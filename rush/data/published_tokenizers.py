"""Published tokenizers by name: local, or from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rush.data.readers import import_extra
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError, MachineError, nearest

TOKENIZERS = {"gpt2": "openai-community/gpt2", "llama-3": "meta-llama/Llama-3.1-8B"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


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


def _fetch(repository: str, key: str, trainable: bool) -> Path:
    """The folder of a tokenizer's files in the hub's cache, downloaded if necessary."""
    hub: Any = import_extra("huggingface_hub", "hub", f"Fetching the tokenizer of {repository}")
    errors: Any = import_extra("huggingface_hub.errors", "hub", f"Fetching the tokenizer of {repository}")
    instead = f"; or set {key}='train'" if trainable else ""
    try:
        folder = hub.snapshot_download(repository, allow_patterns=list(_FILES))
    except (OSError, errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise MachineError(
            f"Cannot fetch the tokenizer of {repository} from the Hugging Face hub: "
            f"{str(error).strip().splitlines()[0]} Check the connection, and for a gated model that its "
            "licence is accepted and `hf auth login` was run; or copy its tokenizer.json here and set "
            f"{key} to its path{instead}."
        ) from error
    if not (Path(folder) / "tokenizer.json").is_file():
        raise DataError(f"{repository} has no tokenizer.json, so its tokenizer cannot be read.")
    return Path(folder)
