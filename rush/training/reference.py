"""The reference model of preference training: log-probabilities of every answer under the starting weights.

`cached`: one pass over the pairs before the first step, in the shapes, precision and with the techniques of training, so that
the run starts at a difference of exactly zero. The values are kept in the cache, keyed by base, data and settings, and in the
run folder, for a resumed run; an interrupted pass continues where it stopped. `live`: a frozen copy of the starting weights
runs beside every step, which takes its memory and a third more FLOPs, and pays off where a run sees few of the pairs. With
adapters the copy is the model itself with adapters disabled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rush.data.document_loader import BatchLayout
from rush.data.documents import Documents
from rush.data.packing import Pad, in_order
from rush.errors import DataError
from rush.files import cache_folder, writing
from rush.hub.folders import starting_weights
from rush.models.adapters import is_adapted
from rush.models.fingerprints import fingerprint
from rush.parallel.sharded import full_tensor, reshard
from rush.training.build import Run, build
from rush.training.objectives import Preference
from rush.training.objectives.preference import needs_reference

Values = npt.NDArray[np.float32]
Show = Callable[[int, int], None]
SAVE_EVERY = 50
"""Micro batches between two flushes of a pass."""


def wants_cached(run: Run) -> bool:
    settings = run.recipe.objective
    return (
        isinstance(run.objective, Preference) and needs_reference(settings) and settings.reference == "cached"
    )


def set_live_reference(run: Run, weights: dict[str, torch.Tensor] | None) -> None:
    """Set the frozen reference model of a run with `reference = "live"`, from `weights` or the recipe's starting weights."""
    objective, settings = run.objective, run.recipe.objective
    if not isinstance(objective, Preference) or not needs_reference(settings) or settings.reference != "live":
        return
    if not is_adapted(run.model):
        start = starting_weights(run.recipe) if weights is None else weights
        beside = build(run.recipe, run.machine, start, run.ranks)
        objective.reference_model = beside.model.requires_grad_(False)


def references(
    run: Run,
    splits: Mapping[str, tuple[Documents, int | None]],
    digest: str,
    folder: Path,
    *,
    resumed: bool,
    cache: Path | None = None,
) -> dict[str, Values]:
    """The reference's log-probability of every answer, by split; `splits` gives documents and the most pairs of them.

    The run must be untrained; for a resumed one the values in its folder are read.
    """
    found: dict[str, Values] = {}
    for split, (documents, limit) in splits.items():
        path = folder / "reference" / f"{split}.npy"
        count = min(len(documents), 2 * limit) if limit else len(documents)
        if resumed:
            found[split] = _read(path, count)
            continue
        key = reference_key(run, f"{digest}:{split}:{count}")
        cached = (cache or cache_folder()) / "references" / f"{key}.npy"
        with progress_bar() as show:
            found[split] = compute(run, documents, count, cached, show if run.ranks.main else _quiet)
        if run.ranks.main:
            _write(path, found[split])
    return found


