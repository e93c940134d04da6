"""Builds the model of a shape.

Under `torch.device("meta")` it has shapes and no memory, to be sharded or loaded from a file. On other devices it is
initialized from the seed. It is built on meta there too: torch's own initialization would be overwritten.
"""

from __future__ import annotations

import torch

from rush.models.decoder import Decoder
from rush.models.gpt2 import GPT2
from rush.models.llama import Llama
from rush.models.shape import Shape


def build_model(shape: Shape, *, seed: int = 0) -> Decoder:
    """The plain model of a shape on the default device, initialized; on meta, without memory.

    From meta: `.to_empty(device=...)`, then `.init_weights(seed)` or `.load_state_dict(...)`.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = GPT2(shape) if shape.learned_positions else Llama(shape)
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed)
    return model
