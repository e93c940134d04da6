"""Hugging Face's `generation_config.json`: stop tokens and the author's sampling settings.

`config.json` names one end-of-text token. A chat model often has another end-of-turn token. transformers' `generate` stops
at the tokens of this file; without it, it runs to its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rush.hub.json_files import read_json

FILE = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Metadata of the file itself. With the first one transformers would read the ids from config.json again.
_METADATA = ("_from_model_config", "transformers_version")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The generation settings of a model's folder; from config.json where the file is missing, as transformers does."""
    if (folder / FILE).is_file():
        return {k: v for k, v in read_json(folder / FILE).items() if k not in _METADATA}
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        return {name: config[name] for name in _IDS if config.get(name) is not None}
    return {}


def eos_ids(config: Mapping[str, Any]) -> list[int]:
    """The end-of-text tokens: one, several or none."""
    found = config.get("eos_token_id")
    return [end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int)]


def generation_config(
    known: Mapping[str, Any], ends: Iterable[int], *, bos_id: int | None, pad_id: int | None
) -> dict[str, Any]:
    """The generation config of a model that stops at `ends`; other settings are its base's (`known`)."""
    listed = list(dict.fromkeys(ends))
    ids = {
        "bos_token_id": bos_id,
        "eos_token_id": listed[0] if len(listed) == 1 else listed,
        "pad_token_id": pad_id,
    }
    kept = {name: value for name, value in known.items() if name not in _IDS}
    return kept | {name: value for name, value in ids.items() if value is not None and value != []}


def read_pad_token(folder: Path) -> str | None:
    """The padding token of a folder's tokenizer, if it has one."""
    file = folder / "tokenizer_config.json"
    named = read_json(file).get("pad_token") if file.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None
