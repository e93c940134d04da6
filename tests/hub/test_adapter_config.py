"""What adapter_config.json says of an adapter is what it is, in numbers that are not round, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rush.hub.peft import CONFIG, read_peft, save_adapter
from rush.models import build_model, shape_of
from rush.models.adapters import AdapterSpec, adapt, init_adapters


@pytest.mark.parametrize("alpha", [8.0, 6.5, 0.25])
def test_alpha_is_written_as_it_is(alpha: float, tmp_path: Path) -> None:
    model = build_model(shape_of("llama-tiny"))
    model.init_weights(0)
    spec = AdapterSpec(rank=4, alpha=alpha)
    adapt(model, {"blocks.0.attention.q": spec})
    init_adapters(model, 0)
    save_adapter(tmp_path, model, None)
    written = json.loads((tmp_path / CONFIG).read_text())
    assert (written["r"], written["lora_alpha"]) == (4, alpha)
    found = read_peft(tmp_path, model.shape)
    assert found.specs == {"blocks.0.attention.q": spec}
    assert torch.equal(
        found.tensors["blocks.0.attention.q.adapter.a"], model.get_parameter("blocks.0.attention.q.adapter.a")
    )
