"""Whether a folder, opened by transformers, computes what the run it came from computes."""

from __future__ import annotations

from pathlib import Path

import torch

from rush.train.folders import load_model


@torch.no_grad()
def largest_difference(run: Path, exported: Path, sequence: int) -> float:
    """The largest difference of two logits, as a share of the largest logit; both computed in fp32 on the CPU."""
    from transformers import AutoModelForCausalLM

    ours = load_model(run, device="cpu").float()
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    length, vocabulary = min(sequence, ours.shape.context), ours.shape.vocab_size
    tokens_bt = torch.arange(2 * length).mul(7919).remainder(vocabulary).view(2, length)
    expected_btv, found_btv = ours(tokens_bt), theirs(tokens_bt).logits
    return float((found_btv - expected_btv).abs().max() / expected_btv.abs().max())
