from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rush.errors import DataError, MachineError, RecipeError
from rush.hub.weight_names import places
from rush.hub.weights import load_hf_folder, save_hf_folder
from rush.models import Decoder, Shape

Lively = Callable[[Shape], Decoder]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(family_shape: Shape, lively: Lively, tmp_path: Path) -> Path:
    save_hf_folder(tmp_path / "hf", lively(family_shape), family_shape)
    return tmp_path / "hf"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- round trips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_save_and_load_keep_every_bit_for_any_shard_size(
    small_shape: Shape, limit: int, lively: Lively, tmp_path: Path
) -> None:
    model = lively(small_shape)
    save_hf_folder(tmp_path / "hf", model, small_shape, max_shard_bytes=limit)
    shape, state = load_hf_folder(tmp_path / "hf")
    assert shape == small_shape
    assert same(state, model.state_dict())
    assert all(tensor.is_contiguous() for tensor in state.values())
    files = sorted(tmp_path.glob("hf/*.safetensors"))
    assert (len(files) > 1) == (tmp_path / "hf" / INDEX).exists() == (limit < 10**9)
    if limit == 1:
        assert len(files) == len({place.stored for place in places(shape).values()})
    assert not list(tmp_path.glob("hf/.*"))


def test_shards_respect_the_limit_and_the_index_matches(
    family_shape: Shape, lively: Lively, tmp_path: Path
) -> None:
    model = lively(family_shape)
    save_hf_folder(tmp_path, model, family_shape, max_shard_bytes=50_000)
    index = json.loads((tmp_path / INDEX).read_text())
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 50_000
        found |= dict.fromkeys(tensors, file.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert sorted(found.values())[-1].startswith("model-0000")


def test_a_dtype_can_be_chosen_and_is_written_down(
    family_shape: Shape, lively: Lively, tmp_path: Path
) -> None:
    model = lively(family_shape)
    save_hf_folder(tmp_path, model, family_shape, dtype=torch.bfloat16, eos_id=3)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"]) == ("bfloat16", 3)
    _, state = load_hf_folder(tmp_path)
    assert same(state, {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})


def test_a_state_can_be_exported_without_a_model(family_shape: Shape, lively: Lively, tmp_path: Path) -> None:
    state = lively(family_shape).state_dict()
    save_hf_folder(tmp_path, state, family_shape)
    assert same(load_hf_folder(tmp_path)[1], state)


# --- the varieties of files ------------------------------------------------------------------------------


def test_the_base_models_prefix_may_be_absent(folder: Path) -> None:
    before = load_hf_folder(folder)[1]

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.").removeprefix("model.")] = tensors.pop(name)

    edit(folder, strip)
    assert same(load_hf_folder(folder)[1], before)


def test_old_buffers_in_the_weights_are_ignored(folder: Path) -> None:
    before = load_hf_folder(folder)[1]

    def add(tensors: dict[str, torch.Tensor]) -> None:
        gpt2 = "transformer.wte.weight" in tensors
        tensors["h.0.attn.bias" if gpt2 else "model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    edit(folder, add)
    assert same(load_hf_folder(folder)[1], before)


def test_a_tied_head_stored_twice_is_loaded_once_and_a_different_one_is_refused(
    folder: Path, family_shape: Shape
) -> None:
    before = load_hf_folder(folder)[1]
    embedding = before["embedding.weight"]
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert same(load_hf_folder(folder)[1], before)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(DataError, match="tie_word_embeddings"):
        load_hf_folder(folder)


# --- bad folders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_a_pickle_is_refused_and_never_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"not even a pickle")
    for path in (folder, folder / name):
        with pytest.raises(DataError, match=r"pickle.*safetensors.*save_pretrained") as caught:
            load_hf_folder(path)
        assert name in str(caught.value)


def test_a_pickle_next_to_safetensors_is_ignored(folder: Path) -> None:
    _, before = load_hf_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"whatever")
    _, after = load_hf_folder(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def first_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if name.endswith(("c_attn.weight", "q_proj.weight")))


def test_missing_unknown_and_misshapen_tensors_are_named(folder: Path) -> None:
    whole = load_file(folder / WEIGHTS)
    name = first_matrix(whole)
    short = name.removeprefix("transformer.").removeprefix("model.")

    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(DataError, match="lacks the tensor") as caught:
        load_hf_folder(folder)
    assert short in str(caught.value)

    save_file(whole | {"model.extra.weight": torch.ones(2)}, folder / WEIGHTS)
    with pytest.raises(DataError, match=r"extra\.weight.*does not have"):
        load_hf_folder(folder)

    save_file(whole | {name: torch.ones(5, 7)}, folder / WEIGHTS)
    with pytest.raises(DataError, match=r"\(5, 7\)") as caught:
        load_hf_folder(folder)
    assert short in str(caught.value)

    save_file(whole | {name: whole[name].to(torch.int8)}, folder / WEIGHTS)
    with pytest.raises(DataError, match=r"I8.*Quantized"):
        load_hf_folder(folder)


@pytest.mark.parametrize("family_shape", ["gpt2"], indirect=True)
def test_a_gpt2_weight_stored_as_out_in_is_refused(
    lively: Lively, tmp_path: Path, family_shape: Shape
) -> None:
    save_hf_folder(tmp_path, lively(family_shape), family_shape)
    edit(
        tmp_path, lambda tensors: tensors.update({"transformer.h.0.attn.c_attn.weight": torch.ones(108, 36)})
    )
    with pytest.raises(DataError, match=r"\(108, 36\).*\(36, 108\)"):
        load_hf_folder(tmp_path)


def test_a_tensor_under_two_names_is_refused(folder: Path) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        name = first_matrix(tensors)
        tensors[name.removeprefix("transformer.").removeprefix("model.")] = tensors[name].clone()

    edit(folder, double)
    with pytest.raises(DataError, match="twice"):
        load_hf_folder(folder)


def test_broken_and_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Hugging Face folder"):
        load_hf_folder(tmp_path / "nowhere")
    config = (folder / "config.json").read_text()
    for content, words in (("{", "not valid JSON"), ("[1]", "one JSON object")):
        (folder / "config.json").write_text(content)
        with pytest.raises(DataError, match=words):
            load_hf_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"lacks config\.json"):
        load_hf_folder(folder)
    (folder / "config.json").write_text(config)
    weights = (folder / WEIGHTS).read_bytes()
    for damaged in (b"", b"garbage", weights[: len(weights) // 2]):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(DataError, match="not a whole safetensors file"):
            load_hf_folder(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(DataError, match="holds no weights"):
        load_hf_folder(folder)


def test_an_index_with_wrong_entries_is_refused(family_shape: Shape, lively: Lively, tmp_path: Path) -> None:
    save_hf_folder(tmp_path, lively(family_shape), family_shape, max_shard_bytes=50_000)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = tmp_path / sorted(set(index["weight_map"].values()))[1]

    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DataError, match=shard.name):
        load_hf_folder(tmp_path)
    shard.write_bytes(content)

    for name in ("../elsewhere.safetensors", "/etc/passwd", "shard.bin"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(DataError, match="beside it"):
            load_hf_folder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(DataError, match="lists no weights"):
        load_hf_folder(tmp_path)


# --- bad exports -----------------------------------------------------------------------------------------


def test_an_export_does_not_mix_with_weights_that_are_there(
    folder: Path, family_shape: Shape, lively: Lively
) -> None:
    before = (folder / WEIGHTS).read_bytes()
    with pytest.raises(DataError, match="already holds weights"):
        save_hf_folder(folder, lively(family_shape), family_shape, max_shard_bytes=10_000)
    assert (folder / WEIGHTS).read_bytes() == before


def test_an_export_that_cannot_be_written_or_does_not_fit_says_so(
    family_shape: Shape, lively: Lively, tmp_path: Path
) -> None:
    model = lively(family_shape)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="could not be written"):
        save_hf_folder(tmp_path / "file" / "hf", model, family_shape)
    with pytest.raises(DataError, match=r"embedding\.weight.*257.*258|embedding\.weight.*258.*257"):
        save_hf_folder(tmp_path / "hf", model, replace(family_shape, vocab_size=258))
    with pytest.raises(RecipeError, match="max_shard_bytes"):
        save_hf_folder(tmp_path / "hf", model, family_shape, max_shard_bytes=0)
    assert not (tmp_path / "hf").exists()
