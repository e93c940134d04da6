"""A piece of text from the model as it is now: the quickest way to see that it learns.

A sample is worth no training: where memory runs out for it, it is tried with what was held unused given back, then shorter,
and at last left out. The run's rows and a note say so. A model in parts is put together for it on rank 0: in host memory, or,
if it is in stages and there is room, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rush.checkpoint.frozen_base import gather_device, gathered_model
from rush.data import Tokenizer
from rush.data.conversations import find_template, read_document_manifest
from rush.errors import DataError
from rush.generate import PREFILL_TOKENS, generate
from rush.hardware import out_of_memory
from rush.hardware.memory_use import free_unused
from rush.hub.answers import answer_ends, encode_question
from rush.models import Decoder, build_model
from rush.models.adapters import share_weights
from rush.parallel.sharded import is_sharded
from rush.recipe import Recipe
from rush.train.build import Run
from rush.train.corpus import Corpus

SHORTER = 4
"""Of a sample that does not fit, the part that is tried next."""
SHORT_PREFILL = 16
"""Tokens of its prompt that are read at once."""


@dataclass
class Sampler:
    """The samples of one run: what each row of `samples.jsonl` says, and a note where one could not be as asked."""

    note: Callable[[str], None]
    _told: set[str] = field(default_factory=set)

    def row(self, run: Run | None, corpus: Corpus, recipe: Recipe, step: int) -> dict[str, Any]:
        """A sample of the whole model (see `gathered_run`); None where it was not put together."""
        found: dict[str, Any] = {"step": step, "prompt": recipe.run.sample_prompt}
        if run is None:
            return found | self._without("the host of rank 0 has no memory to put the model together")
        asked = recipe.run.sample_tokens
        for tokens in (asked, asked, max(1, asked // SHORTER)):
            short = tokens < asked
            try:
                with run.held():
                    text = sample_text(run, corpus, tokens, SHORT_PREFILL if short else PREFILL_TOKENS)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            else:
                return found | {"text": text} | (self._shorter(tokens, asked) if short else {})
            free_unused(
                run.device.type
            )  # out of the except block: an error holds what the frames it passed through hold
        return found | self._without(f"out of memory on {run.machine.summary()}")

    def _shorter(self, tokens: int, asked: int) -> dict[str, str]:
        why = f"out of memory: {tokens} tokens in place of {asked}"
        self._tell("shorter", f"A sample ran {why}; the run goes on.")
        return {"why": why}

    def _without(self, why: str) -> dict[str, str | None]:
        self._tell("without", f"A sample was left out ({why}); the run goes on without it.")
        return {"text": None, "why": why}

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self.note(text)


def sample_text(
    run: Run, corpus: Corpus, tokens: int | None = None, prefill_tokens: int = PREFILL_TOKENS
) -> str:
    """Prompt and continuation; the seed is the run's, so a resumed run samples the same."""
    prompt, ids = sample_ids(run, corpus, tokens, prefill_tokens)
    return corpus.tokenizer.decode([*prompt, *ids])


def sample_ids(
    run: Run, corpus: Corpus, tokens: int | None = None, prefill_tokens: int = PREFILL_TOKENS
) -> tuple[list[int], Iterable[int]]:
    """The prompt, and what continues it, drawn as it is asked for; memory is taken with the first."""
    settings = run.recipe.run
    prompt, ends = sample_prompt(run.recipe, corpus)
    room = max(0, run.model.shape.context - len(prompt))
    if room == 0:
        return prompt, ()
    return prompt, generate(
        plain_model(run.model),
        prompt,
        max_new_tokens=min(settings.sample_tokens if tokens is None else tokens, room),
        temperature=0.8,
        top_k=50,
        stop_ids=[end for end in ends if end < run.model.shape.vocab_size],
        seed=settings.seed,
        prefill_tokens=prefill_tokens,
    )


def gathered_run(run: Run) -> Run | None:
    """The run with its whole model on rank 0, for what only rank 0 does; None where its host has no room for that. Of a model
    in parts all ranks must ask for it."""
    if run.ranks.stages is None and not any(is_sharded(parameter) for parameter in run.model.parameters()):
        return run
    place = run.ranks.on_rank0(lambda: str(gather_device(run.model) or ""))
    if not place:
        return None
    whole = gathered_model(run.model, run.ranks, torch.device(place) if run.ranks.main else None)
    return run if whole is None else replace(run, model=whole)


def sample_prompt(recipe: Recipe, corpus: Corpus) -> tuple[list[int], tuple[int, ...]]:
    """The tokens to go on from, and those that end the text.

    Where conversations are trained on, the recipe's prompt is a user's turn in the run's own template, and the sample ends with
    the turn that answers it. A prompt with special tokens in it is one that its author has written out, and stays as it is.
    """
    text, tokenizer = recipe.run.sample_prompt, corpus.tokenizer
    plain = tokenizer.encode(text) or [tokenizer.eos_id]
    if not _learns_turns(recipe, corpus):
        return plain, (tokenizer.eos_id,)
    template = find_template(recipe.data.template, tokenizer)
    chatting = replace(tokenizer, chat_template=template.source)
    if not text.strip() or _written_out(text, tokenizer):
        return plain, answer_ends(chatting)
    try:
        return encode_question(chatting, text), answer_ends(chatting)
    except DataError:  # a template that will not have a question alone: no reason to end a training
        return plain, answer_ends(chatting)


def _learns_turns(recipe: Recipe, corpus: Corpus) -> bool:
    """Whether the run trains on conversations: neither pretraining does, nor fine-tuning on plain texts."""
    if recipe.objective.kind == "lm":
        return False
    return set(read_document_manifest(corpus.folder).total.formats) != {"text"}


def _written_out(text: str, tokenizer: Tokenizer) -> bool:
    return any(name in text for name in tokenizer.special_ids)


def plain_model(model: Decoder) -> Decoder:
    """The plain model over the same weights, without what techniques changed.

    Techniques shape the training step (whole sequences, compiled graphs); decoding with a cache is
    another shape of work, and the plain model does it for every recipe alike.
    """
    with torch.device("meta"):
        twin = build_model(model.shape)
    share_weights(model, twin)
    twin.init_buffers()
    return twin
