"""The tokenizer of a run, a model or an adapter, and its stop tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rush.data import Tokenizer
from rush.data.conversations import find_template
from rush.hub.answers import answer_stop_ids
from rush.hub.generation_config import (
    eos_ids,
    generation_config,
    read_generation_config,
    read_pad_token,
)
from rush.hub.remote import local_folder
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder

Note = Callable[[str], None]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a run folder or a Hugging Face folder; of a fine-tuned run, with the chat template of its training."""
    folder = local_folder(path)
    run = RunFolder(folder)
    tokenizer = Tokenizer.load(run.tokenizer if run.tokenizer.is_dir() else folder)
    recipe = load_recipe(str(run.recipe)) if run.recipe.is_file() else None
    if recipe is None or recipe.objective.kind == "lm":
        return tokenizer
    return dataclasses.replace(tokenizer, chat_template=find_template(recipe.data.template, tokenizer).source)


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder has a tokenizer: many PEFT folders do, those of older versions of rush do not."""
    folder = local_folder(path)
    run = RunFolder(folder)
    return ((run.tokenizer if run.tokenizer.is_dir() else folder) / "tokenizer.json").is_file()


def adapted_tokenizer(base: str | Path, adapter: str | Path | None, vocab_size: int, note: Note) -> Tokenizer:
    """The tokenizer for a base with an adapter: the one in the adapter's folder, if there is one.

    Of a tokenizer with ids beyond the model's `vocab_size` (an added padding token) only the chat template is used.
    """
    if adapter is None or not has_tokenizer(adapter):
        return load_tokenizer(base)
    theirs = load_tokenizer(adapter)
    if not has_tokenizer(base):
        return theirs
    own = load_tokenizer(base)
    template = theirs.chat_template if theirs.chat_template is not None else own.chat_template
    why = own.difference(theirs)
    if why is not None and theirs.vocab_size > vocab_size:
        note(
            f"The tokenizer of {adapter} has entries beyond the model's {vocab_size:,}: that of {base} is used, with the chat "
            "template of the adapter."
        )
        return dataclasses.replace(own, chat_template=template)
    if why is not None:
        note(f"{adapter} was trained with another tokenizer than that of {base}, and its own is used: {why}.")
    return dataclasses.replace(theirs, chat_template=template)


def text_stop_ids(path: str | Path, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Stop tokens of the model in this folder; for a chat model also the end-of-turn token."""
    ends = answer_stop_ids(tokenizer) if tokenizer.chat_template is not None else (tokenizer.eos_id,)
    listed = eos_ids(_generation(path))
    return [end for end in dict.fromkeys((*ends, *listed)) if 0 <= end < vocab_size]


def generation_settings(path: str | Path, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The generation_config.json of an exported model: its stop tokens, and the other settings of the model it came from."""
    known = _generation(path)
    ends = text_stop_ids(path, tokenizer, vocab_size)
    pad = known.get("pad_token_id")
    if not isinstance(pad, int):  # rush needs no padding token; the folders it came from may have one
        names = (read_pad_token(folder) for folder in _origins(path))
        pad = next((tokenizer.special_ids[name] for name in names if name in tokenizer.special_ids), None)
    inside = isinstance(pad, int) and 0 <= pad < vocab_size
    return generation_config(known, ends, bos_id=tokenizer.bos_id, pad_id=pad if inside else None)


def _origins(path: str | Path) -> Iterator[Path]:
    """A folder and those that its weights came from, following `model.init_from`."""
    seen: list[Path] = []
    folder: Path | None = local_folder(path)
    while folder is not None and folder.is_dir() and folder not in seen:
        seen.append(folder)
        yield folder
        run = RunFolder(folder)
        named = load_recipe(str(run.recipe)).model.init_from if run.recipe.is_file() else None
        folder = None if named is None else local_folder(named)


def _generation(path: str | Path) -> dict[str, Any]:
    """The generation config of the nearest Hugging Face folder among a model's origins."""
    return next((found for folder in _origins(path) if (found := read_generation_config(folder))), {})
