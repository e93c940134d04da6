"""The frozen base of an adapted model: which one it is, written down, and made again.

A checkpoint of adapters is worth nothing beside another base, and the two look alike. So it holds what the base
was: a digest of its exact values, their dtype and form, and which layers have adapters of which kind. From that
and the base's own weights (a folder, or the seed they were drawn from) the whole model can be made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from rush.errors import DataError
from rush.models import Decoder, Shape, build_model
from rush.models.adapters import AdapterSpec, adapt, adapters, fill_adapters
from rush.models.fingerprints import base_fingerprint, fingerprint
from rush.models.quantised import Form, QuantisedLinear, form_of, quantise_linears


def describe_base(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint says about the base its adapters belong to."""
    form = form_of(model)
    assert isinstance(model, Decoder), type(model)
    return {
        "digest": base_digest(model),
        "values": base_identity(model),
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
        "form": None if form is None else asdict(form),
        "adapters": {name: asdict(adapter.spec) for name, _, adapter in adapters(model)},
    }


def base_digest(model: nn.Module) -> str:
    """Names the frozen values exactly. A quantised layer is named by what it was made from, so the name is the same on
    every device."""
    told = {
        name: fingerprint(parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    told |= {
        name: layer.source for name, layer in model.named_modules() if isinstance(layer, QuantisedLinear)
    }
    return _name_of(told)


def base_identity(base: nn.Module | Mapping[str, Tensor]) -> str:
    """Names a base by all of its weights, rounded to bf16, so that their dtype does not matter; a quantised layer by what
    it was made from. One quick pass: it is asked whenever adapters meet a base."""
    given = dict(base.named_parameters()) if isinstance(base, nn.Module) else base
    told = {name: base_fingerprint(given[name]) for name in given if ".adapter." not in name}
    if isinstance(base, nn.Module):
        quantised = {n: layer for n, layer in base.named_modules() if isinstance(layer, QuantisedLinear)}
        told |= {f"{name}.weight": layer.base_source for name, layer in quantised.items()}
    return _name_of(told)[:32]


def partial_identity(weights: Mapping[str, Tensor]) -> str:
    """What older adapters know of their base: embedding, norms and head."""
    kept = {
        name: fingerprint(weights[name].detach().to(torch.bfloat16))
        for name in weights
        if not name.startswith("blocks.") or "norm" in name
    }
    return hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()[:32]


def _name_of(told: Mapping[str, str]) -> str:
    clean = sorted((name.replace("_orig_mod.", ""), value) for name, value in told.items())
    return hashlib.sha256(repr(clean).encode()).hexdigest()


def check_base(path: object, saved: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse adapters that were trained on another base."""
    found = describe_base(model)
    for key, what in (("form", "stored"), ("dtype", "kept in"), ("digest", "with the digest")):
        if saved[key] != found[key]:
            raise DataError(
                f"{path} holds adapters for another base: theirs was {what} {_short(saved[key])}, this one is {what} "
                f"{_short(found[key])}; name the base they were trained on (model.init_from, or the same seed)."
            )


def _short(value: Any) -> str:
    if value is None:
        return "plainly"
    if isinstance(value, dict):
        return f"as {value['kind']} by {value['backend']}"
    return str(value)[:12]


def adapted_model(
    shape: Shape, record: Mapping[str, Any], weights: dict[str, Tensor] | None, seed: int, device: str = "cpu"
) -> Decoder:
    """The base as a checkpoint's record describes it, with adapters that wait for their values."""
    with torch.device("meta"):
        model = build_model(shape)
    if record["form"] is not None:
        quantise_linears(model, Form(**record["form"]))
    adapt(model, {name: AdapterSpec(**spec) for name, spec in record["adapters"].items()})
    model.to(getattr(torch, record["dtype"])).to_empty(device=device)
    if weights is None:
        model.init_weights(seed)
    else:
        model.load_state_dict(weights)
        model.init_buffers()
    fill_adapters(model, seed)
    return model
