"""Measure recipes that have nothing to do with each other, to compare the planner with.

    python scripts/plan_cases.py --out results/plan-cases-h200 --within 290

A ladder goes up step by step; a planner is tested by recipes far apart. Each case of `plan_cases.toml` (or of another
file) is a recipe with changes; each is timed and watched in a fresh process, briefly and once, without parity: figures of
time and memory, no findings. The record is a ladder's, so that `rush plan --check` reads it. What was measured is kept: the
same command resumes where it stopped, and after `--within` seconds no further case is begun.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.lab.ladder.findings import FORMULAS, Baselines, RungState, rung_of  # noqa: E402
from rush.lab.ladder.ladder_file import LadderPlan, MeasureConfig, ParityConfig, SearchConfig, read_table  # noqa: E402
from rush.lab.paired import floors_of  # noqa: E402
from rush.lab.statistics import center  # noqa: E402
from rush.lab.trial.runner import Bench, open_bench  # noqa: E402
from rush.recipe import Recipe  # noqa: E402
from rush.recipe_io import changed, load_recipe, write_toml  # noqa: E402
from rush.records.ladder import FORMAT, LadderRecord, write_ladder  # noqa: E402
from rush.training.corpus import open_corpus  # noqa: E402


def read_cases(path: Path) -> tuple[dict[str, Recipe], MeasureConfig]:
    """The recipes by name, and how they are timed. A step is one micro batch, unless a case says how many tokens it has."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    cases = {}
    for name, (recipe, *changes) in tree["cases"].items():
        one = load_recipe(recipe, [*tree["common"], *changes])
        if not any(change.startswith("batch.total_tokens") for change in changes):
            one = changed(one, {"batch.total_tokens": one.micro * one.batch.sequence})
        cases[name] = one
    return cases, read_table(MeasureConfig, tree, "measure", path)


def measure(cases: dict[str, Recipe], how: MeasureConfig, folder: Path, within_s: float) -> LadderRecord:
    """Every case that there is time for, the record written after each."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    first = next(iter(cases.values()))
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in cases.values():
        open_corpus(recipe, None, say)
    with open_bench(LadderPlan(folder.name, first, (), how, ParityConfig(), SearchConfig()), folder) as bench:
        states: list[RungState] = []
        record = _record(bench, states, started, finished=False)
        for name, recipe in cases.items():
            known = bench.known(recipe, "case") is not None
            if not known and time.monotonic() - began > within_s:
                say(f"{name}: no time left")
                continue
            state = RungState(None, name, name, recipe, [bench.run(recipe, "case", first=True, traced=False)])
            states.append(state)
            say(f"{name}: {_told(state)} ({time.monotonic() - began:.0f} s)")
            record = _record(bench, states, started, finished=len(states) == len(cases))
            write_ladder(folder / "ladder.json", record)
        bench.clean()
    return record


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _told(state: RungState) -> str:
    if not state.measured:
        return f"{state.status}: {state.reason}"
    return f"{center(state.processes):,.0f} tokens/s, {state.peak_memory[0] / 2**30:.2f} GiB"


def _record(bench: Bench, states: Sequence[RungState], started: str, *, finished: bool) -> LadderRecord:
    base = bench.plan.base
    how = bench.plan.measure
    baselines = Baselines(bench.ceilings, bench.peaks, floors_of([], how.noise_floor), how.smaller)
    record: Any = {
        "format": FORMAT, "name": bench.plan.name, "view": "alone", "started": started,
        "finished": datetime.now(UTC).isoformat(timespec="seconds") if finished else None,
        "machine": bench.machine.to_dict(), "ceilings": bench.ceilings, "peaks": bench.peaks,
        "base": {"recipe": write_toml(base), "digest": base.digest}, "formulas": FORMULAS, "rungs": [rung_of(state, state, baselines) for state in states],
        "counted": "processed", "drift": None, "batch_curve": None, "batch_stops_paying_at": None,
        "sequence_limits": None, "interactions": None,
    }  # fmt: skip
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="?", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--out", type=Path, default=Path("runs/plan-cases"))
    parser.add_argument("--within", type=float, default=3600.0, metavar="SECONDS")
    given = parser.parse_args(arguments)
    cases, how = read_cases(given.cases)
    record = measure(cases, how, given.out, given.within)
    say(f"{len(record['rungs'])} of {len(cases)} cases: {given.out / 'ladder.json'}")


if __name__ == "__main__":
    main()
