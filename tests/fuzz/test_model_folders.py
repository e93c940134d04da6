"""Any content of a stranger's model folder ends in a model or in one message; nothing of it is executed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rush.hub.folders import load_model, read_adapter
from rush.hub.generation_config import eos_ids, generation_config, read_generation_config, read_pad_token
from rush.hub.peft import peft_base, save_adapter
from rush.hub.weights import locate_hf_tensors, save_hf_folder
from rush.models import Shape, build_model
from rush.models.adapters import AdapterSpec, adapt, init_adapters
from rush.models.rope_scaling import RopeScaling
from tests.fuzz.harness import Mutate, cases, fuzz
from tests.fuzz.mutations import mutate, mutate_bytes, mutate_header

GPT2 = Shape("gpt2", 16, 8, 8, 1, 2, 2, 4, 16, 1e-5, tied_head=True)
LLAMA = Shape(
    "llama", 16, 8, 8, 1, 2, 1, 4, 16, 1e-5, tied_head=False, rope_theta=1e4, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 4)
)  # fmt: skip
ADAPTED = ("blocks.0.attention.q", "blocks.0.mlp.down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 in one file, a Llama in several, and an adapter for it."""
    path = tmp_path_factory.mktemp("models")
    for shape in (GPT2, LLAMA):
        model = build_model(shape)
        model.init_weights(0)
        several = 10**9 if shape is GPT2 else 1500
        generation = {"eos_token_id": [1, 2], "temperature": 0.5}
        save_hf_folder(path / shape.family, model, shape, several, generation=generation)
        (path / shape.family / "tokenizer_config.json").write_text('{"pad_token": {"content": "<pad>"}}')
    adapt(model, dict.fromkeys(ADAPTED, AdapterSpec(2, 4.0, False, False)))
    init_adapters(model, 0)
    save_adapter(path / "adapter", model, "base")
    return path


def use(path: Path) -> None:
    """What the commands do with a model folder."""
    settings = read_generation_config(path)
    json.dumps(generation_config(settings, eos_ids(settings), bos_id=None, pad_id=None))
    read_pad_token(path)
    locate_hf_tensors(path)
    for offload in ("none", "disk"):
        model = load_model(path, offload=offload)
        with torch.inference_mode():
            model(torch.zeros(1, 4, dtype=torch.long))


def use_adapter(path: Path) -> None:
    peft_base(path)
    read_adapter(path, LLAMA)
    load_model(path.parent / "llama", adapter=path)


HEADERS = (mutate_header, mutate_header, mutate_header, mutate_bytes)
FILES: dict[str, Sequence[Mutate]] = {
    "gpt2/config.json": [mutate],
    "llama/config.json": [mutate],
    "llama/model.safetensors.index.json": [mutate],
    "llama/generation_config.json": [mutate],
    "llama/tokenizer_config.json": [mutate],
    "gpt2/model.safetensors": HEADERS,
    "adapter/adapter_config.json": [mutate],
    "adapter/adapter_model.safetensors": HEADERS,
}


@pytest.mark.parametrize("name", FILES)
@cases(0.01)
def test_any_content_of_a_model_folder(name: str, count: int, folder: Path) -> None:
    file = folder / name
    seed = file.read_bytes()

    def read(content: bytes) -> None:
        file.write_bytes(content)
        (use_adapter if name.startswith("adapter") else use)(file.parent)

    try:
        fuzz(f"folder/{name.replace('/', '-')}", read, [seed], count, FILES[name])
    finally:
        file.write_bytes(seed)
