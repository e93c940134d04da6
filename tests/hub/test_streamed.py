"""A model whose blocks stay elsewhere gives the same logits, to the bit, and holds one block at a time."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.errors import RecipeError
from rush.hub.folders import load_model
from rush.hub.peft import save_adapter
from rush.hub.weights import save_hf_folder
from rush.models import SIZES, Decoder, Shape, build_model
from rush.models.adapters import AdapterSpec, adapt, adapters, chosen_linears, init_adapters, set_active
from rush.sampling import generate

ROOT = Path(__file__).resolve().parents[2]
TOKENS = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(0))


def small_shape(family: str, **changes: Any) -> Shape:
    values = {"vocab_size": 96, "hidden": 32, "num_layers": 3, "num_heads": 4, "head_dim": 8, "intermediate": 48,
              "context": 64, "num_kv_heads": 2 if family == "llama" else 4, **changes}  # fmt: skip
    return dataclasses.replace(SIZES["llama-tiny" if family == "llama" else "tiny"], **values)


@torch.no_grad()
def logits(model: Decoder) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS)
    return found


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_logits_and_the_text_are_the_same_to_the_bit(family: str, where: str, tmp_path: Path) -> None:
    shape = small_shape(family)
    save_hf_folder(tmp_path / "model", build_model(shape, seed=1), shape, max_shard_bytes=20_000)
    whole, streamed = load_model(tmp_path / "model"), load_model(tmp_path / "model", offload=where)
    assert torch.equal(logits(whole), logits(streamed))
    texts = [list(generate(model, [1, 2, 3], max_new_tokens=8, seed=4)) for model in (whole, streamed)]
    assert texts[0] == texts[1]
    # Between two passes nothing of a block is held.
    assert all(parameter.is_meta for parameter in streamed.blocks.parameters())
    assert not any(p.is_meta for name, p in streamed.named_parameters() if not name.startswith("blocks."))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_adapters_are_resident_and_can_be_disabled(where: str, tmp_path: Path) -> None:
    shape = small_shape("llama")
    model = build_model(shape, seed=1)
    save_hf_folder(tmp_path / "base", model, shape)
    adapt(model, {name: AdapterSpec(rank=2, alpha=4) for name, _ in chosen_linears(model, "all")})
    init_adapters(model, seed=2)
    for _, _, adapter in adapters(model):
        torch.nn.init.normal_(adapter.b, std=0.1)
    save_adapter(tmp_path / "adapter", model, None)
    streamed = load_model(tmp_path / "base", adapter=tmp_path / "adapter", offload=where)
    assert torch.equal(logits(streamed), logits(model))
    set_active(streamed, active=False)
    assert torch.equal(logits(streamed), logits(load_model(tmp_path / "base")))


def test_a_dora_adapter_is_refused_with_offload(tmp_path: Path) -> None:
    shape = small_shape("llama")
    model = build_model(shape, seed=1)
    save_hf_folder(tmp_path / "base", model, shape)
    adapt(model, {"blocks.0.mlp.up": AdapterSpec(rank=2, alpha=4, dora=True)})
    init_adapters(model, seed=2)
    save_adapter(tmp_path / "adapter", model, None)
    with pytest.raises(RecipeError, match=r"DoRA adapter, .* merge it first"):
        load_model(tmp_path / "base", adapter=tmp_path / "adapter", offload="disk")


MEASURE = """
import sys, torch
from rush.hardware.memory_use import memory_in_use, peak_memory_bytes, reset_peak_memory
from rush.hub.folders import load_model
torch.set_num_threads(1)

@torch.no_grad()
def use(folder):
    model = load_model(folder, offload=sys.argv[3])
    for _ in range(2):
        model(torch.arange(8)[None])

use(sys.argv[1])  # a small model first: libraries load what they need at their first use
before = memory_in_use("cpu")
reset_peak_memory("cpu")
use(sys.argv[2])
print(peak_memory_bytes("cpu") - before)
"""


def grown(small: Path, folder: Path, where: str) -> int:
    """Bytes that a fresh process grows by while it loads a model and runs it."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(folder), where],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_from_disk_the_process_never_holds_more_than_a_few_blocks(tmp_path: Path) -> None:
    shape = small_shape(
        "llama", hidden=384, num_heads=6, num_kv_heads=6, head_dim=64, intermediate=1536, num_layers=8
    )
    save_hf_folder(tmp_path / "model", build_model(shape, seed=1), shape)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    block = size / shape.num_layers
    assert size > 70e6
    save_hf_folder(tmp_path / "small", build_model(small_shape("llama"), seed=1), small_shape("llama"))
    assert grown(tmp_path / "small", tmp_path / "model", "none") > 0.9 * size
    # The block at work, the bytes of the tensor just read, and what the allocator keeps back.
    assert grown(tmp_path / "small", tmp_path / "model", "disk") < 3 * block
