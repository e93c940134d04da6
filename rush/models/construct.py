"""From a shape to a module.

Under `torch.device("meta")` a model has shapes and no memory: the way to build one that is going to
be sharded, or filled from a file. Elsewhere the model is ready to use, with the seed's weights. It is
built on meta then, too, because torch's own initialization would be thrown away.
"""

from __future__ import annotations

import torch

from rush.models.decoder import Decoder
from rush.models.gpt2 import GPT2
from rush.models.llama import Llama
from rush.models.shape import Shape


def build_model(shape: Shape, *, seed: int = 0) -> Decoder:
    """The plain model of a shape on the default device, initialized; on meta, without memory or values.

    From meta: `.to_empty(device=...)`, then `.init_weights(seed)` or `.load_state_dict(...)`.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = GPT2(shape) if shape.family == "gpt2" else Llama(shape)
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed)
    return model
