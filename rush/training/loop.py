"""A run from start to end: open the folder, build, train, and resume where it stopped.

The state that a resumed run must repeat bit for bit is small on purpose. The learning rate is a function of the step, the
sample order a function of seed and position; weights, optimizer state, random state and position are in the checkpoint. Rows
of `metrics.jsonl` after the newest checkpoint are truncated and written again.

All ranks run this and take the same decisions from the same numbers; only rank 0 writes and prints.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rush.checkpoint import restore
from rush.checkpoint.saver import Saver, room_for_copies
from rush.checkpoint.verification import newest_good
from rush.errors import DataError, RecipeError
from rush.files import write_atomic, write_json_atomic
from rush.hardware import Machine, probe
from rush.hub.folders import starting_weights
from rush.parallel import Ranks, join, started_rank
from rush.plan.micro_batch import candidates
from rush.recipe import Recipe
from rush.recipe_io import changed, differences, load_recipe, write_toml
from rush.records.checkpoint_store import Checkpoint, CheckpointStore
from rush.records.metrics import MetricsRow, RowWriter, SampleRow, SaveRow, truncate_after
from rush.records.run_folder import RunFolder, existing_run, new_run, resumed_run
from rush.techniques import check
from rush.techniques.api.own_files import check_remembered, digests, remember
from rush.training.auto_micro import MicroBatchSearch
from rush.training.build import build
from rush.training.corpus import Corpus, open_corpus
from rush.training.epochs import repetition_advice, resolved, with_steps
from rush.training.failures import RunStatus, reporting_failures
from rush.training.hub_commits import as_recorded, with_commits
from rush.training.lost_updates import lost_updates_warning
from rush.training.objectives import objective_of
from rush.training.session import Session, Summary
from rush.training.trackers import Trackers, check_trackers, open_trackers
from rush.training.view import View
from rush.version import __version__

__all__ = ["Summary", "configuration", "train_recipe"]


def train_recipe(
    recipe: Recipe | None,
    out: Path | str,
    *,
    resume: bool = False,
    view: View | None = None,
    until: int | None = None,
) -> Summary:
    """Train the recipe in the folder `out`; `resume` continues the run that is there. After step `until` the run stops with a
    checkpoint, as if it had been interrupted there: the schedule stays that of the whole run."""
    status = RunStatus(RunFolder(Path(out)))
    with reporting_failures(status):
        folder = RunFolder(Path(out))
        return _train_recipe(recipe, folder, status, resume=resume, view=view or View(), until=until)


def _train_recipe(
    recipe: Recipe | None,
    folder: RunFolder,
    status: RunStatus,
    *,
    resume: bool,
    view: View,
    until: int | None,
) -> Summary:
    if resume and not folder.holds_run() and recipe is not None:
        view.note(f"{folder.path} holds no run yet: starting from the beginning.")
        resume = False
    if resume:
        existing_run(folder.path)
        recipe = resumed_recipe(load_recipe(str(folder.recipe)), recipe)
    assert recipe is not None, "a new run needs a recipe"
    status.recipe = recipe
    check_remembered(folder, recipe, view.note if started_rank() == 0 else View().note)
    status.machine = machine = probe(recipe.run.device)
    candidates(recipe, lambda one: check(one, machine)) if recipe.auto else check(recipe, machine)
    objective_of(recipe)  # refuses settings of another loss before any data is prepared
    with (
        join(
            recipe.layout.model_dump(), machine.device, configuration(recipe), recipe.run.timeout_s
        ) as ranks,
        ExitStack() as stack,
    ):
        status.ranks = ranks
        status.folder = folder = RunFolder(Path(ranks.on_rank0(lambda: str(folder.path))))
        ranks.on_rank0(partial(check_trackers, recipe))
        opened = resumed_run(folder.path) if resume else new_run(folder.path)
        ranks.on_rank0(lambda: _open(stack, opened))
        status.recipe = recipe = with_commits(recipe, ranks, view.note if ranks.main else View().note)
        return _train(recipe, machine, folder, status, view if ranks.main else View(), ranks, until)


def configuration(recipe: Recipe) -> str:
    """The configuration that must be equal on all ranks."""
    return (
        f"the recipe {recipe.digest[:12]}, rush {__version__} and torch {torch.__version__}{digests(recipe)}"
    )


def _open(stack: ExitStack, opened: AbstractContextManager[RunFolder]) -> None:
    stack.enter_context(opened)


FREE_ON_RESUME = ("about", "layout.ddp", "layout.fsdp", "layout.pp", "layout.cp", "layout.tp", "run.save_every",
                  "run.save_async", "run.keep", "run.timeout_s", "run.drift_every", "run.validate_every",
                  "run.validate_every_tokens", "run.sample_every", "run.sample_prompt", "run.sample_tokens", "run.trackers")  # fmt: skip
"""Recipe keys that a resumed run may change: they do not change what it learns."""
MICRO_BATCH = ("batch.micro", "batch.total_tokens")
"""A resumed run may also change these if the tokens per step stay the same and the loader counts samples: packing
depends on the micro batch."""


def resumed_recipe(stored: Recipe, given: Recipe | None) -> Recipe:
    """The recipe to resume with: a given one may differ from the stored one only in `FREE_ON_RESUME`."""
    if given is not None and given.auto:
        given = changed(given, {"batch.micro": stored.micro})  # it was chosen when the run began
    if given is not None and given.schedule.steps is None:
        given = resolved(given, stored.steps)  # computed when the run began
    if given is not None:
        given = as_recorded(given, stored)
    wanted = given or stored
    changes, free = differences(stored, wanted), set(FREE_ON_RESUME)
    counts_samples = stored.objective.kind == "lm"
    if counts_samples and wanted.step_sizes == stored.step_sizes:
        free |= set(MICRO_BATCH)
    fixed = [f"{key}: {old!r} → {new!r}" for key, (old, new) in changes.items() if key not in free]
    if fixed:
        smaller = counts_samples and "batch.micro" in changes and "batch.total_tokens" not in changes
        keep = f"With batch.micro set batch.total_tokens={stored.step_tokens}, too. " if smaller else ""
        raise RecipeError(
            f"the run was started with another recipe ({'; '.join(fixed)}), which a resumed run may not change. {keep}Leave "
            "these out, or start a new run with another --out."
        )
    if given is not None and given.step_tokens != stored.step_tokens:
        raise RecipeError(
            f"a step of the run was {stored.step_tokens:,} tokens, with this layout it would be {given.step_tokens:,}; set "
            f"batch.total_tokens={stored.step_tokens} when the run is started, so that it can be resumed on other numbers of ranks."
        )
    return given or stored


def _train(
    recipe: Recipe,
    machine: Machine,
    folder: RunFolder,
    status: RunStatus,
    view: View,
    ranks: Ranks,
    until: int | None,
) -> Summary:
    store = folder.checkpoints
    resumed = newest_good(
        store, ranks, lambda path, problem: view.note(f"DAMAGED checkpoint, not used: {problem}")
    )
    _check_until(until, resumed)
    if resumed is None and store.steps():
        raise DataError(
            f"every checkpoint in {store.folder} is damaged; restore one from a backup, or start a new run with "
            "another --out."
        )
    # A checkpoint of adapters does not hold their base.
    needs_base = resumed is None or restore.base_record(resumed) is not None
    weights = starting_weights(recipe) if needs_base else None
    tokenizer = folder.tokenizer if ranks.main else None
    corpus = ranks.rank0_first(lambda: open_corpus(recipe, tokenizer, view.note))
    if recipe.auto:
        recipe = MicroBatchSearch(machine, corpus, weights, ranks, folder.path, view.note).choose(recipe)
    status.recipe = recipe
    _check_held_out(corpus, recipe)
    run = build(recipe, machine, weights, ranks)
    if (warning := lost_updates_warning(run)) is not None:
        view.note(warning)
    corpus = corpus.ready_for(run, weights, folder.path, resumed=resumed is not None)
    loader = corpus.loader(recipe, run.loader_options)
    status.recipe = run.recipe = recipe = with_steps(recipe, loader)
    if (advice := repetition_advice(recipe, loader)) is not None:
        view.note(advice)
    done, tokens = 0, 0
    if resumed is not None:
        extra = restore.load(resumed, run.model, run.optimizer, ranks=ranks)
        _check_position(resumed, extra)
        _check_same_corpus(extra["corpus"], corpus)
        done, tokens = extra["step"], extra["tokens"]
        loader.load_state(extra["loader"])
        view.note(f"Resuming from {resumed.path.name}.")
    else:
        _seed_generators(recipe.run.seed)
    saver = Saver(
        store,
        ranks,
        background=recipe.run.save_async,
        note=view.note,
        room=partial(room_for_copies, run.device, run.limit),
    )
    trackers = Trackers((), view.note)
    if ranks.main:
        trackers = open_trackers(recipe, folder, done + 1, resumed=resumed is not None, note=view.note)
    session = Session(recipe, run, folder, corpus, loader, trackers, view, saver, status)
    session.until = math.inf if until is None else until
    try:
        if not ranks.main:
            return session.go(done, tokens)
        # Only now does the folder hold a run: a start that failed earlier can simply be repeated.
        write_atomic(folder.recipe, write_toml(recipe))
        write_json_atomic(folder.machine, machine.to_dict())
        remember(folder, recipe)
        for path in (folder.metrics, folder.samples, folder.saves):
            truncate_after(path, done)
        with (
            trackers,
            RowWriter(folder.metrics, MetricsRow) as metrics,
            RowWriter(folder.samples, SampleRow) as samples,
            RowWriter(folder.saves, SaveRow) as saves,
        ):
            session.rows = metrics, samples
            saver.after = lambda saved: _record_save(saved, saves, store, recipe.run.keep)
            summary = session.go(done, tokens)
            trackers.ended = "interrupted" if summary.interrupted else "finished"
            return summary
    finally:
        loader.close()


def _check_until(until: int | None, resumed: Checkpoint | None) -> None:
    """Refuse a last step that has passed already."""
    done = 0 if resumed is None else resumed.step
    if until is not None and until <= done:
        raise RecipeError(
            f"--until is {until}, but the run is at step {done}; give a later step, or leave --until out."
        )


def _seed_generators(seed: int) -> None:
    """Seed every random generator that a library might use; a resumed run restores them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _record_save(saved: SaveRow, saves: RowWriter[SaveRow], store: CheckpointStore, keep: int) -> None:
    store.retain(keep, committed=saved["step"])
    saves.write(saved)


def _check_held_out(corpus: Corpus, recipe: Recipe) -> None:
    """Fail before the first step, not after hours, if there is nothing to validate on."""
    next(iter(corpus.validation(recipe, {})), None)


def _check_position(checkpoint: Checkpoint, extra: Mapping[str, Any]) -> None:
    """Refuse a state with an invalid position: a checkpoint may be untrusted and resealed."""
    numbers = [extra.get("step"), extra.get("tokens")]
    if (
        not all(type(number) is int and 0 <= number < 2**62 for number in numbers)
        or extra["step"] != checkpoint.step
        or not isinstance(extra.get("corpus"), str)
        or not isinstance(extra.get("loader"), dict)
    ):
        raise DataError(
            f"{checkpoint.path / 'state.json'} does not say where the run stood (step, tokens, corpus and loader); resume from "
            "another checkpoint."
        )


def _check_same_corpus(digest: str, corpus: Corpus) -> None:
    if digest != corpus.digest:
        raise DataError(
            f"the prepared corpus is not the one this run was trained on (its digest was {digest[:12]}, now "
            f"{corpus.digest[:12]}): files, tokenizer or the Python installation changed. Restore them, or start a "
            "new run with another --out."
        )
