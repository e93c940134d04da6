"""A dress rehearsal: the real search and the real bench, but a trial's process is played.

    python -m tests.tune.rehearsal gpt2-124m 15

The machine is the H200 of `results/models-h200`; its speeds are those of `h200.py`; a trial takes the seconds that such trials
took there, on a clock that jumps. What is played is only what lies behind `Starter.run` and `Starter.rush`: everything in front of
it, the files of trials, parity's verdicts from traces, what a life is checked for, the budget, is what a user gets.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from rush.files import write_json_atomic
from rush.hardware import Machine
from rush.lab.ladder.ladder_file import LadderPlan
from rush.lab.life import life
from rush.lab.trial import trial
from rush.lab.trial.process import declared
from rush.lab.trial.runner import Bench
from rush.lab.trial.starter import Streams
from rush.recipe import Recipe
from rush.recipe_io import load_recipe, parse
from rush.records.run_folder import RunFolder
from rush.records.tune import TuneRecord
from rush.techniques import Parity
from rush.tune import tuning
from rush.tune.budget import Budget
from rush.tune.goal import Goal
from rush.tune.record import Request
from tests.tune.h200 import memory_gib, tokens_per_s, workloads

LEARNS_THE_SAME = frozenset({Parity.EXACT, Parity.CLOSE, Parity.STATISTICAL})
BUILD_S = {"gpt2-124m": 2.3, "llama-3.2-1b": 5.0}
NOISE = {"gpt2-124m": (0.007, 0.02), "llama-3.2-1b": (0.002, 0.008)}
"""Between processes of one recipe, and between the windows of one, as in the records."""
WARM = 0.4
"""Of compiling, where the compiler finds what it made: 8.4 of 12.9 s and 17.3 of 29.1 s were saved."""
PROFILE_S = 3.0
SAVE_S = 2.0
"""Of a checkpoint, its hashes included; a guess."""
GIB = 139.0
"""What a run may hold of the device."""


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Player:
    """Plays a trial's process: reads its spec, writes what such a trial would have found, and lets the clock jump."""

    clock: Clock
    speed: Callable[[Recipe, int], float] = tokens_per_s
    gib: Callable[[Recipe], float] = memory_gib
    fails: Callable[[Recipe], str | None] = lambda recipe: None
    """Why a recipe cannot run, which only running it shows."""
    learns_else: Callable[[Recipe], bool] = lambda recipe: rounds_by_rule(recipe)  # noqa: PLW0108
    falls_behind: Callable[[Recipe], bool] = lambda recipe: False
    """After a hundred steps."""
    jumps: Callable[[Recipe], bool] = lambda recipe: False
    """Whether training from weights that were rounded once goes another way."""
    idle: frozenset[str] = frozenset()
    """Techniques that leave no trace."""
    breaks: frozenset[str] = frozenset()
    """Techniques with which no validation can be made."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    warm: set[str] = field(default_factory=set)
    """Folders that hold compiled graphs."""
    trials: list[tuple[str, float]] = field(default_factory=list)

    def run(
        self, spec: Path, result: Path, log: Path, extra: Mapping[str, str], limit_s: float
    ) -> int | None:
        told = json.loads(spec.read_text())
        recipe = parse(tomllib.loads(told["recipe"]))
        found: dict[str, Any] = {
            "complete": False,
            "status": "ok",
            "reason": None,
            "techniques": declared(recipe),
        }
        left_s, late = limit_s, False
        for seconds, part in self._parts(recipe, told, extra["TORCHINDUCTOR_CACHE_DIR"]):
            left_s -= seconds
            if late := left_s < 0:
                break
            found |= part
            if found["complete"]:
                break
        took_s = limit_s if late else limit_s - left_s
        self.clock.now_s += took_s
        self.trials.append((recipe.digest, took_s))
        found["complete"] = not late
        write_json_atomic(result, found)
        return None if late else 0

    def rush(
        self,
        words: Sequence[str],
        streams: Streams,
        environments: Sequence[Mapping[str, str]],
        limit_s: float,
        kill_when: Callable[[], bool] | None = None,
    ) -> list[int] | None:
        """Play `rush train`: a run folder with everything that a life looks at."""
        command, file, _, out, *rest = words
        assert command == "train"
        recipe, folder = parse(tomllib.loads(Path(file).read_text())), RunFolder(Path(out))
        (environment,) = environments
        # The compiler finds what it made for the trials, but not of a recipe that was made of another without a trial.
        warm = environment["TORCHINDUCTOR_CACHE_DIR"] in self.warm
        self.warm.add(environment["TORCHINDUCTOR_CACHE_DIR"])
        steps, every = recipe.schedule.steps, recipe.run.save_every
        done = folder.checkpoints.steps()[-1] if "--resume" in rest else 0
        # Of the graph without gradients nothing is found the first time.
        compiled_s = compile_seconds(recipe) * (WARM if done else WARM + 0.4 if warm else 1.4)
        self.clock.now_s += 1.5 + BUILD_S[recipe.model.name] + compiled_s + SAVE_S * (steps - done) / every
        self.clock.now_s += (steps - done) * recipe.step_tokens / self.speed(recipe, recipe.step_tokens)
        if names := sorted(self.breaks.intersection(name for name, _ in recipe.technique_uses())):
            said = f"The code of the technique {names[0]} is on the stack: take it out with techniques-={names[0]}."
            folder.path.mkdir(exist_ok=True)
            failure = {"phase": "validation", "step": every, "techniques": names[:1]}
            folder.last_failure.write_text(json.dumps(failure))
            streams.stderr.write_text(
                f"error: the validation after step {every} failed with X: it is played. {said}\n"
            )
            return [4]
        folder.path.mkdir(exist_ok=True)
        streams.stderr.write_text("")
        rows = [{"step": step, "loss": 11.0 - step, "tokens": step} for step in range(1, steps + 1)]
        due = [row for row in rows if row["step"] % every == 0]
        for row in due:
            row["val_loss"] = row["loss"] + 0.1
            (folder.checkpoints.begin(int(row["step"])) / "model").touch()
            folder.checkpoints.commit(int(row["step"]), {})
        folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        folder.samples.write_text("".join(f"{json.dumps({**row, 'text': 'played'})}\n" for row in due))
        folder.saves.write_text("".join(f"{json.dumps({'step': row['step']})}\n" for row in due))
        return [0]

    def _parts(
        self, recipe: Recipe, told: Mapping[str, Any], compiled: str
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """Seconds of each part of a trial, and what it found."""
        build_s, compile_s = BUILD_S[recipe.model.name], compile_seconds(recipe)
        yield 0.9, {}
        if told["timing"] is not None:
            cold = WARM if compiled in self.warm else 1.0
            if reason := self.fails(recipe):
                yield build_s, {"complete": True, "status": "unsupported", "reason": reason}
            if self.gib(recipe) > GIB:
                words = "memory ran out: CUDA out of memory."
                yield (
                    build_s + compile_s * cold,
                    {"complete": True, "status": "out_of_memory", "reason": words},
                )
            self.warm.add(compiled)
            rate, timing = self._timing(recipe, told["timing"])
            steps = timing["warmup_steps"] + 1.5 * len(timing["samples_s"])
            step_s = recipe.step_tokens / rate
            yield build_s + 0.6 + compile_s * cold + steps * step_s, {"timing": timing}
        if told["profile"]:
            names = [name for name, _ in recipe.technique_uses()]
            rows = [{"technique": n, "took_effect": n not in self.idle, "what": ""} for n in names]
            yield PROFILE_S if told["timing"] else 0.0, {"evidence": rows}
        for number, asked in enumerate(told["parity"]):
            wanted = parse(tomllib.loads(asked["recipe"]))
            steps_s = wanted.schedule.steps * wanted.step_tokens / self.speed(wanted, wanted.step_tokens)
            first_s = 2.2 * build_s if number == 0 and told["timing"] is None else 0.0
            trace = self._trace(wanted, asked["rounded"], Path(asked["gradients"]))
            seconds = 0.6 * build_s + first_s + 0.6 * compile_seconds(wanted) + steps_s
            yield seconds, {("trace", "twin")[number]: trace}

    def _timing(self, recipe: Recipe, asked: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        process, window = NOISE[recipe.model.name]
        rate = self.speed(recipe, recipe.step_tokens) * self.rng.gauss(1, process)
        step_s = recipe.step_tokens / rate
        hopeless = rate < asked["slowest"]
        windows = (
            2
            if hopeless
            else max(min(asked["windows"], 8), min(asked["windows"], int(asked["timed_max_s"] / step_s)))
        )
        warmup = 2 if hopeless else min(6, asked["warmup_max_steps"], 1 + int(asked["warmup_max_s"] / step_s))
        samples = [step_s * self.rng.gauss(1, window) for _ in range(windows)]
        tokens = [float(recipe.step_tokens)] * windows
        return rate, {
            "samples_s": samples,
            "steps_per_sample": 1,
            "counted": "processed",
            "sample_tokens": dict.fromkeys(("processed", "real", "trained"), tokens),
            "warmup_steps": 1 + warmup,
            "hopeless": hopeless,
            "data_wait_ms": 0.1 if "loader_workers" in dict(recipe.technique_uses()) else 1.0,
            "peak_memory_bytes": int(self.gib(recipe) * 2**30),
            "dtype": "bfloat16" if half(recipe) else "float32",
            "environment": {},
        }

    def _trace(self, wanted: Recipe, rounded: bool, gradients: Path) -> dict[str, Any]:
        gradients.parent.mkdir(parents=True, exist_ok=True)
        save_file({"weight": torch.ones(4)}, gradients)
        learned = 0.6 if self.learns_else(wanted) else 1.0
        steps = wanted.schedule.steps
        losses = [11.0 - learned * 3.0 * step / steps + (1e-4 if rounded else 0.0) for step in range(steps)]
        if self.falls_behind(wanted):
            losses[100:] = [loss + 0.005 * step for step, loss in enumerate(losses[100:])]
        if rounded and self.jumps(wanted):
            losses[steps // 2 :] = [loss + 1.0 for loss in losses[steps // 2 :]]
        return {"losses": losses, "grad_norms": [1.0] * steps, "skipped": 0}


def half(recipe: Recipe) -> bool:
    return bool(
        {"amp_bf16", "amp_fp16", "bf16_master", "pure_bf16"} & {name for name, _ in recipe.technique_uses()}
    )


def rounds_by_rule(recipe: Recipe) -> bool:
    """Weights in bf16 that are rounded to the nearest: found to learn something else."""
    uses = dict(recipe.technique_uses())
    by_chance = any(uses.get(name, {}).get("stochastic_rounding") for name in ("fused_update", "adam8bit"))
    return "pure_bf16" in uses and not by_chance


def compile_seconds(recipe: Recipe) -> float:
    """Cold, as `compile_s` of the records: Llama 12.9 by blocks, 28.6 whole, 12 more in 8 bits; GPT-2 22 and 29."""
    uses, gpt2 = dict(recipe.technique_uses()), recipe.model.name == "gpt2-124m"
    seconds = 0.5
    if "compile" in uses:
        block = uses["compile"].get("scope", "model") == "block"
        seconds += (22.0 if block else 29.0) if gpt2 else (12.9 if block else 28.6)
        seconds += 12.0 if "fp8" in uses else 0.0
    if "flex_attention" in uses:
        seconds += 9.0
    if uses.get("adam8bit", {}).get("backend", "torchao") == "torchao" and "adam8bit" in uses:
        seconds += 31.0
    if {"fused_loss", "fused_update", "fused_bias", "fused_norm", "triton_attention", "fp8"} & set(uses):
        seconds += 2.0
    return seconds


@dataclass
class Rehearsal:
    record: TuneRecord
    winner: Recipe
    player: Player
    thought_s: float
    """What the search itself computed, on this machine."""


def rehearse(
    recipe: Recipe,
    folder: Path,
    budget_s: float = 900.0,
    player: Player | None = None,
    cache: Path | None = None,
) -> Rehearsal:
    """Search as `rush tune` does; what earlier searches found is in `cache`, if there were any."""
    player = player or Player(Clock())
    found, clock = workloads()["machine"], player.clock

    @contextmanager
    def open_bench(plan: LadderPlan, folder: Path, *rest: Any, **options: Any) -> Iterator[Bench]:
        machine = Machine.from_dict(found["machine"])
        yield Bench(plan, folder, player, machine, found["ceilings"], found["peaks"])  # type: ignore[arg-type]

    name, began = recipe.model.name, time.monotonic()
    request = Request(name, recipe, Goal(), LEARNS_THE_SAME, budget_s)
    with (
        patch.multiple(
            tuning, open_bench=open_bench, open_corpus=lambda *rest: None, Budget=partial(Budget, clock=clock)
        ),
        patch.dict(os.environ, {"RUSH_CACHE": str(cache or folder / "cache")}),
        patch.object(trial, "time", SimpleNamespace(monotonic=clock)),
        patch.object(life, "time", SimpleNamespace(monotonic=clock)),
    ):
        record = tuning.tune(request, folder)
    winner = load_recipe(str(folder / "recipe.toml"))
    return Rehearsal(record, winner, player, time.monotonic() - began)


def time_line(done: Rehearsal) -> Iterator[str]:
    """Every trial, then every change that was not tried, and why."""
    rows = {row["key"]: row for row in done.record["candidates"]}
    for event in done.record["events"]:
        row = rows.get(event["candidate"])
        why = f": {row['reason']}" if row and event["kind"] == "rank" else ""
        what = f"{event['kind']} {event['candidate']}"
        yield f"{event['began_s']:5.0f} s {event['wall_s']:4.0f} s  {what}{why}"
    for row in done.record["candidates"]:
        if not row["tokens_per_s"]:
            yield f"{'':14}{row['state']}: {row['key']}: {row['reason']}"


def summary(done: Rehearsal) -> Iterator[str]:
    winner, name = done.record["winner"], done.winner.model.name
    assert winner is not None
    found, best = tokens_per_s(done.winner), tokens_per_s(load_recipe(f"{name}-fast"))
    yield f"winner: {winner['what']}"
    yield f"{found:,.0f} tokens/s, {found / best:.3f} of {name}-fast ({best:,.0f})"
    yield f"{done.record['spent_s']:.0f} s spent; the search itself computed for {done.thought_s:.1f} s"


def main(model: str, minutes: str = "15", *changes: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = rehearse(load_recipe(model, list(changes)), Path(folder) / "out", 60 * float(minutes))
    sys.stdout.writelines(f"{line}\n" for line in (*time_line(done), *summary(done)))


if __name__ == "__main__":
    main(*sys.argv[1:])
