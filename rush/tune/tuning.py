"""A search in a folder: started or resumed, recorded, with its results.

DIR/tune.json     every candidate with its reason, every trial with its time: written after each
DIR/recipe.toml   the winner, ready for `rush train`
DIR/trials/       one file per finished trial, which is not run again
DIR/parity/       the traces that parity was judged from
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rush.errors import RecipeError
from rush.files import timestamp, write_atomic
from rush.lab.trial.runner import Bench, open_bench
from rush.plan.micro_batch import with_chosen_micro
from rush.plan.target import target_here
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.records.lock import FolderLock
from rush.records.tune import TUNE, TuneRecord, read_tune, write_tune
from rush.techniques import Parity
from rush.training.corpus import open_corpus
from rush.tune.budget import Budget
from rush.tune.by_hand import beside, fit_beside
from rush.tune.candidates import Candidate
from rush.tune.earlier import RememberedGain, remember, remembered
from rush.tune.finals import decide
from rush.tune.forecast import Planner
from rush.tune.lengths import lengthen
from rush.tune.moves import MoveKind, Rules, is_subset, parity_techniques, runnable
from rush.tune.outlook import Outlook, jumps
from rush.tune.record import Request, classes, recipe_file, record_of
from rush.tune.search import Doing, Search
from rush.tune.trials import RANK, Trials, TuneSettings, kept_of, trial_plan, trial_tokens

Watch = Callable[[TuneRecord, Doing | None], None]


def tune(
    request: Request,
    folder: Path,
    *,
    extra_techniques: Sequence[Path] = (),
    watch: Watch = lambda record, doing: None,
    note: Callable[[str], None] = lambda text: None,
) -> TuneRecord:
    """Search into `folder`, or resume the search there. Returns its record."""
    asked = _whole(request.recipe)
    for name, other in request.beside.items():
        fit_beside(name, other, asked)  # a mistake is reported before anything starts
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        if not asked.auto:
            # Another search is refused before anything starts.
            _earlier(replace(request, recipe=asked), folder)
        plan = trial_plan(asked, TuneSettings(asked.step_tokens), RANK)
        with open_bench(plan, folder, extra_techniques, every_dtype=True) as bench:
            assert bench.ceilings is not None
            planner = Planner(target_here(bench.machine, bench.ceilings))
            settled_request = replace(request, recipe=with_chosen_micro(asked, planner.target))
            open_corpus(settled_request.recipe, None, note)
            record = _search(settled_request, folder, bench, planner, watch)
        bench.clean()
    return record


def _search(request: Request, folder: Path, bench: Bench, planner: Planner, watch: Watch) -> TuneRecord:
    machine, before = bench.machine, _earlier(request, folder)
    fingerprint = machine.fingerprint()
    rules = Rules(machine, request.allowed, kept_of(request.recipe), request.recipe.common_tokens)
    start, gone = runnable(request.recipe, rules)
    if before is not None and before["fingerprint"] == fingerprint:
        settings, started, known = TuneSettings(**before["settings"]), before["started"], before["known"]
    else:
        before, started = None, timestamp()
        # Remembered gains are of speed, not of memory.
        speeds = request.goal.objective in ("tokens/s", "cost")
        known = remembered(fingerprint, request.recipe.model.name, folder.parent) if speeds else {}
        planned = jumps(Outlook(start, planner, request.goal, known, rules.kept), start, rules)
        settings = TuneSettings(trial_tokens(start, planned, planner))
    outlook, budget = Outlook(start, planner, request.goal, known, rules.kept), Budget(request.budget_s)
    curves = Parity.STATISTICAL in request.allowed or bool(parity_techniques(start, rules.kept))
    lab = Trials(bench, request.recipe, settings, planner, budget, curves=curves)

    def recorded(search: Search) -> TuneRecord:
        record = record_of(request, search, lab.settings, known, started, gone)
        record["ceilings"] = bench.ceilings
        return record

    kept = {Doing(event["candidate"], event["kind"]) for event in before["events"]} if before else set()

    def report(search: Search, doing: Doing | None) -> None:
        record = recorded(search)
        write_tune(folder / "tune.json", record)
        watch(record, replace(doing, known=True) if doing in kept else doing)

    search = Search(
        start, replace(rules, tokens=math.gcd(rules.tokens, settings.tokens)), lab, outlook, budget, report
    )
    if request.goal.objective == "longest-sequence":
        lengthen(search)
    else:
        search.climb()
        decide(search)
    others = {name: fit_beside(name, other, request.recipe) for name, other in request.beside.items()}
    rows = beside(search, lab, others)
    record = recorded(search)
    if record["winner"] is not None:
        record["winner"]["beside"] = rows
    record["finished"] = timestamp()
    write_tune(folder / "tune.json", record)
    write_atomic(folder / "recipe.toml", recipe_file(request, search, record))
    if request.goal.objective in ("tokens/s", "cost") and not (before and before["finished"]):
        remember(fingerprint, _gains(request, search.candidates))
    watch(record, None)
    return record


def _whole(recipe: Recipe) -> Recipe:
    """With explicit tokens per step, which stay for every micro batch. Refuses several ranks."""
    if recipe.world > 1:
        raise RecipeError(
            f"rush tune tries recipes on one device, and the layout asks for {recipe.world} ranks; tune it with layout sizes of "
            "1, and let `rush plan --search` choose the layout."
        )
    return changed(recipe, {"batch.total_tokens": recipe.step_tokens})


def _earlier(request: Request, folder: Path) -> TuneRecord | None:
    """The earlier record of this search in the folder; another search is refused."""
    if not (folder / "tune.json").exists():
        return None
    there = read_tune(folder)
    asked = (request.recipe.digest, request.goal.objective, classes(request.allowed))
    with TUNE.using(folder):
        if (there["base"]["digest"], there["objective"], there["allowed"]) != asked:
            raise RecipeError(
                f"{folder} holds another search ({there['name']}, {there['objective']}, allowing {', '.join(there['allowed'])}); "
                "choose another --out."
            )
    return there


def _gains(request: Request, candidates: Sequence[Candidate]) -> list[RememberedGain]:
    """Gains of single moves, for later searches. Only of techniques added to all that the lead had: a gain over another setting or
    a conflicting technique means nothing without it."""
    tried = {c.key: c.recipe for c in candidates}

    def added(candidate: Candidate) -> bool:
        over = tried.get(candidate.over)
        return over is not None and is_subset(over, candidate.known_recipe)

    return [
        RememberedGain(c.key, request.recipe.model.name, c.ratio)
        for c in candidates
        if c.ratio is not None and c.kind not in (MoveKind.JUMP, MoveKind.TOGETHER) and added(c)
    ]
