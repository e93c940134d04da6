"""From a model and data to a recipe: read, decide, fit, explain."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rush.errors import DataError, RecipeError
from rush.plan.planning import Plan
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.records.start import FORMAT, DecisionRow, StartRecord
from rush.start import decisions
from rush.start.data_files import DataFiles, find_files
from rush.start.decisions import Choice
from rush.start.drafting import REFERENCE_SHARE, Draft, Findings, draft, epoch_tokens, given_values
from rush.start.encoding import choose_template, choose_tokenizer
from rush.start.fitting import Fit, find_place, fit
from rush.start.inspect import RowFacts, read_data
from rush.start.methods import method_of, methods_for
from rush.start.model import StartModel, find_model
from rush.start.recipe_text import recipe_text

LONG_BYTES = 50_000_000


@dataclass(frozen=True)
class Request:
    model: str
    data: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    device: str | None = None
    memory_gb: float | None = None
    hours: float | None = None
    price: float | None = None
    """Per hour of a device."""


@dataclass(frozen=True)
class Started:
    """A recipe with its reasons."""

    record: StartRecord
    recipe: Recipe
    plan: Plan
    text: str
    """The recipe as a commented file."""


def start(request: Request, note: Callable[[str], None] = lambda text: None) -> Started:
    """Decide; `note` gets a line if reading takes long."""
    if request.hours is not None and not 0 < request.hours < math.inf:
        raise RecipeError(f"--hours is {request.hours:g}; allowed: a number greater than 0.")
    model, files = find_model(request.model, note), find_files(request.data)
    size = sum(os.path.getsize(path) for path in files.paths)
    if size > LONG_BYTES:
        note(f"Reading {size / 1e6:,.0f} MB of data …")
    found = _findings(request, model, files)
    sequence = decisions.choose_sequence(
        found.lengths, found.kind, model.shape.context, found.place.target.kind == "cuda"
    )
    methods = (
        [method_of(found.given["techniques"])]
        if "techniques" in found.given
        else methods_for(model.pretrained)
    )
    fitted = fit(
        lambda method, length: draft(found, method, length).tree,
        methods,
        int(sequence.value),
        found.place,
        fixed_sequence="batch.sequence" in found.given,
    )
    drafted = draft(found, fitted.method, fitted.recipe.batch.sequence)
    reasons = drafted.reasons | _what_did_not_fit(fitted, int(sequence.value), found)
    return _finished(request, found, fitted, Draft(drafted.tree, reasons))


def _findings(request: Request, model: StartModel, files: DataFiles) -> Findings:
    given = given_values(request.overrides, model)
    rows = read_data(files.paths)
    objective = _objective(rows, given)
    tokenizer, vocab_size = choose_tokenizer(model, rows, given)
    template, lengths = choose_template(rows, tokenizer, str(objective.value), given)
    if given.get("data.bad_rows") == "drop" and not rows.broken.unreadable:
        bad_rows = Choice("drop", "given")
    else:
        bad_rows = decisions.choose_bad_rows(rows, lengths.refused, lengths.measured, str(objective.value))
    if lengths.documents < 2 * (1 + (objective.value == "dpo")):
        raise DataError(
            f"{files.paths[0]} is one document, so nothing would be left to hold out; give at least two (a text file is one "
            "document, unless it is larger than 256 KiB)."
        )
    place = find_place(request.device, request.memory_gb)
    return Findings(
        model,
        files,
        rows,
        lengths,
        place,
        objective,
        template,
        bad_rows,
        vocab_size,
        request.overrides,
        given,
    )


def _objective(rows: RowFacts, given: dict[str, Any]) -> Choice:
    """What the rows are for, or what was given where the rows allow it."""
    wanted = given.get("objective.kind")
    if wanted is None:
        return decisions.choose_objective(rows)
    formats = {"lm": ("text",), "dpo": ("preference",), "sft": ("chat", "prompt", "instruction", "text")}
    others = [name for name in rows.formats if name not in formats.get(str(wanted), (name,))]
    if others:
        raise DataError(
            f"objective.kind={wanted} was given, but the data hold {rows.formats[others[0]]:,} rows of the format {others[0]} (the "
            f"first: {rows.first_of[others[0]]}); it reads {' or '.join(formats[wanted])}."
        )
    return Choice(wanted, "given")


def _what_did_not_fit(fitted: Fit, sequence: int, found: Findings) -> dict[str, str]:
    """Add the planner's reasons."""
    reasons: dict[str, str] = {}
    if fitted.recipe.batch.sequence < sequence:
        reasons["batch.sequence"] = f"{sequence:,} tokens a row do not fit the memory"
    left = f"; left out: {', '.join(fitted.left_out)}" if fitted.left_out else ""
    over = f"; does not fit: {'; '.join(fitted.rejected[-3:])}" if fitted.rejected else ""
    what = f"{fitted.method.say()}{over}{left}"
    reasons["techniques"] = (
        what if found.place.target.kind == "cuda" else f"{what}; `rush tune` finds what is faster here"
    )
    return reasons


