"""The tokenizer that belongs to a folder: a run's, a model's, or the one an adapter was trained with; and where its texts end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rush.data import Tokenizer
from rush.data.conversations import find_template
from rush.hub.answers import answer_ends
from rush.hub.generation_config import (
    end_ids,
    generation_config,
    read_generation_config,
    read_pad_token,
)
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder

Note = Callable[[str], None]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a run folder or a Hugging Face folder; one that learned to chat, with the template it learned."""
    folder = Path(path)
    run = RunFolder(folder)
    tokenizer = Tokenizer.load(run.tokenizer if run.tokenizer.is_dir() else folder)
    recipe = load_recipe(str(run.recipe)) if run.recipe.is_file() else None
    if recipe is None or recipe.objective.kind == "lm":
        return tokenizer
    return dataclasses.replace(tokenizer, chat_template=find_template(recipe.data.template, tokenizer).source)


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder brings a tokenizer: many of PEFT's do, those of older versions of rush do not."""
    folder = Path(path)
    run = RunFolder(folder)
    return ((run.tokenizer if run.tokenizer.is_dir() else folder) / "tokenizer.json").is_file()


def adapted_tokenizer(base: str | Path, adapter: str | Path | None, vocab_size: int, note: Note) -> Tokenizer:
    """The tokenizer for a base with an adapter on it: what the adapter was trained with, where its folder brings it.

    `vocab_size` is the model's: an adapter's tokenizer that numbers further than that (a token for padding was added) gives its
    template only.
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


def text_ends(path: str | Path, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens at which a model from this folder stops: of a chat model, the end of a turn as well as the end of a text."""
    ends = answer_ends(tokenizer) if tokenizer.chat_template is not None else (tokenizer.eos_id,)
    said = end_ids(_generation(path))
    return [end for end in dict.fromkeys((*ends, *said)) if 0 <= end < vocab_size]


def generation_settings(path: str | Path, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """What an exported model's generation_config.json says: its ends, and what the model it came from said besides."""
    known = _generation(path)
    ends = text_ends(path, tokenizer, vocab_size)
    pad = known.get("pad_token_id")
    if not isinstance(pad, int):  # rush itself needs no padding, so only the folders on the way can name it
        names = (read_pad_token(folder) for folder in _origins(path))
        pad = next((tokenizer.special_ids[name] for name in names if name in tokenizer.special_ids), None)
    inside = isinstance(pad, int) and 0 <= pad < vocab_size
    return generation_config(known, ends, bos_id=tokenizer.bos_id, pad_id=pad if inside else None)


def _origins(path: str | Path) -> Iterator[Path]:
    """A folder, and those that its weights came from: what a run started from, what that started from …"""
    seen: list[Path] = []
    folder: Path | None = Path(path)
    while folder is not None and folder.is_dir() and folder not in seen:
        seen.append(folder)
        yield folder
        run = RunFolder(folder)
        named = load_recipe(str(run.recipe)).model.init_from if run.recipe.is_file() else None
        folder = None if named is None else Path(named)


def _generation(path: str | Path) -> dict[str, Any]:
    """What the nearest Hugging Face folder among a model's origins says about generation."""
    return next((found for folder in _origins(path) if (found := read_generation_config(folder))), {})
