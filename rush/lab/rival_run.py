"""A rival's training step inside a trial: a model of the transformers library in our own loop.

Only the model and its loss are the library's. Loader, learning rate, clipping, the update's groups and the
clock are ours, the same for both sides, so that a ratio compares models and kernels and nothing else. The
model is made from a configuration with random weights; nothing is downloaded.

Liger patches the library the way its users do (`apply_liger_kernel_to_llama`). That rewrites names inside
transformers for the whole process, which is why it happens only here, in a process of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rush.data import Batch
from rush.errors import MachineError
from rush.hardware import Machine
from rush.lab.timing import Stepper, Timing, time_steps
from rush.models import Shape
from rush.models.huggingface_config import config_from_shape
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.techniques import Pass
from rush.train.build import Run
from rush.train.corpus import open_corpus
from rush.train.optimizer import build_optimizer

INTERESTING = ("rms_norm", "swiglu", "rope", "cross_entropy", "flash", "cudnn", "attention", "adam")
"""Parts of kernel names that say which of a rival's switches did something."""


def measure_rival(spec: Mapping[str, Any], result: Any) -> None:
    """Time the rival's steps, then watch one: which kernels ran."""
    machine = Machine.from_dict(spec["machine"])
    recipe = parse(tomllib.loads(spec["recipe"]))
    options = spec["options"]
    _need(options)
    corpus = open_corpus(recipe, None, lambda text: None)
    run = rival_run(recipe, machine, options)
    result.add(versions=_versions())
    with corpus.loader(recipe, {"pin": True} if machine.device == "cuda" else {}) as loader:
        result.add(timing=time_steps(run, loader, Timing(**spec["timing"])))
        stepper = Stepper(run, loader)
        if spec["profile"]:
            result.add(evidence=_watch(run, stepper, bool(options.get("with_liger"))))
        stepper()
        assert stepper.last is not None
        result.add(loss=stepper.last.loss)


def _need(options: Mapping[str, Any]) -> None:
    wanted = ["transformers", *(["liger_kernel"] if options.get("with_liger") else [])]
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise MachineError(
            f"the rival needs {' and '.join(missing)}; install it with "
            'pip install "optimization-rush[rivals]" -c constraints.txt.'
        )


def rival_run(recipe: Recipe, machine: Machine, options: Mapping[str, Any]) -> Run:
    """The library's model as a run of ours."""
    device = torch.device(machine.device)
    model = rival_model(recipe.shape(), device, getattr(torch, options.get("dtype", "float32")))
    if options.get("with_liger"):
        import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = build_optimizer(recipe, model, torch.optim.AdamW, fused)
    wrapped: list[Any] = [lambda plain: rival_pass(model)]
    return Run(recipe, machine, device, model, optimizer, pass_wrappers=wrapped)


def rival_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """`LlamaForCausalLM` of this shape with random weights, SDPA attention, ready to train."""
    transformers = import_module("transformers")
    table = config_from_shape(shape)
    for key in ("architectures", "model_type", "dtype", "torch_dtype"):
        table.pop(key)
    config = transformers.LlamaConfig(**{**table, "use_cache": False})
    config._attn_implementation = "sdpa"
    with _default_dtype(dtype), device:
        model = transformers.LlamaForCausalLM(config)
    return model.train()


def rival_pass(model: Any) -> Pass:
    """Forward and backward of a micro batch: the summed loss, as our own pass returns it."""

    def run(batch: Batch, share: Tensor) -> Tensor:
        # Our labels are shifted already. Divided by one item, the library's loss is the sum over labels.
        labels_bt = batch.labels_bt.contiguous()
        found = model(
            input_ids=batch.tokens_bt,
            labels=labels_bt,
            shift_labels=labels_bt,
            num_items_in_batch=1,
            return_dict=True,
        )
        (found.loss * share).backward()
        loss: Tensor = found.loss.detach()
        return loss.float()

    return run


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _watch(run: Run, stepper: Stepper, with_kernels: bool) -> list[dict[str, Any]]:
    """Which telling kernels ran in a step; nothing on a CPU, which has no kernels to see."""
    if run.device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        stepper()
    names = {event.key for event in profile.key_averages()}
    telling = sorted(name[:60] for name in names if any(part in name.lower() for part in INTERESTING))
    wanted = ("rms_norm_forward_kernel", "swiglu_forward_kernel", "liger_cross_entropy_kernel", "triton_rope")
    missing = [part for part in wanted if with_kernels and not any(part in name for name in names)]
    what = f"did not run: {', '.join(missing)}" if missing else f"ran {', '.join(telling)[:600]}"
    return [{"technique": "rival", "took_effect": not missing, "what": what}]


def _versions() -> dict[str, str]:
    return {
        name: version(name) for name in ("transformers", "liger-kernel") if find_spec(name.replace("-", "_"))
    }