def _finished(request: Request, found: Findings, fitted: Fit, drafted: Draft) -> Started:
    tree, reasons, plan = drafted.tree, dict(drafted.reasons), fitted.plan
    tree["techniques"] = fitted.recipe.model_dump()["techniques"]
    tree["batch"]["micro"] = fitted.recipe.micro
    tokens = epoch_tokens(found, tree)
    epoch_s = tokens / plan.tokens_per_s
    step_tokens = plan.spec.step_tokens
    before = REFERENCE_SHARE * epoch_s if found.kind == "dpo" else 0.0
    if "epochs" in tree["schedule"]:
        epochs = float(tree["schedule"]["epochs"])
        fewer = decisions.within_hours(epochs, epoch_s, before, request.hours, plan.expected_error["time"])
        if fewer is not None and "schedule.epochs" not in found.given:
            epochs = tree["schedule"]["epochs"] = float(fewer.value)
            reasons["schedule.epochs"] = fewer.why
        steps = max(1, math.ceil(epochs * tokens / step_tokens))
    else:
        steps = int(tree["schedule"]["steps"])
        epochs = steps * step_tokens / tokens
    for key, choice in decisions.choose_intervals(steps, plan.time.step).items():
        if key not in found.given:
            tree["run"][key.removeprefix("run.")] = choice.value
            reasons[key] = choice.why
    recipe = parse(tree)
    hours = (steps * plan.time.step + before) / 3600
    record = _record(request, found, fitted, drafted.tree, reasons, steps, epochs, hours)
    return Started(
        record,
        recipe,
        plan,
        recipe_text(recipe, tree, _said(reasons, found.given), _head(request, record)),
    )


def _said(reasons: dict[str, str], given: dict[str, Any]) -> dict[str, str]:
    return {key: "given" if key in given else why for key, why in reasons.items()}


def _record(
    request: Request, found: Findings, fitted: Fit, tree: dict[str, Any], reasons: dict[str, str], steps: int, epochs: float,
    hours: float,
) -> StartRecord:  # fmt: skip
    rows, lengths, plan = found.rows, found.lengths, fitted.plan
    return {
        "format": FORMAT,
        "model": {
            "given": request.model,
            "name": found.model.name,
            "parameters": found.model.parameters,
            "init_from": found.model.init_from,
            "weights": found.model.weights and found.model.pretrained,
        },
        "data": {
            "files": list(found.files.paths),
            "rows": rows.rows,
            "formats": rows.formats,
            "broken": rows.broken.count,
            "broken_reasons": rows.broken.reasons,
            "first_broken": rows.broken.first,
            "duplicates": rows.duplicates,
            "roles": rows.roles,
            "documents": lengths.documents,
            "tokens": lengths.tokens,
            "median_tokens": lengths.median,
            "p95_tokens": lengths.p95,
            "longest_tokens": lengths.longest,
            "measured": lengths.measured,
            "histogram": [list(bin) for bin in lengths.histogram],
            "target_share": lengths.target_share,
        },
        "objective": str(tree["objective"]["kind"]),
        "method": fitted.method.name,
        "decisions": list(_decisions(tree, reasons, found.given)),
        "plan": {
            "device": plan.target.name,
            "why": found.place.why,
            "machine": found.place.machine,
            "memory_bytes": int(plan.life.total),
            "limit_bytes": int(plan.target.memory_bytes),
            "fits": plan.fits,
            "tokens_per_s": plan.tokens_per_s,
            "expected_error": plan.expected_error,
            "step_s": plan.time.step,
            "steps": steps,
            "epochs": epochs,
            "hours": hours,
            "cost": None if request.price is None else hours * request.price,
        },
        "notes": _notes(found),
        "next": [],
        "recipe": tree,
    }


def _decisions(tree: dict[str, Any], reasons: dict[str, str], given: dict[str, Any]) -> list[DecisionRow]:
    rows: list[DecisionRow] = []
    for section, values in tree.items():
        named = (
            {f"{section}.{key}": value for key, value in values.items()}
            if isinstance(values, dict)
            else {section: values}
        )
        for key, value in named.items():
            is_given = any(key == one or one.startswith(f"{key}.") for one in given)
            if is_given or reasons.get(key):
                rows.append(
                    {
                        "key": key,
                        "value": value,
                        "why": "given" if is_given else reasons[key],
                        "given": is_given,
                    }
                )
    return rows


def _notes(found: Findings) -> list[str]:
    """Notes for the user besides the decisions."""
    model, rows, notes = found.model, found.rows, []
    if model.init_from is None:
        notes.append(
            f"{model.name} is a size without weights: the run starts from random ones. Give a Hugging Face folder or OWNER/NAME to start "
            "from published weights."
        )
    elif not model.weights:
        notes.append(
            f"{model.init_from} lacks weights, or some of their files: `rush overfit` and `rush train` need them."
        )
    if found.place.target.how == "assumed":
        notes.append("The rates of this CPU are assumed, so the time is a guess; `rush probe` measures them.")
    if rows.duplicates:
        notes.append(
            f"{rows.duplicates:,} of {rows.rows:,} rows are duplicates; `rush data clean` removes them."
        )
    if rows.tools:
        notes.append(f"{rows.tools:,} rows have tools, which the template writes.")
    if found.files.ignored:
        notes.append(
            f"{len(found.files.ignored):,} files of the folder are not read (the first: {found.files.ignored[0]})."
        )
    if found.lengths.refused:
        notes.append(
            f"{len(found.lengths.refused):,} measured rows cannot be encoded; the first: {found.lengths.refused[0]}."
        )
    return notes


def _head(request: Request, record: StartRecord) -> list[str]:
    plan = record["plan"]
    return [
        f"Written by `rush start {request.model}` for {plan['device']}: {plan['memory_bytes'] / 1e9:.1f} of "
        f"{plan['limit_bytes'] / 1e9:.1f} GB (±{plan['expected_error']['memory']:.0%}), some {plan['hours']:.2g} h "
        f"(±{plan['expected_error']['time']:.0%}) by plan.",
        *record["notes"],
    ]
