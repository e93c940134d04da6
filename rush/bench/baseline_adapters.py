"""A baseline that fine-tunes with adapters: transformers' model with PEFT's LoRA, over a base in bf16 or in bitsandbytes' NF4.

Built as its users build it: `get_peft_model` with an adapter on every linear layer of the blocks, adapters in the
dtype PEFT gives them (fp32 beside a bf16 base), passes under bf16 autocast as the library's trainer runs them,
gradient checkpointing switched on by the library's own call.

A quantized model is usually made by `from_pretrained` with a `BitsAndBytesConfig`. There is no folder to load here, so
the same layers (`Linear4bit`: NF4, double quantization, bf16 compute, the head excluded) replace the model's on the
meta device, and each gets random weights on the device, drawn in bf16 and quantized one at a time: the model never
exists in full. `prepare_model_for_kbit_training` is not called, in the baseline's favor: it would hold embeddings,
head and norms in fp32, 2 GiB more for an 8B model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers of a Llama's blocks, by the names its users give to PEFT."""
_SETTINGS = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
SPREAD = 0.02
"""Standard deviation of random weights, as transformers draws them."""


def with_adapters(model: Any, rank: int, alpha: float, *, checkpointing: bool) -> Any:
    """The model frozen, with LoRA on all linear layers, ready to train."""
    peft = import_module("peft")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wanted = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, wanted).train()


def quantized_model(
    make: Callable[[], Any], device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> Any:
    """What `make` builds, with its blocks' linear layers in NF4 and random weights in all of it."""
    with torch.device("meta"):
        model = make()
    put_4bit_layers(model, dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        if like.dim() == 1:
            return torch.ones(like.shape, device=device, dtype=dtype)
        return torch.empty(like.shape, device=device, dtype=dtype).normal_(0, SPREAD, generator=generator)

    fill(model, drawn)
    _fill_buffers(model, device)
    return model


def put_4bit_layers(model: Any, dtype: torch.dtype) -> None:
    """Replace the blocks' linear layers by bitsandbytes', in a model on the meta device."""
    layers = import_module("bitsandbytes.nn")
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if isinstance(module, nn.Linear) and own in TARGETS:
            with torch.device("meta"):
                packed = layers.Linear4bit(
                    module.in_features,
                    module.out_features,
                    bias=module.bias is not None,
                    compute_dtype=dtype,
                    compress_statistics=True,
                    quant_type="nf4",
                )
            setattr(model.get_submodule(parent), own, packed.requires_grad_(False))
    model.is_loaded_in_4bit = True  # what the library's loader sets, and PEFT asks for


@torch.no_grad()
def fill(model: Any, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Materialize every parameter of a model on the meta device; those of 4-bit layers are quantized one by one."""
    kind: Any = import_module("bitsandbytes.nn").Params4bit
    tied: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    """By the id of the meta parameter, which is kept alive so that no other gets the same id."""
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in tied:
                value = value_of(parameter)
                if isinstance(parameter, kind):
                    settings = {key: parameter.__dict__[key] for key in _SETTINGS}
                    made = kind(value, requires_grad=False, **settings, module=module).to(value.device)
                else:
                    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
                tied[id(parameter)] = parameter, made
            module._parameters[name] = tied[id(parameter)][1]


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Rotary frequencies are computed, not learned: the module that holds them is built again, with memory."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, own = name.rpartition(".")
            with device:
                again = type(module)(config=model.config)
            setattr(model.get_submodule(parent), own, again)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not left, f"no values for {left[:3]}"


def weights_in_words(model: nn.Module) -> str:
    """How many values are trained and how many are frozen, in which dtypes; a byte with two 4-bit weights counts as one."""
    counts: Counter[tuple[bool, str]] = Counter()
    for parameter in model.parameters():
        counts[parameter.requires_grad, str(parameter.dtype).removeprefix("torch.")] += parameter.numel()

    def listed(trained: bool) -> str:
        found = [f"{count:,} {dtype}" for (which, dtype), count in sorted(counts.items()) if which is trained]
        return " and ".join(found) or "nothing"

    return f"trained: {listed(trained=True)}; frozen: {listed(trained=False)}"
