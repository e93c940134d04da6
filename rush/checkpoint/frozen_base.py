"""The frozen base of an adapted model: its record in a checkpoint, and the model rebuilt from it.

Adapters are only valid with their own base. So a checkpoint of adapters records the base: a digest of its exact values, their
dtype and quantization, and which layers have which adapters. From that and the base's weights (a folder, or the seed of random
ones) the full model is rebuilt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from rush.checkpoint.state import BaseDigests, BaseRecord
from rush.errors import DataError
from rush.hardware import free_memory
from rush.models import Decoder, Shape, build_model, count_parameters
from rush.models.adapters import AdapterSpec, adapt, adapters, init_adapters
from rush.models.fingerprints import base_fingerprint, fingerprint
from rush.models.quantized import QuantizedLinear, form_of, quantize_linears
from rush.models.quantized_formats import Form, known_form
from rush.parallel import Ranks
from rush.parallel.pipeline import gather_stages
from rush.parallel.sharded import full_tensor, gather, is_sharded

BLOCK_NORMS = ("attention_norm", "mlp_norm")
ROOMY = 0.8
"""Fraction of the free memory that a gathered model may take."""


def describe_base(model: nn.Module, ranks: Ranks | None = None) -> BaseRecord:
    """The base's record in a checkpoint of adapters; a collective where the model is sharded."""
    form = form_of(model)
    assert isinstance(model, Decoder), type(model)
    digests: BaseDigests | None = model.__dict__.get("base_digests")
    if digests is None:
        digests = _digests(model, ranks or Ranks())
        if ranks is not None and not ranks.alone:
            # The base does not change, and gathering it for every checkpoint would be the longest part of a save.
            model.__dict__["base_digests"] = digests
    dtype = next(p.dtype for p in model.parameters() if not p.requires_grad and p.is_floating_point())
    return {
        **digests,
        "dtype": str(dtype).removeprefix("torch."),
        "form": None if form is None else asdict(form),
    }


def _digests(model: nn.Module, ranks: Ranks) -> BaseDigests:
    """Digests of all values of the base, and its adapters; pipeline stages gather theirs."""
    own: list[dict[str, Any]] = [
        _exact_digests(model),
        _rounded_digests(model),
        {name: asdict(adapter.spec) for name, _, adapter in adapters(model)},
    ]
    gathered = [own] if ranks.stages is None else ranks.all_gather_object(own)
    exact, rounded, specs = ({k: v for parts in gathered for k, v in parts[n].items()} for n in range(3))
    return {"digest": _digest_of(exact), "values": _digest_of(rounded)[:32], "adapters": specs}


def _exact_digests(model: nn.Module) -> dict[str, str]:
    """Fingerprints of the exact frozen values. A quantized layer has that of its source weights, so it is the same on every
    device."""
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
    """A digest of all weights of a base, rounded to bf16, so that their dtype does not matter; a quantized layer counts by its
    source weights."""
    return _digest_of(_rounded_digests(base))[:32]


def _rounded_digests(base: nn.Module | Mapping[str, Tensor]) -> dict[str, str]:
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
    """The digest that older adapters have of their base: embedding, norms and head."""
    kept = {
        name: fingerprint(weights[name].detach().to(torch.bfloat16))
        for name in weights
        if not name.startswith("blocks.") or name.split(".")[2] in BLOCK_NORMS
    }
    return hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()[:32]


def _digest_of(told: Mapping[str, str]) -> str:
    clean = sorted((name.replace("_orig_mod.", ""), value) for name, value in told.items())
    return hashlib.sha256(repr(clean).encode()).hexdigest()


def check_base(path: object, saved: BaseRecord, model: nn.Module, ranks: Ranks | None = None) -> None:
    """Refuse adapters that were trained on another base."""
    found = describe_base(model, ranks)
    for what, theirs, ours in (
        ("stored", saved["form"], found["form"]),
        ("kept in", saved["dtype"], found["dtype"]),
        ("with the digest", saved["digest"], found["digest"]),
    ):
        if theirs != ours:
            raise DataError(
                f"{path} holds adapters for another base: theirs was {what} {_short(theirs)}, this one is {what} "
                f"{_short(ours)}; name the base they were trained on (model.init_from, or the same seed)."
            )


def _short(value: Any) -> str:
    if value is None:
        return "unquantized"
    if isinstance(value, dict):
        return f"as {value['kind']} by {value['backend']}"
    return str(value)[:12]


def gather_device(model: Decoder) -> torch.device | None:
    """Where rank 0 can gather a sharded or pipelined model: on its device, if it is only pipelined and fits, or on the host; None
    if it does not fit there either."""
    held = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
    known = sum(tensor.numel() * tensor.element_size() for tensor in held)
    first = next(model.parameters())
    # Other stages' dtypes are unknown here: as if all weights had one dtype.
    size = max(known, count_parameters(model.shape) * first.element_size())
    if not any(map(is_sharded, held)) and size < ROOMY * free_memory(first.device.type):
        return first.device
    return torch.device("cpu") if size < ROOMY * free_memory("cpu") else None


def gathered_model(model: Decoder, ranks: Ranks, place: torch.device | None = None) -> Decoder | None:
    """Gather the full plain model on rank 0, with adapters and quantized weights; a collective. A sharded model is gathered on the
    host, a pipelined one on its device, or on `place`."""
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
        full = build_model(model.shape)
    form, known = form_of(model), [adapter.spec for _, _, adapter in adapters(model)]
    if form is not None:
        quantize_linears(full, form)
    if known:
        # All have one spec, those of other stages too.
        adapted = [name.removesuffix(".adapter.a") for name in values if name.endswith(".adapter.a")]
        adapt(full, dict.fromkeys(adapted, known[0]))
    for module_name, module in full.named_modules():
        for held in (module._parameters, module._buffers):
            for own, tensor in held.items():
                value = values.get(f"{module_name}.{own}".removeprefix("."))
                if tensor is not None and value is not None:
                    here = value.detach().to(place)
                    held[own] = (
                        nn.Parameter(here, requires_grad=False) if held is module._parameters else here
                    )
    full.tie_head()
    full.init_buffers()
    return full


def adapted_model(
    shape: Shape, record: BaseRecord, weights: dict[str, Tensor] | None, seed: int, device: str = "cpu"
) -> Decoder:
    """The base as a checkpoint's record describes it, with uninitialized adapters."""
    form, specs = record["form"], record["adapters"]
    with torch.device("meta"):
        model = build_model(shape)
    layers = {name for entries in model.linears().values() for name, _ in entries}
    if unknown := sorted(specs.keys() - layers):
        raise DataError(
            f"the checkpoint has an adapter for {unknown[0]}, which is no linear layer of this model."
        )
    if form is not None and not known_form(**form):
        raise DataError(
            f"the checkpoint's base is stored as {form['kind']} by {form['backend']}, which this rush does not know."
        )
    if form is not None:
        quantize_linears(model, Form(**form))
    adapt(model, {name: AdapterSpec(**spec) for name, spec in specs.items()})
    model.to(getattr(torch, record["dtype"])).to_empty(device=device)
    if weights is None:
        model.init_weights(seed)
    else:
        model.load_state_dict(weights)
        model.init_buffers()
    init_adapters(model, seed)
    return model
