"""What a process of `scripts/same_bits.py` does by itself: digests of a run's first steps, or its speed with and without
`run.deterministic`.

python scripts/same_bits_trace.py trace|cost FILE RECIPE [KEY=VALUE]...
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rush.data import Steps
from rush.hardware import probe
from rush.hub.folders import starting_weights
from rush.lab.trial.timing import Timing, rates, time_steps
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.training.build import Run, build
from rush.training.corpus import open_corpus
from rush.training.schedule import learning_rate
from rush.training.step import train_step

STEPS = 3
TIMING = Timing(windows=8, window_ms=0.0, warmup_max_steps=12, warmup_max_s=30.0, timed_max_s=20.0)


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def opened(recipe: Recipe) -> tuple[Run, Steps]:
    weights = starting_weights(recipe)
    run = build(recipe, probe(recipe.run.device), weights)
    corpus = open_corpus(recipe, None, lambda text: None).ready_for(run, weights, None)
    return run, corpus.loader(recipe, run.loader_options)


def trace(recipe: Recipe) -> dict[str, Any]:
    """Gradients of the first step, made twice without an update between; then a few steps; and the compiler's choices."""
    began = time.perf_counter()
    run, loader = opened(recipe)
    with loader:
        batches = list(loader.next_step())
        gradients: list[dict[str, str]] = []
        losses: list[str] = []
        for _ in range(2):
            with run.in_step():
                loss_scale = torch.full((), 1 / sum(batch.num_labels for batch in batches), device=run.device)
                losses.append(float(run.passes.train(list(run.local_batches(batches)), loss_scale)).hex())
            gradients.append(
                {name: digest(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}
            )
            run.optimizer.zero_grad(set_to_none=True)
        steps: list[Any] = []
        for step in range(1, STEPS + 1):
            found = train_step(
                run, step, learning_rate(recipe, step), batches if step == 1 else loader.next_step()
            )
            weights = {name: digest(parameter) for name, parameter in run.model.named_parameters()}
            steps.append({"loss": found.loss.hex(), "grad_norm": found.grad_norm.hex(), "weights": weights})
    return {
        "losses": losses,
        "gradients": gradients,
        "steps": steps,
        "kernels": chosen_configs(),
        "seconds": time.perf_counter() - began,
    }


def chosen_configs() -> dict[str, list[str]]:
    """The tiles that the compiler took, by the kernel's name (the same in every process; a name may be there twice)."""
    if "torch._inductor.codecache" not in sys.modules:
        return {}
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    held: Any = PyCodeCache.modules
    found: dict[str, list[str]] = {}
    for module in held.values() if isinstance(held, dict) else held:
        for name, kernel in vars(module).items():
            if isinstance(kernel, CachingAutotuner):
                found.setdefault(name, []).extend(str(launcher.config) for launcher in kernel.launchers)
    return {name: sorted(taken) for name, taken in sorted(found.items())}


def cost(recipe: Recipe) -> dict[str, Any]:
    """Tokens per second without the key and with it, one after the other in this process, alone on the device."""
    found: dict[str, Any] = {}
    for wanted in (False, True):
        one = recipe.model_copy(update={"run": recipe.run.model_copy(update={"deterministic": wanted})})
        run, loader = opened(one)
        with loader:
            timing = time_steps(run, loader, TIMING)
        samples = rates(timing)
        found["deterministic" if wanted else "plain"] = {
            "tokens_per_s": sorted(samples)[len(samples) // 2],
            "samples": samples,
            "peak_memory_bytes": timing["peak_memory_bytes"],
            "compile_s": timing["compile_s"],
            "steady": timing["steady"],
        }
        del run, loader
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    kind, path, name, *overrides = sys.argv[1:]
    result = {"trace": trace, "cost": cost}[kind](load_recipe(name, overrides))
    Path(path).write_text(json.dumps(result, indent=1))
