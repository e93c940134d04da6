"""The Python interface: what the commands do, as functions that return typed results (docs/python.md).

Results render in a notebook. The recipe may be a name, a file or a `Recipe`; overrides are written as on the
command line: `train("tiny", "schedule.steps=100")`. Errors are those of `rush.errors`, with the same
messages.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rush.errors import DataError, RecipeError, RushError
from rush.files import write_atomic
from rush.ready import short_name
from rush.recipe import Recipe
from rush.recipe_io import apply_override, load_recipe, parse
from rush.records.run_folder import RunFolder
from rush.results import (
    GeneratedText,
    LadderResult,
    PlannedRecipe,
    RaceResult,
    StartedRecipe,
    TrainingRun,
    TunedRecipe,
)

if TYPE_CHECKING:
    from rush.lab.ladder.climb import Watch as LadderWatch
    from rush.lab.race.racing import Watch as RaceWatch
    from rush.models import Decoder
    from rush.plan.foreign import ForeignPlan
    from rush.records.plan_chart import PlanChartRecord
    from rush.training.view import View
    from rush.tune.tuning import Watch as TuneWatch

VIEWS = ("cumulative", "alone", "left_out", "all")
Note = Callable[[str], None]


def _quiet(text: str) -> None: ...


def start_recipe(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    *overrides: str,
    hours: float | None = None,
    memory: float | None = None,
    device: str | None = None,
    price: float | None = None,
    out: str | Path | None = None,
    force: bool = False,
    note: Note = _quiet,
) -> StartedRecipe:
    """A recipe for a model and data that fits a device: one from the catalog, one with `memory` GB, or this machine's.

    Written to `out` where that is given; an existing file is only overwritten with `force`.
    """
    from rush.files import write_atomic
    from rush.start import Request, start

    file = None if out is None else Path(out).expanduser()
    if file is not None and file.exists() and not force:
        raise RecipeError(f"{file} exists; give another file with --out, or overwrite it with --force.")
    given = [data] if isinstance(data, str | Path) else data
    files = tuple(str(Path(one).expanduser()) for one in given)
    made = start(Request(str(model), files, overrides, device, memory, hours, price), note)
    if file is not None:
        write_atomic(file, made.text.encode())
        made.record["next"] = [
            f"rush {word} {shlex.quote(str(file))}" for word in ("overfit", "tune", "train")
        ]
    return StartedRecipe(made.record, made.recipe, file)


def train(
    recipe: Recipe | str | Path | None = None,
    *overrides: str,
    out: str | Path | None = None,
    resume: bool = False,
    until: int | None = None,
    techniques: Sequence[str | Path] = (),
    view: View | None = None,
) -> TrainingRun:
    """Train a recipe in a new folder, or resume the run in `out`. Without a `view` it shows progress in the terminal. `until`: stop
    after this step, with a checkpoint to resume from.

    `techniques`, here and below: Python files that define your own techniques. Their code is executed.
    """
    from rush.training.loop import train_recipe
    from rush.training.view import Recording, terminal_view

    if recipe is None and not resume:
        raise RecipeError(
            "train needs a recipe: a name, a file or a Recipe; with resume=True it reads the run's own."
        )
    if resume and out is None:
        raise RecipeError("resume needs out: the folder of the run to resume.")
    folder = Path(out) if out is not None else new_folder(_name(recipe))
    chosen = None if recipe is None else _recipe(recipe, overrides)
    shown = Recording(view or terminal_view(), RunFolder(folder).notes)
    before, done = _written(folder), False
    try:
        with _own(techniques):
            run = TrainingRun(train_recipe(chosen, folder, resume=resume, view=shown, until=until))
        done = True
    finally:  # also of a run that was interrupted or failed
        if _written(folder) != before:
            _draw_run(folder, shown.note if done else _quiet)
    return run


def _written(folder: Path) -> tuple[int, int] | None:
    """Whether a run has written rows; a refused start has not."""
    try:
        found = os.stat(RunFolder(folder).metrics)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _draw_run(folder: Path, note: Note) -> None:
    """Write the page of a run that recorded a step. A failure here does not affect the run's result."""
    from rush.parallel import started_rank

    try:
        if started_rank() == 0 and RunFolder(folder).metrics.stat().st_size:
            write_report(folder)
    except Exception as error:
        note(f"The run's page was not written: {error}")


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Draw the page of a run, ladder, search, study, bench or explanation from its record; returns its path.

    Without `out` it is `report.html` in the folder.
    """
    from rush.report.redraw import known_kind, redraw

    place = Path(folder)
    if place.suffix == ".json" and place.is_file():
        place = place.parent
    html = Path(out) if out is not None else place / "report.html"
    if known_kind(place) == "explain":
        from rush.explain.page import page
        from rush.explain.records import explain, read

        write_atomic(html, page(explain(read(place / "explain.json"))))
    else:
        redraw(place, html, lambda name: load_recipe(name, auto=True).model_dump(exclude_none=True))
    return html


def run_ladder(
    ladder: str | Path = "tiny",
    *overrides: str,
    out: str | Path | None = None,
    view: str = "cumulative",
    race: int | None = None,
    techniques: Sequence[str | Path] = (),
    watch: LadderWatch | None = None,
    note: Note = _quiet,
) -> LadderResult:
    """Measure a ladder (`here`: the one for this machine), or resume the one in `out`; writes its record, its report and the
    recipes it leads to. `race`: afterwards race every STATISTICAL rung over this many tokens, for its net in addition to its gain.
    """
    from rush.lab.ladder.climb import climb
    from rush.lab.ladder.here import HERE, ladder_here
    from rush.lab.ladder.ladder_file import load_ladder
    from rush.lab.ladder.proven import write_proven
    from rush.lab.race.pair import race_rungs
    from rush.records.ladder import write_ladder

    if view not in VIEWS:
        raise RecipeError(f"--view is {view!r}; allowed: {', '.join(VIEWS)}.")
    if str(ladder) == HERE:
        ladder, reason = ladder_here()
        note(reason)
    plan = load_ladder(str(ladder), overrides)
    folder = Path(out) if out is not None else Path("runs") / f"ladder-{plan.name}"
    pages = [folder, folder / "alone", folder / "left_out"] if view == "all" else [folder]
    try:
        with _own(techniques) as files:
            record = climb(
                plan,
                folder,
                view=view,
                extra_techniques=files,
                watch=watch or (lambda progress: None),
                note=note,
            )
            record = race_rungs(record, folder, race, techniques=[str(file) for file in files], note=note)
            write_ladder(folder, record)
    except KeyboardInterrupt:
        for page in pages:  # what is measured so far, and the page says so
            with suppress(RushError):
                if (page / "ladder.json").is_file():
                    write_report(page)
        raise
    for page in pages:
        write_report(page)
    if view in ("cumulative", "all"):
        write_proven(plan, folder)
    return LadderResult(record, folder)


def plan_recipe(
    recipe: Recipe | str | Path,
    *overrides: str,
    machine: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    network: str | None = None,
    network_cards: int | None = None,
    techniques: Sequence[str | Path] = (),
) -> PlannedRecipe:
    """Memory and time of a recipe on a machine of the catalog, or on this one; `devices` and `nodes` fill its layout."""
    from rush.plan import plan, spec_of
    from rush.plan.micro_batch import with_chosen_micro
    from rush.plan.planning import on_all_devices, unmet
    from rush.plan.target import find_target

    chosen = _recipe(recipe, overrides)
    limit_gb = chosen.run.memory_limit_gb
    target = find_target(machine, devices, nodes, link, network, network_cards, limit_gb=limit_gb)
    if devices is not None or nodes is not None:
        chosen = on_all_devices(chosen, target)
    with _own(techniques):
        chosen = with_chosen_micro(chosen, target)
        found = plan(spec_of(chosen, target.kind), target, problems=unmet(chosen, target))
    return PlannedRecipe(**{one.name: getattr(found, one.name) for one in fields(found)})


def plan_chart(
    chart: str,
    recipe: str | None = None,
    *overrides: str,
    machine: str | None = None,
    against: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    network: str | None = None,
    out: str | Path | None = None,
) -> PlanChartRecord:
    """Plans over devices, links, GPU models, nodes, layouts or batches, with the expected error and published measurements.

    Returns the record; with `out` it is written into that folder, with a page and a picture.
    """
    from rush.plan.charts import ChartOptions
    from rush.plan.charts import chart as make_chart
    from rush.report.plan_chart import write_chart

    options = ChartOptions(recipe, overrides, machine, against, devices, nodes, link, network)
    record = make_chart(chart, options)
    if out is not None:
        write_chart(record, Path(out))
    return record


def plan_config(
    config: str | Path,
    recipe: Recipe | str | Path,
    *overrides: str,
    machine: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    network: str | None = None,
    network_cards: int | None = None,
) -> ForeignPlan:
    """The plan of a recipe with the model of a Hugging Face config.json (a file, a folder or an id on the hub) instead of its own.

    A model that rush cannot train is planned with the nearest known terms; the plan names each approximation and widens the
    expected error.
    """
    from rush.hub.config import shape_from_config
    from rush.hub.json_files import read_json
    from rush.hub.remote import local_config
    from rush.plan import spec_of
    from rush.plan.foreign import Foreign, nearest_shape, plan_foreign
    from rush.plan.planning import on_all_devices
    from rush.plan.target import find_target

    found = read_json(local_config(config), "give a folder or a file with a model's config.json")
    try:
        model = Foreign(shape_from_config(found))
    except DataError as refused:
        model = nearest_shape(found, str(refused))
    chosen = _recipe(recipe, overrides)
    if chosen.batch.sequence > model.shape.context:
        raise RecipeError(
            f"batch.sequence is {chosen.batch.sequence}, but the model of {config} reads at most {model.shape.context} tokens; lower it."
        )
    target = find_target(
        machine, devices, nodes, link, network, network_cards, limit_gb=chosen.run.memory_limit_gb
    )
    if devices is not None or nodes is not None:
        chosen = on_all_devices(chosen, target)
    return plan_foreign(model, spec_of(chosen, target.kind), target)


def tune_recipe(
    recipe: Recipe | str | Path,
    *overrides: str,
    budget: float | str = "5m",
    objective: str = "tokens/s",
    allow: Sequence[str] | None = None,
    price: float | None = None,
    keep_speed: float = 0.8,
    beside: Sequence[str] = (),
    to_loss: int | None = None,
    techniques: Sequence[str | Path] = (),
    out: str | Path | None = None,
    watch: TuneWatch | None = None,
    note: Note = _quiet,
) -> TunedRecipe:
    """Search for the fastest recipe on this machine within a budget of time, or resume the search in `out`. `to_loss`: afterwards
    race the winner with the unchanged recipe over so many tokens.

    `allow` names the parity classes of techniques to try. Writes the record, the winner's recipe and a report.
    """
    from rush.report.tune import write_tune_report
    from rush.tune.budget import seconds
    from rush.tune.goal import OBJECTIVES, Goal, parity_classes
    from rush.tune.net import check_race, race_winner
    from rush.tune.record import Request
    from rush.tune.tuning import tune

    if objective not in OBJECTIVES:
        raise RecipeError(f"--objective is {objective!r}; allowed: {', '.join(OBJECTIVES)}.")
    if objective == "cost" and price is None:
        raise RecipeError("--objective cost needs --price: the price of this machine per hour.")
    budget_s, classes = seconds(budget), parity_classes(allow)
    chosen, name = _recipe(recipe, overrides), _name(recipe)
    others = {}
    for one in beside:
        made, *more = one.split() or [""]
        others[" ".join([_name(made), *more])] = load_recipe(made, more)
    folder = Path(out) if out is not None else Path("runs") / f"tune-{name}"
    request = Request(name, chosen, Goal(objective, keep_speed), classes, budget_s, price, others)
    with _own(techniques) as files:
        if to_loss is not None:
            check_race(request, to_loss)
        record = tune(
            request, folder, extra_techniques=files, watch=watch or (lambda record, doing: None), note=note
        )
        if to_loss is not None:
            record = race_winner(request, record, folder, to_loss, techniques=files, note=note)
    write_tune_report(folder / "tune.json", folder / "report.html")
    return TunedRecipe(record, folder)


def race(
    *recipes: Recipe | str,
    tokens: int | None = None,
    loss: float | None = None,
    budget: float | str | None = None,
    seeds: int = 1,
    legs: int = 4,
    points: int = 20,
    nproc: int | None = None,
    techniques: Sequence[str | Path] = (),
    out: str | Path | None = None,
    watch: RaceWatch | None = None,
    note: Note = _quiet,
) -> RaceResult:
    """Train recipes side by side from the same seeds on the same data, or resume the race in `out`: which one reaches the same
    loss sooner? Overrides may follow a recipe: `race("tiny", "tiny techniques+=compile")`. Every recipe starts on the ranks of its
    layout; with `nproc` all layouts must take that many.
    """
    from rush.lab.race.contenders import read_contenders
    from rush.lab.race.race_plan import plan_race, race_name
    from rush.lab.race.racing import race as run_race
    from rush.tune.budget import seconds

    budget_s = None if budget is None else seconds(budget)
    contenders = read_contenders(recipes)
    folder = Path(out) if out is not None else Path("runs") / f"race-{race_name(contenders)}"
    with _own(techniques) as files:
        plan = plan_race(
            contenders,
            tokens=tokens,
            seeds=seeds,
            loss=loss,
            budget_s=budget_s,
            points=points,
            legs=legs,
            nproc=nproc,
            techniques=[str(file) for file in files],
        )
        try:
            record = run_race(plan, folder, watch=watch or (lambda progress: None), note=note)
        except (KeyboardInterrupt, RushError):
            if (folder / "race.json").is_file():  # what is measured so far, and the page says so
                with suppress(RushError):
                    write_report(folder)
            raise
    write_report(folder)
    return RaceResult(record, folder)


def generate(
    model: str | Path,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 1337,
    checkpoint: str = "last",
    device: str = "auto",
    adapter: str | Path | None = None,
    offload: str = "none",
    show: Callable[[str], None] | None = None,
    note: Note = _quiet,
) -> GeneratedText:
    """Continue a prompt with the model in a run folder or a Hugging Face folder. `show` gets the text as it comes."""
    from rush.hub.tokenizers import text_stop_ids
    from rush.sampling import generate as draw
    from rush.sampling import stream_text

    decoder, tokenizer = open_model(model, checkpoint, device, adapter, offload, note)
    stop_ids = set(text_stop_ids(Path(model), tokenizer, decoder.shape.vocab_size))
    for word in stop:
        ids = tokenizer.encode(word)
        if len(ids) != 1:
            raise RecipeError(
                f"--stop {word!r} is {len(ids)} tokens for this tokenizer; give text that is one token."
            )
        stop_ids.add(ids[0])
    start = tokenizer.encode(prompt) or [
        tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    ]
    drawn = draw(
        decoder,
        start,
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k or None,
        top_p=top_p,
        stop_ids=tuple(stop_ids),
        seed=seed,
    )
    if show is None:
        tokens = list(drawn)
        return GeneratedText(prompt, tokenizer.decode(tokens), tokens)
    show(prompt)
    tokens = []
    for piece in stream_text(tokenizer.decode, _kept(drawn, tokens)):
        show(piece)
    return GeneratedText(prompt, tokenizer.decode(tokens), tokens)


def open_model(
    folder: str | Path,
    checkpoint: str = "last",
    device: str = "auto",
    adapter: str | Path | None = None,
    offload: str = "none",
    note: Note = _quiet,
) -> tuple[Decoder, Any]:
    """A model for generation, and its tokenizer."""
    from rush.hardware import probe
    from rush.hub.folders import load_model
    from rush.hub.tokenizers import adapted_tokenizer

    place = probe(device).device
    model = load_model(
        folder, checkpoint=checkpoint, device=place, adapter=adapter, offload=offload, note=note
    )
    path = None if adapter is None else Path(adapter)
    return model, adapted_tokenizer(Path(folder), path, model.shape.vocab_size, note)


@contextmanager
def _own(techniques: Sequence[str | Path]) -> Iterator[list[Path]]:
    """Register the techniques of these files within the block."""
    from rush.techniques.api.own_files import added

    files = [Path(file).expanduser().resolve() for file in techniques]
    with added(files):
        yield files


def new_folder(name: str) -> Path:
    """The folder of a new run: `runs/NAME-DATE-TIME`."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _recipe(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(str(recipe), overrides, auto=True)
    if not overrides:
        return recipe
    tree = recipe.model_dump()
    for override in overrides:
        apply_override(tree, override)
    return parse(tree, auto=True)


def _name(recipe: Recipe | str | Path | None) -> str:
    if isinstance(recipe, Recipe):
        return recipe.model.name
    return short_name(str(recipe or "run"))


def _kept(ids: Any, into: list[int]) -> Any:
    for one in ids:
        into.append(one)
        yield one
