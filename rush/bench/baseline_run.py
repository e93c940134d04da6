"""A baseline's training step inside a trial: a model of the transformers library in our own loop.

Only the model and its loss are the library's. Loader, learning rate, clipping, the update's groups and the
clock are ours, the same for both sides, so that a ratio compares models and kernels and nothing else. The
model is built from a configuration with random weights; nothing is downloaded. Each row holds one
conversation, padded to the longest of the batch, with the attention mask of the library's collators.

Liger patches the library the way its users do (`apply_liger_kernel_to_llama`, `_qwen3`, `_gemma3_text`). That rewrites
names inside transformers for the whole process, which is why it happens only here, in a separate process.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rush.bench.baseline_adapters import quantized_model, weights_in_words, with_adapters
from rush.bench.baseline_preferences import library_preference, real_tokens
from rush.data import Batch
from rush.data.packing import Pad
from rush.errors import MachineError, RecipeError
from rush.hardware import Machine
from rush.hub.config import config_from_shape
from rush.lab.trial.timing import Stepper, Timing, time_steps
from rush.models import Shape
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.techniques import Pass
from rush.training.build import Run
from rush.training.corpus import open_corpus
from rush.training.objectives import NextToken, Objective
from rush.training.optimizer import build_optimizer

INTERESTING = (
    "rms_norm",
    "swiglu",
    "geglu",
    "rope",
    "cross_entropy",
    "flash",
    "cudnn",
    "attention",
    "adam",
    "dequant",
)
"""Parts of kernel names that show which of a baseline's settings took effect."""
LIGER = ("rms_norm_forward_kernel", "liger_cross_entropy_kernel", "triton_rope")
LIGER_GATES = {"silu": "swiglu_forward_kernel", "gelu": "geglu_tanh_forward_kernel"}
LIBRARIES = {
    "transformers": "transformers",
    "liger_kernel": "liger-kernel",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
    "trl": "trl",
}
"""Modules, and what they are called where they are installed from."""
EXTRAS = {
    "transformers": "baselines",
    "liger_kernel": "baselines",
    "peft": "reference",
    "bitsandbytes": "quant",
}
"""Which of this project's extras brings them."""


@dataclass(frozen=True)
class BaselineOptions:
    """How a baseline is built: what the workload's table says beside its title, kind and recipe."""

    dtype: str = "float32"
    """dtype of the weights that are not quantized."""
    with_liger: bool = False
    attention: str = "sdpa"
    """The library's `attn_implementation`."""
    rank: int | None = None
    """With it, PEFT's LoRA on all linear layers of the blocks, in place of full training."""
    alpha: float = 32.0
    quantized: bool = False
    """The blocks' frozen linear layers in bitsandbytes' NF4."""
    checkpointing: bool = False
    autocast: bool = False
    """Passes under bf16 autocast, as the library's trainer runs them where weights or adapters are fp32."""
    preferences: str | None = None
    """Whose DPO loss: `trl` (its DPOTrainer), `written` (the same written out), or in a workload's table `auto`: TRL's where it is
    installed."""

    @property
    def needs(self) -> list[str]:
        wanted = {
            "transformers": True,
            "liger_kernel": self.with_liger,
            "peft": self.rank is not None,
            "bitsandbytes": self.quantized,
            "trl": self.preferences == "trl",
        }
        return [name for name, needed in wanted.items() if needed]

    def kernels(self, shape: Shape) -> list[str]:
        """Parts of the names of kernels that must have run."""
        liger = [*LIGER, LIGER_GATES[shape.activation]] if self.with_liger else []
        return [*liger, *(["Dequantize"] if self.quantized else [])]


def measure_baseline(spec: Mapping[str, Any], result: Any) -> None:
    """Time the steps of the library's model."""
    options = BaselineOptions(**spec["options"])
    _need(options)

    def build(recipe: Recipe, machine: Machine) -> Run:
        return build_baseline(recipe, machine, options)

    result.add(versions=_versions(options))
    measure_run(spec, result, build, options.kernels, references=options.preferences is not None)


def measure_run(
    spec: Mapping[str, Any],
    result: Any,
    build: Callable[[Recipe, Machine], Run],
    kernels: Callable[[Shape], Sequence[str]],
    *,
    references: bool = False,
) -> None:
    """Time the steps of the built run, then profile one: which kernels ran, and whether the expected ones did.

    `references`: the log-probabilities that preferences are compared with, from the baseline's own first weights.
    """
    machine = Machine.from_dict(spec["machine"])
    recipe = parse(tomllib.loads(spec["recipe"]))
    corpus = open_corpus(recipe, None, lambda text: None)
    began = time.monotonic()
    run = build(recipe, machine)
    result.took("build", began)
    result.add(weights=weights_in_words(run.model))
    corpus = corpus.ready_for(run, None, None) if references else corpus
    with corpus.loader(recipe, run.loader_options) as loader:
        began = time.monotonic()
        result.add(timing=time_steps(run, loader, Timing(**spec["timing"])))
        result.took("timing", began)
        stepper = Stepper(run, loader)
        if spec["profile"]:
            began = time.monotonic()
            result.add(evidence=_watch(run, stepper, kernels(recipe.shape())))
            result.took("profile", began)
        stepper()
        assert stepper.last is not None
        result.add(loss=stepper.last.result().loss)


