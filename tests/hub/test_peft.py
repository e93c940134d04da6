"""Adapters on disk: PEFT reads ours and we read PEFT's with the same logits; what does not belong is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rush.checkpoint.frozen_base import base_identity, partial_identity
from rush.errors import DataError, RecipeError
from rush.hub.folders import load_model
from rush.hub.peft import CONFIG, WEIGHTS, attach_adapter, read_peft, save_adapter
from rush.hub.weights import save_hf_folder
from rush.models import SIZES, Decoder, Shape, build_model
from rush.models.adapters import (
    AdapterSpec,
    adapt,
    adapters,
    chosen_linears,
    init_adapters,
    merged_state,
    set_active,
)
from rush.models.fingerprints import base_fingerprint, fingerprint
from rush.models.quantized import quantize_linears
from rush.models.quantized_formats import Form

TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))


def small_shape(family: str) -> Shape:
    return dataclasses.replace(
        SIZES["llama-tiny" if family == "llama" else "tiny"], vocab_size=96, hidden=32, num_layers=2, num_heads=4,
        num_kv_heads=2 if family == "llama" else 4, head_dim=8, intermediate=48, context=32,
    )  # fmt: skip


def base(family: str, seed: int = 3) -> Decoder:
    model = build_model(small_shape(family), seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # they begin as zeros, which would hide mistakes with them
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def adapted(family: str, roles: str = "all", **options: Any) -> Decoder:
    """A model with adapters as training would leave them."""
    model = base(family)
    spec = AdapterSpec(rank=4, alpha=8, **options)
    adapt(model, {name: spec for name, _ in chosen_linears(model, roles)})
    init_adapters(model, seed=5)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, _, adapter in adapters(model):
            adapter.b.copy_(torch.randn(adapter.b.shape, generator=generator) * 0.05)
            if adapter.magnitude is not None:
                adapter.magnitude.mul_(1 + 0.1 * torch.randn(adapter.magnitude.shape, generator=generator))
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found.float()


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# fp32 rounds at 6e-8; two libraries add up the same dozen products in another order.
CLOSE = {"rtol": 0.0, "atol": 3e-6}
VARIANTS = [{}, {"dora": True}, {"scale_by_root": True}]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", VARIANTS, ids=["lora", "dora", "rslora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_our_adapters_with_the_same_logits(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(family, **options)
    save_hf_folder(tmp_path / "base", base(family), model.shape)
    save_adapter(tmp_path / "adapter", model, str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(reference(tmp_path / "base"), str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(theirs), logits(model), **CLOSE)
    assert not torch.allclose(logits(model), logits(base(family)), atol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"]
)
@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", ["q_proj", "v_proj", "down_proj"]), ("gpt2", ["c_attn", "c_proj"])],
)
def test_we_load_pefts_adapters_with_the_same_logits(
    tmp_path: Path, family: str, targets: list[str], options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    save_hf_folder(tmp_path / "base", base(family), small_shape(family))
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    torch.manual_seed(1)
    theirs = peft.get_peft_model(reference(tmp_path / "base"), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = base(family)
    attach_adapter(ours, read_peft(tmp_path / "adapter", ours.shape))
    assert torch.allclose(logits(ours), logits(theirs), **CLOSE)
    plain = base(family)
    plain.load_state_dict(merged_state(ours))
    assert torch.allclose(logits(plain), logits(theirs.merge_and_unload()), **CLOSE)


def test_the_names_in_a_file_are_those_peft_writes(tmp_path: Path) -> None:
    """Held by hand as well, for machines without PEFT."""
    save_adapter(tmp_path / "llama", adapted("llama", roles="qv"), None)
    names = set(load_file(tmp_path / "llama" / WEIGHTS))
    assert "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight" in names
    assert len(names) == 2 * 2 * 2
    config = json.loads((tmp_path / "llama" / CONFIG).read_text())
    assert config["target_modules"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (4, 8, False)
    save_adapter(tmp_path / "gpt2", adapted("gpt2", dora=True), None)
    names = set(load_file(tmp_path / "gpt2" / WEIGHTS))
    assert "base_model.model.transformer.h.0.mlp.c_proj.lora_A.weight" in names
    assert "base_model.model.transformer.h.0.attn.c_attn.lora_magnitude_vector" in names


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_is_saved_and_loaded_bit_for_bit(tmp_path: Path, family: str) -> None:
    model = adapted(family, dora=True)
    save_adapter(tmp_path / "adapter", model, None)
    again = base(family)
    attach_adapter(again, read_peft(tmp_path / "adapter", again.shape))
    assert torch.equal(logits(model), logits(again))


def test_base_and_adapter_are_loaded_together_and_the_adapter_can_be_disabled(tmp_path: Path) -> None:
    model = adapted("llama")
    save_hf_folder(tmp_path / "base", base("llama"), model.shape)
    save_adapter(tmp_path / "adapter", model, None)
    both = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert torch.equal(logits(both), logits(model))
    set_active(both, active=False)
    assert torch.equal(logits(both), logits(base("llama")))


def changed(folder: Path, **config: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **config}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: 'LORA'"),
        ({"bias": "all"}, "bias is 'all', which rush does not support"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, "r is 0; it must be a number above 0"),
    ],
)
def test_unsupported_peft_options_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_adapter(tmp_path, adapted("llama"), None)
    changed(tmp_path, **change)
    with pytest.raises(DataError, match=message):
        read_peft(tmp_path, small_shape("llama"))


def test_an_adapter_for_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", adapted("llama"), "somewhere")
    wider = dataclasses.replace(small_shape("llama"), intermediate=56)
    with pytest.raises(DataError, match=r"adapter for another model: blocks\.0\.mlp\.down has a of shape"):
        read_peft(tmp_path / "adapter", wider)
    with pytest.raises(
        DataError, match=r"adapter for another model: it holds base_model\.model\.model\.layers\.0"
    ):
        read_peft(tmp_path / "adapter", small_shape("gpt2"))
    shorter = dataclasses.replace(small_shape("llama"), num_layers=1)
    with pytest.raises(DataError, match=r"layers\.1\..* of 1 layers"):
        read_peft(tmp_path / "adapter", shorter)
    other = base("llama", seed=4)
    with pytest.raises(DataError, match=r"another base of the same shape \(somewhere\)"):
        attach_adapter(other, read_peft(tmp_path / "adapter", other.shape))
    twice = adapted("llama")
    with pytest.raises(RecipeError, match="has adapters already"):
        attach_adapter(twice, read_peft(tmp_path / "adapter", twice.shape))


def test_a_pickled_adapter_is_refused_and_not_opened(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", adapted("llama"), None)
    (tmp_path / "adapter" / WEIGHTS).rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(DataError, match=r"pickle .*refused"):
        read_peft(tmp_path / "adapter", small_shape("llama"))
    with pytest.raises(DataError, match=r"lacks adapter_model\.safetensors"):
        read_peft(tmp_path / "nothing", small_shape("llama"))


def test_a_missing_half_of_an_adapter_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted("llama"), None)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(DataError, match="has b of shape nothing"):
        read_peft(tmp_path, small_shape("llama"))


@pytest.mark.parametrize("name", [name for name, _ in base("gpt2").named_parameters()])
def test_the_fingerprint_of_a_base_covers_every_weight(tmp_path: Path, name: str) -> None:
    save_adapter(tmp_path, adapted("gpt2"), None)
    other = base("gpt2")
    with torch.no_grad():  # one value, by the smallest step that bf16 can tell
        place = other.get_parameter(name).view(-1)[-1:]
        place.copy_(torch.where(place == 0, 1e-3, place.bfloat16().float() * (1 + 2**-7)))
    with pytest.raises(DataError, match="another base of the same shape: the weights differ"):
        attach_adapter(other, read_peft(tmp_path, other.shape))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_of_a_base_does_not_depend_on_dtype_or_quantization(
    family: str, dtype: torch.dtype
) -> None:
    plain = base(family)
    known = base_identity(plain)
    assert base_identity(base(family).to(dtype)) == known
    assert base_identity(dict(base(family).to(dtype).named_parameters())) == known
    assert base_identity(adapted(family)) == known
    with torch.device("meta"):
        quantized = build_model(small_shape(family))
    quantize_linears(quantized, Form("int8", "torchao"))
    quantized.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert base_identity(quantized) == known
    quantized.load_state_dict(base(family, seed=4).state_dict())
    assert base_identity(quantized) != known


def test_fingerprints_detect_changed_values_and_moved_rows() -> None:
    weight_oi = torch.randn(24, 640, generator=torch.Generator().manual_seed(2)).bfloat16()
    swapped = weight_oi.clone()
    swapped[[3, 17]] = swapped[[17, 3]]
    for name in (fingerprint, base_fingerprint):
        others = [weight_oi.t(), weight_oi.view(48, 320), swapped, weight_oi.roll(1, 1), weight_oi[:, :639]]
        assert len({name(one) for one in (weight_oi, *others)}) == 6, name
        assert name(weight_oi) == name(weight_oi.clone())
    assert base_fingerprint(weight_oi) == base_fingerprint(weight_oi.float())
    assert fingerprint(weight_oi) != fingerprint(weight_oi.float())


def as_older_rush_wrote_it(folder: Path, model: Decoder) -> None:
    metadata = {"format": "pt", "rush_base": partial_identity(dict(model.named_parameters()))}
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, metadata=metadata)


def test_an_older_adapter_is_checked_in_part_with_a_note(tmp_path: Path) -> None:
    model = adapted("llama")
    save_adapter(tmp_path / "adapter", model, None)
    as_older_rush_wrote_it(tmp_path / "adapter", base("llama"))
    save_hf_folder(tmp_path / "base", base("llama"), model.shape)
    said: list[str] = []
    both = load_model(tmp_path / "base", adapter=tmp_path / "adapter", note=said.append)
    assert torch.equal(logits(both), logits(model))
    assert len(said) == 1
    assert "the linear layers were not" in said[0]
    save_hf_folder(tmp_path / "other", base("llama", seed=4), model.shape)
    with pytest.raises(DataError, match="another base of the same shape"):
        load_model(tmp_path / "other", adapter=tmp_path / "adapter")
    streamed = load_model(tmp_path / "base", adapter=tmp_path / "adapter", offload="disk", note=said.append)
    assert torch.equal(logits(streamed), logits(model))
    assert len(said) == 2
