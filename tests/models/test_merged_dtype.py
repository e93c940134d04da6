"""A merged model has one dtype, whether a quantized layer had an adapter or not."""

from __future__ import annotations

import pytest
import torch

from rush.models import build_model, shape_of
from rush.models.adapters import AdapterSpec, adapt, init_adapters, merged_state
from rush.models.quantized import quantize_linears
from rush.models.quantized_formats import Form


@pytest.mark.parametrize("asked", [None, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_every_layer_of_a_merged_quantized_base_has_the_dtype_of_the_model(
    kind: str, asked: torch.dtype | None
) -> None:
    pytest.importorskip("torchao")
    with torch.device("meta"):
        model = build_model(shape_of("llama-tiny"))
        quantize_linears(model, Form(kind, "torchao"))
    model.bfloat16().to_empty(device="cpu")
    model.init_weights(0)
    adapt(model, {"blocks.0.attention.q": AdapterSpec(rank=2, alpha=4)})
    init_adapters(model, 0)
    state = merged_state(model, asked)
    layers = [
        f"{name}.weight" for role, named in model.linears().items() if role != "head" for name, _ in named
    ]
    assert len(layers) == 7 * model.shape.num_layers
    assert {name: state[name].dtype for name in layers} == dict.fromkeys(layers, asked or torch.bfloat16)
