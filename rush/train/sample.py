"""A piece of text from the model as it is now: the quickest way to see that it learns."""

from __future__ import annotations

from dataclasses import replace

import torch

from rush.data import Tokenizer
from rush.data.conversations import find_template, read_document_manifest
from rush.errors import DataError
from rush.generate import generate
from rush.models import Decoder, build_model
from rush.models.adapters import share_weights
from rush.recipe import Recipe
from rush.train.answers import answer_ends, encode_question
from rush.train.build import Run
from rush.train.corpus import Corpus


def sample_text(run: Run, corpus: Corpus) -> str:
    """Prompt and continuation; the seed is the run's, so a resumed run samples the same."""
    settings = run.recipe.run
    prompt, ends = sample_prompt(run.recipe, corpus)
    room = max(0, run.model.shape.context - len(prompt))
    if room == 0:
        return corpus.tokenizer.decode(prompt)
    ids = generate(
        plain_twin(run.model),
        prompt,
        max_new_tokens=min(settings.sample_tokens, room),
        temperature=0.8,
        top_k=50,
        stop_ids=[end for end in ends if end < run.model.shape.vocab_size],
        seed=settings.seed,
    )
    return corpus.tokenizer.decode([*prompt, *ids])


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


def plain_twin(model: Decoder) -> Decoder:
    """The plain model over the same weights, without what techniques changed.

    Techniques shape the training step (whole sequences, compiled graphs); decoding with a cache is
    another shape of work, and the plain model does it for every recipe alike.
    """
    with torch.device("meta"):
        twin = build_model(model.shape)
    share_weights(model, twin)
    twin.init_buffers()
    return twin
