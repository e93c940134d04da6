"""Merging adapters into a quantized base gives one dtype, whether a layer has an adapter or not."""

from __future__ import annotations

import pytest
import torch

from rush.models.adapters import adapters, merged_state
from rush.models.quantized import QuantizedLinear
from tests.techniques.tiny_runs import SHORT, make_run


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as the embedding", "bf16"])
def test_layers_without_an_adapter_are_dequantized_to_the_dtype_of_the_others(
    dtype: torch.dtype | None,
) -> None:
    pytest.importorskip("torchao")
    model = make_run("{name='int8_base', backend='torchao', rank=2, roles='qv'}", overrides=SHORT).model
    model.embedding.to(torch.bfloat16)
    adapted = {name for name, _, _ in adapters(model)}
    quantized = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert adapted < quantized.keys(), "some have an adapter, some have none"
    merged = merged_state(model, dtype)
    assert {name: merged[f"{name}.weight"].dtype for name in quantized} == dict.fromkeys(
        quantized, torch.bfloat16
    )
    for name in quantized.keys() - adapted:
        exact = quantized[name].dense_weight(torch.float32)
        torch.testing.assert_close(merged[f"{name}.weight"].float(), exact, rtol=2**-8, atol=0)
