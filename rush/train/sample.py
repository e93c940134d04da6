"""A piece of text from the model as it is now: the quickest way to see that it learns."""

from __future__ import annotations

import torch

from rush.data import Tokenizer
from rush.generate import generate
from rush.models import Decoder, build_model
from rush.models.adapters import share_weights
from rush.train.build import Run


def sample_text(run: Run, tokenizer: Tokenizer) -> str:
    """Prompt and continuation; the seed is the run's, so a resumed run samples the same."""
    settings = run.recipe.run
    prompt = tokenizer.encode(settings.sample_prompt) or [tokenizer.eos_id]
    room = run.model.shape.context - len(prompt)
    ids = generate(
        plain_twin(run.model),
        prompt,
        max_new_tokens=min(settings.sample_tokens, room),
        temperature=0.8,
        top_k=50,
        stop_ids=(tokenizer.eos_id,),
        seed=settings.seed,
    )
    return tokenizer.decode([*prompt, *ids])


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
