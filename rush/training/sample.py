"""Text samples during training.

A sample never ends a run: after an OOM it is retried with the allocator's cache emptied, then shorter, and
finally skipped with a note. A sharded or pipelined model is gathered on rank 0 for it: in host memory, or, if
it is pipelined and fits, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace

import torch

from rush.checkpoint.frozen_base import gather_device, gathered_model
from rush.data import Tokenizer
from rush.data.conversations import find_template, read_document_manifest
from rush.errors import DataError
from rush.hardware import out_of_memory
from rush.hardware.memory_use import free_cached
from rush.hub.answers import answer_stop_ids, encode_question
from rush.models import Decoder, build_model
from rush.models.adapters import share_weights
from rush.parallel.sharded import is_sharded
from rush.recipe import Recipe
from rush.records.metrics import SampleRow
from rush.sampling import PREFILL_TOKENS, generate
from rush.training.build import Run
from rush.training.corpus import Corpus

SHORTER = 4
"""The divisor of the tokens of a sample that does not fit."""
SHORT_PREFILL = 16
"""Prefill chunk of a shorter sample."""


@dataclass
class Sampler:
    """The rows of `samples.jsonl`, with a note where a sample is shorter or left out."""

    note: Callable[[str], None]
    _noted: set[str] = field(default_factory=set)

    def row(self, run: Run | None, corpus: Corpus, recipe: Recipe, step: int) -> SampleRow:
        """The row of a sample; `run` is that of `gathered_run`."""
        found: SampleRow = {"step": step, "prompt": recipe.run.sample_prompt}
        if run is None:
            return self._without(found, "the host of rank 0 has no memory to gather the model")
        asked = recipe.run.sample_tokens
        for tokens in (asked, asked, max(1, asked // SHORTER)):
            short = tokens < asked
            try:
                with run.held():
                    text = sample_text(run, corpus, tokens, SHORT_PREFILL if short else PREFILL_TOKENS)
            except (MemoryError, RuntimeError, OSError) as error:
                if not out_of_memory(error):
                    raise
            else:
                found["text"] = text
                if short:
                    found["why"] = f"out of memory: {tokens} tokens in place of {asked}"
                    self._note_once("shorter", f"A sample ran {found['why']}; training continues.")
                return found
            # Out of the except block: an error holds what the frames it passed through hold.
            free_cached(run.device.type)
        return self._without(found, f"out of memory on {run.machine.summary()}")

    def _without(self, row: SampleRow, why: str) -> SampleRow:
        self._note_once("without", f"A sample was left out ({why}); training continues.")
        row["text"], row["why"] = None, why
        return row

    def _note_once(self, kind: str, text: str) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)


def sample_text(
    run: Run, corpus: Corpus, tokens: int | None = None, prefill_tokens: int = PREFILL_TOKENS
) -> str:
    """Prompt and continuation, from the run's seed, so a resumed run samples the same."""
    prompt, ids = sample_ids(run, corpus, tokens, prefill_tokens)
    return corpus.tokenizer.decode([*prompt, *ids])


def sample_ids(
    run: Run, corpus: Corpus, tokens: int | None = None, prefill_tokens: int = PREFILL_TOKENS
) -> tuple[list[int], Iterable[int]]:
    """The prompt, and an iterator over the generated tokens; the first one allocates the memory."""
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
    """The run with its full model gathered on rank 0; None if its host has no memory for that. A collective where the model is
    sharded or pipelined."""
    if run.ranks.stages is None and not any(is_sharded(parameter) for parameter in run.model.parameters()):
        return run
    place = run.ranks.on_rank0(lambda: str(gather_device(run.model) or ""))
    if not place:
        return None
    whole = gathered_model(run.model, run.ranks, torch.device(place) if run.ranks.main else None)
    if whole is None:
        return run
    gathered = copy(run)
    gathered.model = whole
    return gathered


def sample_prompt(recipe: Recipe, corpus: Corpus) -> tuple[list[int], tuple[int, ...]]:
    """The prompt's tokens and the stop tokens.

    In training on conversations the recipe's prompt is a user's turn in the run's chat template, and the sample ends with the
    turn that answers it. A prompt that contains special tokens is used unchanged.
    """
    text, tokenizer = recipe.run.sample_prompt, corpus.tokenizer
    plain = tokenizer.encode(text) or [tokenizer.eos_id]
    if not _learns_turns(recipe, corpus):
        return plain, (tokenizer.eos_id,)
    template = find_template(recipe.data.template, tokenizer)
    chatting = replace(tokenizer, chat_template=template.source)
    if not text.strip() or _written_out(text, tokenizer):
        return plain, answer_stop_ids(chatting)
    try:
        return encode_question(chatting, text), answer_stop_ids(chatting)
    except DataError:  # a template that refuses a question alone must not end a training
        return plain, answer_stop_ids(chatting)


def _learns_turns(recipe: Recipe, corpus: Corpus) -> bool:
    """Whether the run trains on conversations, not on plain text."""
    if recipe.objective.kind == "lm":
        return False
    return set(read_document_manifest(corpus.folder).total.formats) != {"text"}


def _written_out(text: str, tokenizer: Tokenizer) -> bool:
    return any(name in text for name in tokenizer.special_ids)


def plain_model(model: Decoder) -> Decoder:
    """The plain model on the same weights, without the techniques' changes, which serve the training step and not decoding
    with a KV cache."""
    with torch.device("meta"):
        plain = build_model(model.shape)
    share_weights(model, plain)
    plain.init_buffers()
    return plain
