"""Runs of a few thousand parameters on real text (as bytes), to compare techniques with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rush.data import Batch, Loader
from rush.data.document_loader import DocumentLoader
from rush.hardware import Machine, probe
from rush.profiling.observe import observe
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.loss_curves import ParityVerdict
from rush.techniques.api.contract import Observation
from rush.techniques.api.tolerances import gradient_errors, gradients_of, judge
from rush.training.build import Run, build
from rush.training.step import clip_factor, train_step
from tests.real_text import as_bytes as text

ROOT = Path(__file__).resolve().parents[2]

SHAPE = ["model.shape.num_layers=2", "model.shape.hidden=64", "model.shape.num_heads=4", "model.shape.head_dim=16",
         "model.shape.intermediate=96", "model.shape.vocab_size=257", "model.shape.context=32", "batch.sequence=32",
         "batch.micro=4", "batch.total_tokens=128", "optimizer.lr=0.003"]  # fmt: skip
# Sixteen-bit matmuls crawl on CPUs without units for them.
SHORT = ["model.shape.hidden=32", "model.shape.head_dim=8", "model.shape.intermediate=48", "model.shape.num_layers=1",
         "batch.sequence=16", "batch.micro=2", "batch.total_tokens=32"]  # fmt: skip
# Techniques whose kernels the interpreter takes long for: one row through one block.
INTERPRETED_SLOWLY = {
    "cpu_attention": ["model.shape.num_layers=1", "batch.micro=1", "batch.total_tokens=32"],
    "triton_attention": ["model.shape.num_layers=1", "batch.micro=1", "batch.total_tokens=32"],
}


@dataclass(frozen=True)
class TextWindows:
    sequence: int

    def __len__(self) -> int:
        return (len(text()) - 1) // self.sequence

    def window(self, index: int) -> npt.NDArray[np.int64]:
        return text()[index * self.sequence : (index + 1) * self.sequence + 1]

    def sample_name(self, index: int) -> str:
        return f"window {index}"


def recipe_of(*techniques: str, name: str = "llama-tiny", overrides: Iterable[str] = ()) -> Recipe:
    """A recipe with these techniques, each a name or a TOML table."""
    listed = ", ".join(entry if entry.startswith("{") else f"'{entry}'" for entry in techniques)
    heads = ["model.shape.num_kv_heads=4"] if name == "tiny" else ["model.shape.num_kv_heads=2"]
    return load_recipe(name, [*SHAPE, *heads, *overrides, f"techniques=[{listed}]"])


def make_run(
    *techniques: str, name: str = "llama-tiny", overrides: Iterable[str] = (), machine: Machine | None = None
) -> Run:
    return build(recipe_of(*techniques, name=name, overrides=overrides), machine or probe("cpu"))


@dataclass(frozen=True)
class TextDocuments:
    """Pieces of the text as documents of unequal length; the second half of each is trained."""

    count: int = 200
    longest: int = 33

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return 5 + np.arange(self.count) * 7919 % (self.longest - 4)

    def __len__(self) -> int:
        return self.count

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        return text()[index * self.longest :][: self.lengths[index]]

    def trained(self, index: int) -> npt.NDArray[np.bool_]:
        return np.arange(self.lengths[index]) >= self.lengths[index] // 2

    def sample_name(self, index: int) -> str:
        return f"document {index}"


def make_loader(run: Run) -> Loader | DocumentLoader:
    batch = run.recipe.batch
    if run.recipe.objective.kind == "sft":
        # Steps of the same documents, however they are packed, so that their losses can be held together.
        return DocumentLoader(
            TextDocuments(longest=batch.sequence + 1),
            micro=batch.micro,
            sequence=batch.sequence,
            batches_per_step=run.recipe.accumulation,
            seed=run.recipe.run.seed,
            documents_per_step=batch.micro * run.recipe.accumulation,
            **run.loader_options,
        )
    return Loader(
        TextWindows(batch.sequence),
        samples_per_step=run.recipe.step_tokens // batch.sequence,
        micro=batch.micro,
        seed=run.recipe.run.seed,
        **run.loader_options,
    )


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    seen: Observation | None


def trace(run: Run, steps: int, watch: bool = False) -> Trace:
    """Losses and gradient norms of the steps, and the gradients of the first; then watched, if asked for."""
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            gradients.update(gradients_of(run.model))

    handle = run.optimizer.register_step_pre_hook(keep)
    with make_loader(run) as loader:
        for step in range(1, steps + 1):
            result = train_step(run, step, run.recipe.optimizer.lr, loader.next_step())
            losses.append(result.loss)
            norms.append(result.grad_norm)
        handle.remove()
        factor = clip_factor(run, norms[0])
        gradients = {name: gradient / factor for name, gradient in gradients.items()}
        seen = observe(run, lambda: list(loader.next_step()), steps=1) if watch else None
    return Trace(losses, norms, gradients, seen)


def compare(run: Run, dtype: str, ours: Trace, reference: Trace) -> ParityVerdict:
    """The verdict on a run by the loosest class its techniques declare."""
    classes = [use.technique.parity for use in run.uses]
    loosest = max(classes, key=list(type(classes[0])).index)
    return judge(
        loosest,
        dtype,
        ours.losses,
        reference.losses,
        ours.grad_norms,
        reference.grad_norms,
        gradient_errors(ours.gradients, reference.gradients),
        relative_error=max(use.technique.relative_error for use in run.uses),
    )


def one_batch(run: Run) -> list[Batch]:
    with make_loader(run) as loader:
        return list(loader.next_step())
