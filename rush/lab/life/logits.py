"""Whether transformers (and PEFT) compute the same logits from an exported folder as the run itself.

Legend: b rows, t positions, v entries of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rush.hub.folders import load_model

TOKENS = 256
"""Maximum row length: enough to check the positions."""


@torch.no_grad()
def largest_difference(
    run: Path, exported: Path, sequence: int, device: str = "cpu", adapter: Path | None = None
) -> float:
    """The largest difference of two logits, as a share of the largest logit; both models are computed in fp32.

    With `adapter`, PEFT puts that folder on the model in `exported`.
    """
    ours = load_model(run, device=device).float()
    length, vocabulary = min(sequence, ours.shape.context, TOKENS), ours.shape.vocab_size
    tokens_bt = torch.arange(2 * length, device=device).mul(7919).remainder(vocabulary).view(2, length)
    expected_btv: Tensor = ours(tokens_bt)
    del ours  # a large model at a time
    found_btv = _opened(exported, adapter, device)(tokens_bt).logits
    return float((found_btv - expected_btv).abs().max() / expected_btv.abs().max())


def _opened(folder: Path, adapter: Path | None, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    # As it is stored, and only then to fp32: a host takes half a minute to widen a billion weights. Into a new model, because
    # what is no weight was rounded, too: the scale of Gemma's embedding.
    stored: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    stored.config.dtype = torch.float32
    with torch.device(device):
        model = type(stored)(stored.config)
    model.load_state_dict(stored.state_dict())
    model.eval()
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter).float()
