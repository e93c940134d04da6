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
from rush.hardware import free_memory
from rush.models import Decoder, Shape, build_model, count_parameters
from rush.models.adapters import AdapterSpec, adapt, adapters, fill_adapters
from rush.models.fingerprints import base_fingerprint, fingerprint
from rush.models.quantized import QuantizedLinear, form_of, quantize_linears
from rush.models.quantized_formats import Form
from rush.parallel import Ranks
from rush.parallel.pipeline import gather_stages
from rush.parallel.sharded import full_tensor, gather, is_sharded

ROOMY = 0.8
"""Of the memory that is free somewhere, what a whole model that is put together there may take."""


def describe_base(model: nn.Module, ranks: Ranks | None = None) -> dict[str, Any]:
    """What a checkpoint says about the base its adapters belong to; of a model in parts all ranks must ask."""
    form = form_of(model)
    assert isinstance(model, Decoder), type(model)
    told = model.__dict__.get("base_names")
    if told is None:
        told = _told(model, ranks or Ranks())
        if ranks is not None and not ranks.alone:
            # The base does not change, and gathering it for every checkpoint would be the longest part of a save.
            model.__dict__["base_names"] = told
    dtype = next(p.dtype for p in model.parameters() if not p.requires_grad and p.is_floating_point())
    return {
        **told,
        "dtype": str(dtype).removeprefix("torch."),
        "form": None if form is None else asdict(form),
    }


def _told(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Names for all values of the base, and the adapters on it; stages of a pipeline put together what each knows."""
    own: list[dict[str, Any]] = [
        _exact_names(model),
        _rounded_names(model),
        {name: asdict(adapter.spec) for name, _, adapter in adapters(model)},
    ]
    heard = [own] if ranks.stages is None else ranks.all_gather_object(own)
    exact, rounded, specs = ({k: v for parts in heard for k, v in parts[n].items()} for n in range(3))
    return {"digest": _name_of(exact), "values": _name_of(rounded)[:32], "adapters": specs}


def _exact_names(model: nn.Module) -> dict[str, str]:
    """Names the frozen values exactly. A quantized layer is named by what it was made from, so the name is the same on
    every device."""
    told = {
        name: fingerprint(full_tensor(parameter))
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    }
    told |= {
        name: layer.source for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)
    }
    return told


def base_identity(base: nn.Module | Mapping[str, Tensor]) -> str:
    """Names a base by all of its weights, rounded to bf16, so that their dtype does not matter; a quantized layer by what
    it was made from. One quick pass: it is asked whenever adapters meet a base."""
    return _name_of(_rounded_names(base))[:32]


def _rounded_names(base: nn.Module | Mapping[str, Tensor]) -> dict[str, str]:
    given = dict(base.named_parameters()) if isinstance(base, nn.Module) else base
    told = {
        name: base_fingerprint(full_tensor(value))
        for name, value in given.items()
        if ".adapter." not in name and value.is_floating_point()
    }
    if isinstance(base, nn.Module):
        quantized = {n: layer for n, layer in base.named_modules() if isinstance(layer, QuantizedLinear)}
        told |= {f"{name}.weight": layer.base_source for name, layer in quantized.items()}
    return told


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


def check_base(path: object, saved: Mapping[str, Any], model: nn.Module, ranks: Ranks | None = None) -> None:
    """Refuse adapters that were trained on another base."""
    found = describe_base(model, ranks)
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


def gather_device(model: Decoder) -> torch.device | None:
    """Where the first rank can put all of a model in parts together: where it is computed with, if it is in stages and there is
    room, or on the host; None if that has no room either."""
    held = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
    known = sum(tensor.numel() * tensor.element_size() for tensor in held)
    first = next(model.parameters())
    # What other stages hold is not known here: as if all weights had one dtype.
    size = max(known, count_parameters(model.shape) * first.element_size())
    if not any(map(is_sharded, held)) and size < ROOMY * free_memory(first.device.type):
        return first.device
    return torch.device("cpu") if size < ROOMY * free_memory("cpu") else None


def gathered_model(model: Decoder, ranks: Ranks, place: torch.device | None = None) -> Decoder | None:
    """All of a model in parts, adapters and codes included, without what techniques changed: for the first rank, and the
    others must ask as well. One that is sharded is put together on the host, one in stages where it is computed with, or in
    the `place` that the first rank says."""
    stages, keep = ranks.stages, ranks.main
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    sharded = any(is_sharded(tensor) for tensor in tensors.values())
    sent_from = torch.device("cpu") if sharded else next(model.parameters()).device
    place = place or sent_from
    values = gather(tensors, keep or stages is not None)
    if stages is not None:
        values = gather_stages(values, stages, sent_from, place)
    if not keep:
        return None
    with torch.device("meta"):
        twin = build_model(model.shape)
    form, known = form_of(model), [adapter.spec for _, _, adapter in adapters(model)]
    if form is not None:
        quantize_linears(twin, form)
    if known:
        # All have one spec, those of other stages too.
        adapted = [name.removesuffix(".adapter.a") for name in values if name.endswith(".adapter.a")]
        adapt(twin, dict.fromkeys(adapted, known[0]))
    for module_name, module in twin.named_modules():
        for held in (module._parameters, module._buffers):
            for own, tensor in held.items():
                value = values.get(f"{module_name}.{own}".removeprefix("."))
                if tensor is not None and value is not None:
                    here = value.detach().to(place)
                    held[own] = (
                        nn.Parameter(here, requires_grad=False) if held is module._parameters else here
                    )
    twin.tie_head()
    twin.init_buffers()
    return twin


def adapted_model(
    shape: Shape, record: Mapping[str, Any], weights: dict[str, Tensor] | None, seed: int, device: str = "cpu"
) -> Decoder:
    """The base as a checkpoint's record describes it, with adapters that wait for their values."""
    with torch.device("meta"):
        model = build_model(shape)
    if record["form"] is not None:
        quantize_linears(model, Form(**record["form"]))
    adapt(model, {name: AdapterSpec(**spec) for name, spec in record["adapters"].items()})
    model.to(getattr(torch, record["dtype"])).to_empty(device=device)
    if weights is None:
        model.init_weights(seed)
    else:
        model.load_state_dict(weights)
        model.init_buffers()
    fill_adapters(model, seed)
    return model
