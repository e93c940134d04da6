"""The inside of a trial on several ranks: one process starts them with torchrun's engine, waits, and merges their results.

The trial's process has only imported, so ranks are forked from it: as fresh as a new process, a dozen seconds sooner. (Not on
GPUs: torchrun's engine queries the number of CUDA devices, after which a fork cannot use them.) The rendezvous is torchrun's,
and ranks join as in `rush train`. They must run the same number of steps, so every decision (warm enough? how many samples?) is
based on the slowest rank's seconds, which all ranks share. Each rank records its own memory; rank 0 also everything else.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rush.errors import MachineError
from rush.hardware import Machine
from rush.hardware.memory_use import free_cached
from rush.hub.folders import starting_weights
from rush.lab.trial.result import TrialResult, settle
from rush.lab.trial.timing import Stepper, Timing, time_steps
from rush.parallel import AXES, Ranks, join, started_rank
from rush.parallel.launching import local_config
from rush.parallel.slurm_ranks import set_rank_variables
from rush.profiling.observe import observe
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.techniques import check
from rush.techniques.api.evidence import evidence_rows
from rush.techniques.api.own_files import add_technique
from rush.training.build import Run, build
from rush.training.corpus import Corpus, open_corpus
from rush.training.epochs import with_steps
from rush.training.schedule import learning_rate
from rush.training.step import train_step

OWN = ("peak_memory_bytes", "exchange_ms", "exposed_ms", "profiled_step_ms", "evidence")
"""What every rank reports about itself."""
BLAME = ("out_of_memory", "diverged", "unsupported", "crashed")
"""Where ranks ended differently, the first of these is the cause."""

SEEN_FIRST_S = 2.0
"""A rank that lost another one ends this much later: the engine reports one rank that failed, and ends the others when it sees it."""


def lead(spec: Mapping[str, Any], result: TrialResult) -> None:
    """Start the ranks of a spec and wait for all of them."""
    world = spec["world"]
    for path in spec.get("extra_techniques", ()):
        add_technique(Path(path))
    if spec["recipe"] is not None:
        check(_recipe(spec["recipe"]), Machine.from_dict(spec["machine"]))  # before a process is started
    exits: dict[int, int] = {}
    if world == 1:
        be_rank(spec, str(result.path))
    elif spec["launcher"]:
        _start_by(spec["launcher"], world, result.path)
    else:
        exits = _start(world, spec, str(result.path))
    _gather(world, exits, result)


def _start(num_ranks: int, spec: Mapping[str, Any], path: str) -> dict[int, int]:
    """The exit codes of the ranks that failed (negative: the signal)."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    start_method = "fork" if sys.platform == "linux" and spec["machine"]["device"] != "cuda" else "spawn"
    config = local_config(num_ranks, monitor_interval=0.05, start_method=start_method)
    try:
        elastic_launch(config, be_rank)(spec, path)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _start_by(launcher: str, num_ranks: int, result: Path) -> None:
    """Let a cluster's own command start the ranks, on whatever nodes it has; the study's folder is one that all of them see."""
    words = shlex.split(launcher.replace("{ranks}", str(num_ranks)))
    spec = result.with_name("spec.json")
    done = subprocess.run(
        [*words, sys.executable, "-m", "rush.lab.scaling.rank_trial", str(spec), str(result)], check=False
    )
    if done.returncode and not result.exists():
        raise MachineError(
            f"the launcher ended with {done.returncode} before a rank wrote anything: {launcher}"
        )


def _gather(num_ranks: int, exits: Mapping[int, int], result: TrialResult) -> None:
    """The results of all ranks as one, with the status of the rank at fault."""
    files = [_file(result.path, rank) for rank in range(num_ranks)]
    reports = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    result.found |= reports[0]
    result.found["complete"] = False
    result.add(ranks=[{key: one.get(key) for key in OWN} for one in reports])
    endings = [
        (
            bool(one.get("lost")),
            BLAME.index(one.get("ended", one["status"])),
            str(one.get("ended_reason", one.get("reason"))),
        )
        for one in reports
        if one.get("complete") and (one["status"] != "ok" or "ended" in one)
    ]
    for rank, code in exits.items():
        if code == -signal.SIGKILL:
            how = "was killed from outside (SIGKILL), which is what Linux does when memory runs out"
            endings.append((False, BLAME.index("out_of_memory"), f"rank {rank} {how}."))
        elif not reports[rank].get("complete"):
            # SIGTERM is how the engine ends the others.
            endings.append(
                (code == -signal.SIGTERM, BLAME.index("crashed"), f"rank {rank} ended with {code}.")
            )
    if endings:
        # A rank that lost the connection to another one is not at fault.
        _, status, reason = min(endings)
        result.finish(BLAME[status], reason)


def _file(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"rank-{rank}.json")