def _need(options: BaselineOptions) -> None:
    missing = [name for name in options.needs if find_spec(name) is None]
    if "trl" in missing:
        raise MachineError("the baseline needs trl; install it with pip install trl.")
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
        raise MachineError(
            f"the baseline needs {' and '.join(missing)}; install it with "
            f'pip install "optimization-rush[{extras}]".'
        )


def build_baseline(recipe: Recipe, machine: Machine, options: BaselineOptions) -> Run:
    """The library's model as a run of ours."""
    device, dtype = torch.device(machine.device), getattr(torch, options.dtype)
    if options.quantized:
        make = partial(baseline_model, recipe.shape(), torch.device("meta"), dtype, options.attention)
        model = quantized_model(make, device, dtype, seed=recipe.run.seed)
    else:
        model = baseline_model(recipe.shape(), device, dtype, options.attention)
    if options.with_liger:
        apply_liger(model)
    if options.rank is not None:
        model = with_adapters(model, options.rank, options.alpha, checkpointing=options.checkpointing)
    elif options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = build_optimizer(recipe, model, torch.optim.AdamW, fused)
    autocast = torch.bfloat16 if options.autocast else None
    padded = recipe.objective.kind in ("sft", "dpo")
    loader: dict[str, Any] = {"packing": Pad(0)} if padded else {}
    objective: Objective = NextToken()
    wrapped: list[Any] = [lambda plain: baseline_pass(model, padded=padded, autocast=autocast)]
    if options.preferences:
        bf16, checkpointing = options.autocast, options.checkpointing
        objective = library_preference(
            model, recipe, options.preferences, bf16=bf16, checkpointing=checkpointing
        )
        wrapped = []
    return Run(
        recipe,
        machine,
        device,
        model,
        optimizer=optimizer,
        objective=objective,
        autocast_dtype=autocast,
        loader_options=loader | ({"pin": True} if device.type == "cuda" else {}),
        pass_wrappers=wrapped,
    )


def apply_liger(model: Any) -> None:
    """Liger's kernels in the model, by the library's own function for its family."""
    family = model.config.model_type
    patch = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family}", None)
    if patch is None:
        raise RecipeError(
            f"Liger {version('liger-kernel')} has no kernels for models of type {family}; set with_liger = false."
        )
    patch(model=model)


def baseline_model(shape: Shape, device: torch.device, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """The library's model of this shape with random weights, ready to train."""
    if shape.learned_positions or shape.attention_softcap is not None:
        raise RecipeError(
            f"a baseline of kind transformers is a model with RoPE and without soft caps, which its SDPA attention does not have; the "
            f"recipe's model is of the family {shape.family}; take kind recipe."
        )
    transformers = import_module("transformers")
    table = config_from_shape(shape)
    architecture = table["architectures"][0]
    for key in ("architectures", "model_type", "dtype", "torch_dtype"):
        table.pop(key)
    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**table, "use_cache": False})
    config._attn_implementation = attention
    with _default_dtype(dtype), device:
        model = kind(config)
    return model.train()


def baseline_pass(model: Any, *, padded: bool = False, autocast: torch.dtype | None = None) -> Pass:
    """Forward and backward of a micro batch: the summed loss, as our own pass returns it."""

    def run(batch: Batch, share: Tensor) -> Tensor:
        # Our labels are shifted already. Divided by one item, the library's loss is the sum over labels.
        labels_bt = batch.labels_bt.contiguous()
        with torch.autocast(labels_bt.device.type, autocast, enabled=autocast is not None):
            found = model(
                input_ids=batch.tokens_bt,
                attention_mask=real_tokens(batch) if padded else None,
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


def _watch(run: Run, stepper: Stepper, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """The characteristic kernels that ran in a step; none on a CPU."""
    if run.device.type != "cuda":
        return []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        stepper()
    names = {event.key for event in profile.key_averages()}
    telling = sorted(name[:60] for name in names if any(part in name.lower() for part in INTERESTING))
    missing = [part for part in wanted if not any(part in name for name in names)]
    what = f"did not run: {', '.join(missing)}" if missing else f"ran {', '.join(telling)[:600]}"
    return [{"technique": "baseline", "took_effect": not missing, "what": what}]


def _versions(options: BaselineOptions) -> dict[str, str]:
    return {LIBRARIES[name]: version(LIBRARIES[name]) for name in options.needs}
