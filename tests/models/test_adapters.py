"""Adapters leave the base as it was, train nothing else, and merge to one matrix."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rush.models import SIZES, Decoder, build_model
from rush.models.adapters import (
    Adapter,
    AdapterSpec,
    FusedDownProjections,
    adapt,
    adapters,
    adapters_off,
    attach,
    chosen_linears,
    init_adapters,
    merged_state,
)

TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    base = SIZES["llama-tiny" if family == "llama" else "tiny"]
    shape = dataclasses.replace(
        base, vocab_size=96, hidden=32, num_layers=2, num_heads=4, num_kv_heads=2 if family == "llama" else 4,
        head_dim=8, intermediate=48, context=32,
    )  # fmt: skip
    model = build_model(shape, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # they begin as zeros, which would hide mistakes with them
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.to(dtype)


def adapted(
    family: str, variant: str = "lora", roles: str = "all", dtype: torch.dtype = torch.float32
) -> Decoder:
    model = tiny(family, dtype)
    spec = AdapterSpec(rank=4, alpha=8, dora=variant == "dora")
    adapt(model, {name: spec for name, _ in chosen_linears(model, roles)})
    init_adapters(model, seed=5)
    return model


@torch.no_grad()
def stir(model: Decoder) -> None:
    """Values as training would leave them: nothing zero any more."""
    generator = torch.Generator().manual_seed(11)
    for _, _, adapter in adapters(model):
        adapter.b.copy_(torch.randn(adapter.b.shape, generator=generator) * 0.05)
        if adapter.magnitude is not None:
            adapter.magnitude.mul_(1 + 0.1 * torch.randn(adapter.magnitude.shape, generator=generator))


def logits(model: Decoder, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_an_adapted_model_starts_bit_identical_to_its_base(
    family: str, variant: str, dtype: torch.dtype
) -> None:
    if variant == "dora" and dtype is torch.bfloat16:
        pytest.skip("dora is refused beside weights in bf16")
    assert torch.equal(logits(tiny(family, dtype)), logits(adapted(family, variant, dtype=dtype)))


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_disabled_adapters_give_the_base_and_enabled_ones_do_not(family: str, variant: str) -> None:
    model = adapted(family, variant)
    stir(model)
    with_adapter = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(tiny(family)))
    assert torch.equal(logits(model), with_adapter)
    assert not torch.allclose(with_adapter, logits(tiny(family)), atol=1e-3)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_those_of_the_written_out_formula(family: str, variant: str) -> None:
    """Against W' = W + s·B·A (DoRA: each row brought to its magnitude, its own length a constant), made outright."""
    model = adapted(family, variant)
    stir(model)
    model(TOKENS, TOKENS).backward()
    plain = tiny(family).double().requires_grad_(False)
    leaves: dict[str, Tensor] = {}
    weights = dict(plain.named_parameters())
    for name, _, adapter in adapters(model):
        own = {key: p.detach().double().requires_grad_() for key, p in adapter.named_parameters()}
        leaves |= {f"{name}.adapter.{key}": p for key, p in own.items()}
        whole = weights[f"{name}.weight"] + adapter.spec.scale * own["b"] @ own["a"]
        if variant == "dora":
            whole = whole * (own["magnitude"] / whole.detach().norm(dim=1))[:, None]
        weights[f"{name}.weight"] = whole
    torch.func.functional_call(plain, weights, (TOKENS, TOKENS)).backward()
    for name, leaf in leaves.items():
        got, wanted = model.get_parameter(name).grad, leaf.grad
        assert got is not None
        assert wanted is not None
        assert float((got - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-9, name


def test_nothing_but_adapters_is_trained_or_gets_a_gradient() -> None:
    model = adapted("llama")
    stir(model)
    model(TOKENS, TOKENS).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".adapter." in name), name
        assert (parameter.grad is not None) == (".adapter." in name), name
    widths = [(layer.in_features, layer.out_features) for _, layer, _ in adapters(model)]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(
        4 * (i + o) for i, o in widths
    )


def test_a_frozen_layer_saves_its_input_once_and_rank_values_per_token() -> None:
    """What the forward pass keeps for the backward pass, weights aside."""
    layer = torch.nn.Linear(64, 96, bias=False)
    attach(layer, Adapter(64, 96, AdapterSpec(rank=4, alpha=8)))
    layer.adapter.init_weights(0, "layer", layer)  # type: ignore[union-attr, operator]
    x = torch.randn(50, 64, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert sum(kept.values()) == 4 * (50 * 64 + 50 * 4)


@pytest.mark.parametrize(("roles", "layers"), [("all", 7), ("attention", 4), ("mlp", 3), ("qv", 2)])
def test_roles_choose_the_layers(roles: str, layers: int) -> None:
    found = [name for name, _, _ in adapters(adapted("llama", roles=roles))]
    assert len(found) == 2 * layers
    assert "head" not in found


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_merged_weights_give_the_adapted_logits_up_to_rounding(family: str, variant: str) -> None:
    """Both compute the same sums in another order, so they differ by rounding alone."""
    model = adapted(family, variant)
    stir(model)
    ours = logits(model)
    plain = tiny(family)
    plain.load_state_dict(merged_state(model))
    exact = tiny(family).double()
    whole = exact.state_dict()
    for name, _, adapter in adapters(model):
        weight = whole[f"{name}.weight"] + adapter.spec.scale * adapter.b.double() @ adapter.a.double()
        if adapter.magnitude is not None:
            weight = weight * (adapter.magnitude.double() / weight.norm(dim=1))[:, None]
        whole[f"{name}.weight"] = weight.detach()
    exact.load_state_dict(whole)
    # As near to the formula in float64 as the adapted model is, within the usual factor of fp32 rounding.
    bound = 3 * float((ours - logits(exact)).abs().max())
    assert float((logits(plain) - logits(exact)).abs().max()) <= bound < 1e-5
    assert not torch.allclose(logits(plain), logits(tiny(family)), atol=1e-3)


def test_dora_scales_the_rows_and_not_the_bias() -> None:
    """A fresh model's biases are zero, so only a layer with another one shows it."""
    layer = torch.nn.Linear(24, 16)
    adapter = Adapter(24, 16, AdapterSpec(rank=4, alpha=8, dora=True))
    attach(layer, adapter)
    adapter.init_weights(0, "layer", layer)
    with torch.no_grad():
        layer.bias.normal_()
        adapter.b.normal_()
        assert adapter.magnitude is not None
        adapter.magnitude.mul_(torch.linspace(0.5, 2.0, 16))
    x = torch.randn(5, 24)
    weight = layer.weight.double() + adapter.spec.scale * adapter.b.double() @ adapter.a.double()
    weight = weight * (adapter.magnitude.double() / weight.norm(dim=1))[:, None]
    exact = torch.nn.functional.linear(x.double(), weight, layer.bias.double())
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_initial_values_are_a_function_of_seed_and_name() -> None:
    one, two, other = adapted("llama"), adapted("llama"), tiny("llama")
    adapt(other, {"blocks.1.mlp.up": AdapterSpec(rank=4, alpha=8)})
    init_adapters(other, seed=5)
    values = {name: adapter.a for name, _, adapter in adapters(one)}
    assert all(torch.equal(values[name], adapter.a) for name, _, adapter in adapters(two))
    assert torch.equal(values["blocks.1.mlp.up"], other.get_parameter("blocks.1.mlp.up.adapter.a"))
    assert not torch.equal(values["blocks.0.mlp.up"], values["blocks.1.mlp.up"])
    init_adapters(other, seed=6)
    assert not torch.equal(values["blocks.1.mlp.up"], other.get_parameter("blocks.1.mlp.up.adapter.a"))


def test_layers_of_one_input_share_a_matmul_and_save_the_input_once() -> None:
    layers = [torch.nn.Linear(64, width, bias=False) for width in (96, 32, 32)]
    for layer in layers:
        attach(layer, Adapter(64, layer.out_features, AdapterSpec(rank=4, alpha=8)))
        layer.adapter.init_weights(0, str(layer.out_features), layer)  # type: ignore[union-attr, operator]
        torch.nn.init.normal_(layer.adapter.b)  # type: ignore[union-attr, arg-type]
    x = torch.randn(50, 64, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        together = FusedDownProjections()(x, *layers)
    for ours, layer in zip(together, layers, strict=True):
        assert torch.allclose(ours, layer(x), atol=1e-6)
    # The input, the rank of each layer for each token, and the A of all three side by side.
    assert sum(kept.values()) == 4 * (50 * 64 + 3 * 50 * 4 + 3 * 4 * 64)
    # One that is switched off, or has no adapter, is its plain self.
    layers[1].adapter.active = False  # type: ignore[union-attr, assignment]
    assert torch.equal(FusedDownProjections()(x, *layers)[1], torch.nn.functional.linear(x, layers[1].weight))