def be_rank(spec: Mapping[str, Any], path: str) -> None:
    """One of the ranks; it ends with 1 where something went wrong, so that the engine ends the others."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a fork has the engine's own answers, which are for the engine
    rank = started_rank()
    result = TrialResult(_file(Path(path), rank))
    if spec["threads"] is not None:
        torch.set_num_threads(spec["threads"])
    try:
        settle(result, lambda: (_measure if spec["recipe"] is not None else _time_collectives)(spec, result))
    except Exception as error:
        traceback.print_exc()
        last = str(error).strip().splitlines()
        result.finish("crashed", f"rank {rank}: {type(error).__name__}: {last[0][:300] if last else ''}")
    if result.found["status"] != "ok" or "ended" in result.found:
        sys.stderr.flush()
        if result.found.get("lost"):
            time.sleep(SEEN_FIRST_S)
        os._exit(1)  # a failed rank must exit without waiting for the others


def _measure(spec: Mapping[str, Any], result: TrialResult) -> None:
    """Time, profile and trace, as the spec requests."""
    for path in spec["extra_techniques"]:
        add_technique(Path(path))
    recipe, machine = _recipe(spec["recipe"]), Machine.from_dict(spec["machine"])
    with join(recipe.layout.model_dump(), machine.device) as ranks:
        result.add(backend=None if ranks.alone else str(torch.distributed.get_backend()))
        corpus = open_corpus(recipe, None, lambda text: None)
        if spec["timing"] is not None or spec["profile"]:
            _step(recipe, machine, corpus, ranks, spec, result)
        # The timed run is out of scope now; its memory must be free before another is built.
        free_cached(machine.device)
        if spec["parity"] is not None:
            began = time.monotonic()
            result.add(trace=trace(_recipe(spec["parity"]), machine, corpus, ranks))
            result.took("parity", began)


def _time_collectives(spec: Mapping[str, Any], result: TrialResult) -> None:
    """Time the operations that layouts use, over message sizes."""
    from rush.hardware.collective_rank import spectrum

    machine, world = Machine.from_dict(spec["machine"]), spec["world"]
    with join({axis: world if axis == "ddp" else 1 for axis in AXES}, machine.device) as ranks:
        on_gpu = machine.device == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        backend = torch.distributed.get_backend()
        found = spectrum(ranks.rank, world, device, backend, spec["budget_s"])
        result.add(backend=backend, spectrum=found)


def _step(
    recipe: Recipe,
    machine: Machine,
    corpus: Corpus,
    ranks: Ranks,
    spec: Mapping[str, Any],
    result: TrialResult,
) -> None:
    began = time.monotonic()
    weights = starting_weights(recipe)
    run = build(recipe, machine, weights, ranks)
    corpus = corpus.ready_for(run, weights, None)
    result.took("build", began)
    with corpus.loader(recipe, run.loader_options) as loader:
        run.recipe = with_steps(recipe, loader)
        if spec["timing"] is not None:
            began = time.monotonic()
            found = time_steps(run, loader, Timing(**spec["timing"]), agreement(ranks))
            result.add(timing=found, peak_memory_bytes=found["peak_memory_bytes"])
            result.took("timing", began)
        if spec["profile"]:
            began, stepper = time.monotonic(), Stepper(run, loader)
            if spec["timing"] is None:
                stepper()  # warmed up, at least
                stepper.settle()
            _watch(run, stepper, result)
            result.took("profile", began)


def agreement(ranks: Ranks) -> Callable[[float], float]:
    """From each rank's seconds to those of the slowest, which all then know."""

    def slowest(seconds: float) -> float:
        if ranks.mesh is None:
            return seconds
        most = torch.tensor(seconds, dtype=torch.float64, device=ranks.mesh.device_type)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return float(most)

    return slowest


def _watch(run: Run, stepper: Stepper, result: TrialResult) -> None:
    """A profile of a step, by every rank at the same time."""
    seen = observe(run, stepper.batches, steps=1)
    result.add(
        evidence=evidence_rows(run.uses, seen),
        breakdown_ms=dict(seen.breakdown_ms),
        exchange_ms=seen.comm_ms,
        exposed_ms=seen.exposed_comm_ms,
        profiled_step_ms=seen.step_ms,
        dtype=run.matmul_dtype(),
    )
    if "peak_memory_bytes" not in result.found:
        result.add(peak_memory_bytes=seen.peak_memory_bytes)


def trace(recipe: Recipe, machine: Machine, corpus: Corpus, ranks: Ranks) -> dict[str, Any]:
    """Loss and gradient norm of every step of a parity recipe; ranks know those of the whole step."""
    weights = starting_weights(recipe)
    run = build(recipe, machine, weights, ranks)
    corpus = corpus.ready_for(run, weights, None)
    losses, norms = [], []
    with corpus.loader(recipe, run.loader_options) as loader:
        for step in range(1, recipe.steps + 1):
            found = train_step(run, step, learning_rate(recipe, step), loader.next_step())
            losses.append(found.loss)
            norms.append(found.grad_norm)
    return {"losses": losses, "grad_norms": norms, "dtype": run.matmul_dtype()}


def _recipe(toml: str) -> Recipe:
    return parse(tomllib.loads(toml))


if __name__ == "__main__":
    set_rank_variables()
    be_rank(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
