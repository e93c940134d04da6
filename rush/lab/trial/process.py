"""The inside of a trial: a process forked by `rush.lab.trial.starter`, or `python -m rush.lab.trial.process SPEC RESULT`.

Reads a spec (JSON), executes it, writes the result (JSON). The result is rewritten after each part, so that a
failing profile or parity run does not lose the timing. Errors that the ladder handles become a status here;
every other exception ends the process with its traceback, and the parent reads the last line.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rush.errors import MachineError
from rush.hardware import Machine, ceilings, probe
from rush.hardware.catalog import CATALOG, datasheet_peak
from rush.hub.folders import starting_weights
from rush.lab.parity.audit import Audited, held_against_plain, record
from rush.lab.parity.trace import trace, without_rounding
from rush.lab.trial.fingerprint import fingerprint
from rush.lab.trial.found import AuditFound
from rush.lab.trial.parent_death import die_with_parent
from rush.lab.trial.result import TrialResult, settle
from rush.lab.trial.timing import Stepper, Timing, time_steps
from rush.profiling.observe import observe
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.techniques import registry
from rush.techniques.api.evidence import evidence_rows
from rush.techniques.api.own_files import add_technique
from rush.techniques.api.rates import rates_to_measure
from rush.training.build import Run, build
from rush.training.corpus import Corpus, open_corpus
from rush.training.epochs import with_steps

Work = Callable[[Mapping[str, Any], TrialResult], None]


def main(spec_path: str, result_path: str, parent: int) -> None:
    die_with_parent(parent)
    spec = json.loads(Path(spec_path).read_text())
    result = TrialResult(Path(result_path))
    settle(result, lambda: _work_of(spec["kind"])(spec, result))


def _work_of(kind: str) -> Work:
    """What a trial of this kind does: one of ours, or the function that a kind `module:function` names."""
    if kind in _WORK:
        return _WORK[kind]
    module, _, function = kind.partition(":")
    work: Work = getattr(import_module(module), function)
    return work


def _look(spec: Mapping[str, Any], result: TrialResult) -> None:
    """The machine's record; for GPUs with the rates that predictions use."""
    machine = probe(spec["device"])
    result.add(machine=machine.to_dict())
    if machine.device == "cuda":
        result.add(ceilings=ceilings(machine).rates())


def _prepare(spec: Mapping[str, Any], result: TrialResult) -> None:
    """The work done once per ladder, in this process so that the ladder itself never touches the device."""
    machine = probe(spec["device"])
    result.add(machine=machine.to_dict())
    every = machine.device != "cpu" or spec["every_dtype"]
    rates = ceilings(machine, rates_to_measure(machine, build=True) if every else ["float32"]).rates()
    names = sorted({dtype for sheet in CATALOG.values() for dtype in sheet.peak_flops})
    peaks = {dtype: peak for dtype in names if (peak := datasheet_peak(machine, dtype)) is not None}
    result.add(ceilings=rates, peaks=peaks or None)


def _measure(spec: Mapping[str, Any], result: TrialResult) -> None:
    """Time the recipe, profile it, and trace its parity, as the spec requests."""
    for path in spec["extra_techniques"]:
        add_technique(Path(path))
    recipe, machine = _recipe(spec["recipe"]), Machine.from_dict(spec["machine"])
    result.add(techniques=declared(recipe))
    corpus = open_corpus(recipe, None, lambda text: None)
    audited = None
    if spec["timing"] is not None:
        audited = _time(recipe, machine, corpus, spec, result)
    # The timed run is out of scope now; its memory must be free before another is built.
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()
    for number, parity in enumerate(spec["parity"]):
        _trace(parity, machine, parity.get("as", ("trace", "twin")[number]), result)
    # Last, because plain fp32 may not fit.
    if audited is not None:
        began = time.monotonic()
        result.add(audit=_audit(audited, _recipe(spec["audit"]), machine))
        result.took("audit", began)


def _trace(parity: Mapping[str, Any], machine: Machine, name: str, result: TrialResult) -> None:
    """One trace; and where its techniques round, another step without those that do."""
    wanted, file = _recipe(parity["recipe"]), Path(parity["gradients"])
    began, text = time.monotonic(), open_corpus(wanted, None, lambda text: None)
    options = {key: parity[key] for key in ("steps", "as_timed", "at_least", "budget_s") if key in parity}
    found = trace(wanted, machine, text, file, rounded=parity["rounded"], **options)
    result.add(**{name: found.to_dict()})
    result.took(f"parity {name}", began)
    exact = without_rounding(wanted, machine) if name == "trace" else None
    if exact is not None:
        began, beside = time.monotonic(), file.with_name(f"{file.stem}-fp32{file.suffix}")
        in_fp32 = trace(exact, machine, text, beside, steps=1).to_dict()
        names = [name for name, _ in exact.technique_uses()]
        result.add(trace={**found.to_dict(), "in_fp32": {**in_fp32, "techniques": names}})
        result.took("parity in fp32", began)


def _audit(audited: Audited, plain: Recipe, machine: Machine) -> AuditFound:
    """The steps after the timing against plain fp32, or why not if it does not fit in memory."""
    try:
        return held_against_plain(audited, plain, machine)
    except (MemoryError, torch.OutOfMemoryError, MachineError) as error:
        return {"steps": 0, "why": f"plain fp32 did not fit: {str(error).splitlines()[0][:200]}"}


def _time(
    recipe: Recipe, machine: Machine, corpus: Corpus, spec: Mapping[str, Any], result: TrialResult
) -> Audited | None:
    """Time the recipe and profile it; returns what the steps after the timing did, for `_audit`."""
    began = time.monotonic()
    weights = starting_weights(recipe)
    run = build(recipe, machine, weights)
    corpus = corpus.ready_for(run, weights, None)
    result.took("build", began)
    audited = None
    with corpus.loader(recipe, run.loader_options) as loader:
        run.recipe = with_steps(recipe, loader)
        began = time.monotonic()
        stepper = Stepper(run, loader)
        stepper.log.watch(run)
        timing = time_steps(run, loader, Timing(**spec["timing"]), stepper=stepper)
        result.add(timing=timing)
        result.took("timing", began)
        if spec["profile"]:
            began = time.monotonic()
            _watch(run, Stepper(run, loader), result)
            result.took("profile", began)
        if spec.get("audit") is not None and not (timing["hopeless"] or timing["cold"]):
            began = time.monotonic()
            audited = record(run, stepper)
            result.took("audited steps", began)
    return audited


def _watch(run: Run, stepper: Stepper, result: TrialResult) -> None:
    seen = observe(run, stepper.batches)
    result.add(
        evidence=evidence_rows(run.uses, seen),
        breakdown_ms=dict(seen.breakdown_ms),
        longest=list(seen.longest),
        block_forwards=seen.block_forwards,
        seen=fingerprint(run, seen),
    )


def declared(recipe: Recipe) -> dict[str, Any]:
    """What the recipe's techniques claim and promise, for the record; unknown names are for `check` to refuse."""
    known = registry()
    return {
        name: {
            "parity": known[name].parity.name,
            "relative_error": known[name].relative_error,
            "claim": {
                "metric": known[name].claim.metric,
                "gain": known[name].claim.gain,
                "regime": known[name].claim.regime,
                "source": known[name].claim.source,
                "relative_to": known[name].claim.relative_to,
            },
        }
        for name, _ in recipe.technique_uses()
        if name in known
    }


def _recipe(toml: str) -> Recipe:
    return parse(tomllib.loads(toml))


_WORK: Mapping[str, Work] = {"look": _look, "prepare": _prepare, "measure": _measure}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], os.getppid())