def reference_key(run: Run, data: str) -> str:
    """The cache key: the base's values, the data, and whatever changes rounding."""
    weights = {
        name: fingerprint(full_tensor(tensor))
        for name, tensor in run.model.state_dict().items()
        if isinstance(tensor, torch.Tensor) and ".adapter." not in name
    }
    recipe = run.recipe
    key: dict[str, Any] = {
        "weights": sorted(weights.items()),
        "data": data,
        "techniques": recipe.technique_uses(),
        "batch": [recipe.micro, recipe.batch.sequence],
        "device": run.machine.summary(),
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


@torch.no_grad()
def compute(
    run: Run, documents: Documents, count: int, path: Path, show: Show = lambda done, all: None
) -> Values:
    """One pass over the first `count` documents, or the cached result at `path`.

    Each of n ranks computes every n-th batch, and the results are all-reduced.
    """
    ranks = run.ranks
    if ranks.on_rank0(path.is_file):
        return _read(path, count)
    if count == 0:
        return np.zeros(0, np.float32)
    batch, options = run.recipe.batch, run.loader_options
    layout = BatchLayout(
        documents, options.get("packing") or Pad(), run.recipe.micro, batch.sequence, paired=True
    )
    plan = layout.plan(in_order(count // 2), in_order)
    partial = path.with_name(f".{path.stem}.{ranks.data_rank}-of-{ranks.data_ranks}.partial.npy")
    own = [
        plan.batch(index) if index < len(plan) else []
        for index in range(
            ranks.data_rank, -(-len(plan) // ranks.data_ranks) * ranks.data_ranks, ranks.data_ranks
        )
    ]
    with writing(path, "the reference in "):
        values = _open_partial(partial, count)
        missing = [bool(np.isnan(values[_answers(rows)]).any()) for rows in own]
        # If one rank needs its batch, all compute theirs: forward passes may have collectives.
        needed = ranks.all_reduce(torch.tensor(missing, dtype=torch.float32, device=run.device)).tolist()
        for index, rows in enumerate(own):
            if needed[index]:
                values[_answers(rows)] = _of_batch(run, layout, rows)
                if index % SAVE_EVERY == 0:
                    values.flush()
            show(index + 1, len(own))
        values.flush()
        for model in run.roots:
            reshard(model)
        assert not any(np.isnan(values[_answers(rows)]).any() for rows in own), "an answer is missing"
        found = ranks.all_reduce(torch.from_numpy(np.nan_to_num(values)).to(run.device))
        result: Values = found.cpu().numpy()
        ranks.on_rank0(lambda: _write(path, result))
        partial.unlink()
    return result


def _quiet(done: int, total: int) -> None: ...


def _answers(rows: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Indices of the chosen and rejected answers of these pairs."""
    pairs = np.array([int(row[0, 0]) for row in rows], dtype=np.int64)
    return np.concatenate((2 * pairs, 2 * pairs + 1))


def _of_batch(run: Run, layout: BatchLayout, rows: list[npt.NDArray[np.int64]]) -> Values:
    batch = layout.batch(rows)
    objective = run.objective
    assert isinstance(objective, Preference)
    objective.units(batch)  # refuses data without pairs, before hours are spent on it
    with run.in_step(), run.autocast():
        logp_b = objective.answers(run.model, batch.to(run.device)).float().cpu()
    chosen, rejected = logp_b.chunk(2)
    result: Values = torch.cat((chosen[: len(rows)], rejected[: len(rows)])).numpy()
    if not np.isfinite(result).all():
        raise DataError(
            f"the reference gives {batch.samples[int((~np.isfinite(result)).argmax())]} a log-probability that is no finite "
            "number; the weights of model.init_from are damaged, or the precision is too low for them."
        )
    return result


def _open_partial(path: Path, count: int) -> np.memmap[Any, np.dtype[np.float32]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        try:
            found = np.lib.format.open_memmap(path, mode="r+")
            if found.shape == (count,) and found.dtype == np.float32:
                return found
        except ValueError:
            pass  # truncated: start anew
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count,))
    values[:] = np.nan
    return values


def _read(path: Path, count: int) -> Values:
    try:
        values: Values = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the reference's log-probabilities in {path} cannot be read ({error}); restore the file, or start a new run "
            "with another --out."
        ) from None
    if values.shape != (count,) or values.dtype != np.float32 or not np.isfinite(values).all():
        raise DataError(
            f"{path} holds {values.dtype} numbers of shape {list(values.shape)}, but the reference of this run is {count} "
            "finite float32 numbers; it belongs to other data. Restore the file, or start a new run with another --out."
        )
    return values


def _write(path: Path, values: Values) -> None:
    with writing(path, "the reference in "):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}")
        np.save(partial.with_suffix(".partial.npy"), values, allow_pickle=False)
        partial.with_suffix(".partial.npy").replace(path)


@contextmanager
def progress_bar() -> Iterator[Show]:
    """A bar on standard error that appears with the first report."""
    columns = (
        TextColumn("Reference log-probabilities"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reference", total=None, visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield show
