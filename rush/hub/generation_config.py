"""Hugging Face's `generation_config.json`: which tokens end a text there, and how the author would have it drawn.

`config.json` names one end of text, as training there expects. A chat model has more: the end of a turn is often
another token than the end of a text. `generate` stops at what this file lists, and runs on to its limit without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rush.errors import DataError

FILE = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What describes the file it was read from: with the first, transformers would take the ids from config.json again.
_OF_THE_FILE = ("_from_model_config", "transformers_version")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What a model's folder says about generation; as transformers does, from config.json where the file itself is missing."""
    if (folder / FILE).is_file():
        return {k: v for k, v in _object(folder / FILE).items() if k not in _OF_THE_FILE}
    if (folder / "config.json").is_file():
        config = _object(folder / "config.json")
        return {name: config[name] for name in _IDS if config.get(name) is not None}
    return {}


def end_ids(config: Mapping[str, Any]) -> list[int]:
    """The ends of a text that it lists: one, several or none."""
    found = config.get("eos_token_id")
    return [end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int)]


def generation_config(
    known: Mapping[str, Any], ends: Iterable[int], *, bos_id: int | None, pad_id: int | None
) -> dict[str, Any]:
    """The file for a model that stops at `ends`; the rest is as its base had it (`known`)."""
    listed = list(dict.fromkeys(ends))
    ids = {
        "bos_token_id": bos_id,
        "eos_token_id": listed[0] if len(listed) == 1 else listed,
        "pad_token_id": pad_id,
    }
    kept = {name: value for name, value in known.items() if name not in _IDS}
    return kept | {name: value for name, value in ids.items() if value is not None and value != []}


def read_pad_token(folder: Path) -> str | None:
    """The token that a folder's tokenizer pads with, where it names one."""
    file = folder / "tokenizer_config.json"
    named = _object(file).get("pad_token") if file.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}); fix it, or remove it.") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} must hold one JSON object: found {type(content).__name__}.")
    return content
