"""The training loop: launch a step, finish the one before, record, validate, sample, save, stop gracefully.

A step is launched while the device runs the one before, except where its weights are needed at once. All ranks take the same
decisions from the same numbers; only rank 0 writes and prints.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from rush.checkpoint.saver import Saver
from rush.errors import Diverged, Drifted, RushError
from rush.hardware import memory_in_use
from rush.parallel import Ranks
from rush.parallel.process_group import lost
from rush.parallel.replica_check import check_replicas
from rush.recipe import Recipe
from rush.records.metrics import MetricsRow, RowWriter, SampleRow, add_figures, read_rows
from rush.records.run_folder import RunFolder
from rush.training.build import Run
from rush.training.corpus import Corpus
from rush.training.failures import Phase, RunStatus
from rush.training.sample import Sampler, gathered_run
from rush.training.schedule import learning_rate
from rush.training.step import LaunchedStep, launch_step
from rush.training.trackers import Trackers
from rush.training.utilization import UtilizationMetric, utilization_metric
from rush.training.validation import Validation, rows_before
from rush.training.view import View

MOST_LAST = 50
"""The loss of a finished run is the mean over a tenth of its steps, and at most so many."""


@dataclass(frozen=True)
class Summary:
    """The outcome of a finished or interrupted run."""

    folder: str
    step: int
    steps: int
    loss: float
    """Mean over the labels of the last `loss_steps` steps."""
    loss_steps: int
    epochs: float
    """Passes over the training data."""
    val_loss: float | None
    best_val_loss: float | None
    tokens: int
    tokens_per_s: float
    interrupted: bool


@dataclass(frozen=True)
class _Running:
    """A launched step, and what its row needs."""

    launched: LaunchedStep
    lr: float
    began: float
    opened: torch.cuda.Event | None
    """On a device, the start of its time: the end of the step before, if it was launched behind that, or its own start."""
    data_s: float
    epoch: float

    def seconds(self) -> float:
        """The step's duration, once its result is there. A device measures it by events: the host may return late, from
        launching the next step."""
        if self.opened is not None and self.launched.arrived is not None:
            return float(self.opened.elapsed_time(self.launched.arrived)) / 1000
        return time.perf_counter() - self.began


@dataclass
class Session:
    """The training loop of a run, from start or resume to end or interruption."""

    recipe: Recipe
    run: Run
    folder: RunFolder
    corpus: Corpus
    loader: Any
    trackers: Trackers
    view: View
    saver: Saver
    status: RunStatus
    rows: tuple[RowWriter[MetricsRow], RowWriter[SampleRow]] | None = None
    """Metrics and samples, on rank 0."""
    prepared: bool = False
    """Whether memory for copies of the state is allocated."""
    last_step: float = math.inf
    """The step after which the ranks agreed to end."""
    until: float = math.inf
    """The step after which this process ends, with a checkpoint."""

    def __post_init__(self) -> None:
        self.validation = Validation(self.run, self.view.note)
        self.sampler = Sampler(self.view.note)
        self.sizes = self.recipe.batch_sizes()

    def go(self, done: int, tokens: int) -> Summary:
        recipe, total = self.recipe, self.recipe.steps
        self.view.start(_title(recipe, self.run), total, done, self.sizes.until)
        utilization = UtilizationMetric(
            **self.run.ranks.on_rank0(lambda: asdict(utilization_metric(self.run)))
        )
        utilization = replace(utilization, rate=utilization.rate and utilization.rate * self.run.ranks.world)
        self.validation.rows = self.run.ranks.on_rank0(lambda: rows_before(self._rows()))
        row: MetricsRow = {"step": done}
        began, first_tokens = time.perf_counter(), tokens
        try:
            with _graceful_stop(self.run.ranks) as stop:
                running: _Running | None = None
                for step in range(done + 1, int(min(total, self.until)) + 1):
                    started = self._start(step, stop.asked or self.saver.failed, running)
                    if running is not None:
                        row, running = self._finish(running, tokens, utilization), None
                        tokens = row["tokens"]
                        self._record(row, last=False)
                    if not (self._stops(stop, step) or started.launched.ready or self._needs_weights(step)):
                        running = started  # the next step is launched while the device runs this one
                        continue
                    row = self._finish(started, tokens, utilization)
                    tokens = row["tokens"]
                    due = step == total or _due(recipe.run.save_every, step)
                    # Ranks have agreed on when to stop, so they know here whether they will.
                    self._check_replicas(step, due or self._stops(stop, step))
                    self._record(row, last=step == total)
                    # Read once: a request during the save waits for the next step.
                    stopping = self._stops(stop, step)
                    if stopping or due:
                        self._save(row, last=stopping or step == total)
                    if stopping:
                        break
                self.status.enter(Phase.END, row["step"])
                self.saver.wait()
        except RushError:
            self._finish_save()
            raise
        except BaseException as error:
            if self.saver.failed_step is not None:
                self.status.enter(Phase.SAVE, self.saver.failed_step)
            if not isinstance(error, KeyboardInterrupt) and not lost(error):
                self._finish_save()
            else:  # another rank is gone, or there is no time
                self.saver.abandon()
            raise
        finally:
            self.view.close()
        return self._summary(row["step"], tokens, (tokens - first_tokens) / (time.perf_counter() - began))

    def _stops(self, stop: _Stop, step: int) -> bool:
        """Whether the run ends after this step. Ranks are asked to stop at different moments: they end one step after the first
        step in which all learned of a request. A failed save requests it, too."""
        if step >= self.until:
            return True
        return stop.asked or self.saver.failed if self.run.ranks.alone else step >= self.last_step

    def _needs_weights(self, step: int) -> bool:
        """Whether a save, validation, sample or replica check uses the weights after this step."""
        settings = self.recipe.run
        return step == self.recipe.steps or self._validates(step) or any(
            _due(every, step) for every in (settings.save_every, settings.sample_every, settings.drift_every)
        )  # fmt: skip

    def _validates(self, step: int) -> bool:
        """Whether a validation comes after this step, by steps or by tokens."""
        settings = self.recipe.run
        return _due(settings.validate_every, step) or self.sizes.passes(settings.validate_every_tokens, step)

    def _check_replicas(self, step: int, saving: bool) -> None:
        """Compare replicas bit for bit, at the latest before they are saved."""
        every, ranks = self.recipe.run.drift_every, self.run.ranks
        if every and not ranks.alone and (saving or _due(every, step)):
            self.status.enter(Phase.REPLICAS, step)
            with self._with_advice():
                check_replicas(ranks, self.run.model.named_parameters(), step)

    def _start(self, step: int, asked: bool, before: _Running | None) -> _Running:
        """Launch a step, on a device perhaps while the one before is still running."""
        began = time.perf_counter()
        opened = before.launched.arrived if before is not None else _mark(self.run.device)
        self.status.enter(Phase.STEP, step)
        lr = learning_rate(self.recipe, step)
        batches = list(self.loader.next_step(self.sizes.of(step) // self.recipe.pass_tokens))
        data_s, epoch = time.perf_counter() - began, self.loader.epoch
        with self._with_advice():
            launched = launch_step(self.run, step, lr, batches, stopping=asked)
        if not self.prepared and 0 < self.recipe.run.save_every < self.recipe.steps:
            self.prepared = True  # the optimizer has its state now
            self.saver.prepare(self.run.model, self.run.optimizer)
        return _Running(launched, lr, began, opened, data_s, epoch)

    def _finish(self, started: _Running, tokens: int, utilization: UtilizationMetric) -> MetricsRow:
        """Wait for a step and return its row."""
        self.status.enter(Phase.STEP, started.launched.step)
        with self._with_advice():
            result = started.launched.result()
        counts = result.counts
        if counts.stopping:
            self.last_step = min(self.last_step, started.launched.step + 1)
        seconds = started.seconds()
        speed = counts.tokens / seconds
        row: MetricsRow = {
            "step": started.launched.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": started.lr,
            "tokens": tokens + counts.tokens,
            "labels": counts.labels,
            "epoch": round(started.epoch, 4),
        }
        if counts.real < counts.tokens:
            row["padding"] = 1 - counts.real / counts.tokens
        if counts.labels < counts.tokens:
            row["trained_per_s"] = counts.labels / seconds
        row["tokens_per_s"], row["step_s"], row["data_s"] = speed, seconds, started.data_s
        row["memory_bytes"] = memory_in_use(self.run.device.type)
        if utilization.rate:
            row[utilization.name] = speed * utilization.flops_per_token / utilization.rate
        add_figures(row, result.figures)
        if result.skipped:
            row["skipped"] = True
        return row

    @contextmanager
    def _with_advice(self) -> Iterator[None]:
        """Add the last checkpoint and advice to the error of a run that diverged."""
        try:
            yield
        except Diverged as error:
            self._finish_save()
            steps = self.folder.checkpoints.steps()
            last = self.folder.checkpoints.path(steps[-1]) if steps else None
            kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been saved yet"
            advice = "Lower optimizer.lr, lengthen schedule.warmup or look at these samples."
            if isinstance(error, Drifted):
                advice = "Look for a faulty device or a technique that skips a collective, and continue with --resume."
            raise type(error)(f"{error} Nothing was overwritten: {kept}. {advice}") from None

    def _record(self, row: MetricsRow, last: bool) -> None:
        settings, step = self.recipe.run, row["step"]
        if last or self._validates(step):
            self.status.enter(Phase.VALIDATION, step)
            with self._with_advice():
                held_out = partial(self.corpus.validation, self.recipe, self.run.loader_options)
                row["val_loss"] = self.validation.loss(held_out)
            if self.validation.rows:
                row["val_rows"] = self.validation.rows
            add_figures(row, self.run.objective.figures(self.run.ranks.all_reduce), "val_")
        sampled = settings.sample_tokens and (last or _due(settings.sample_every, step))
        self.status.enter(Phase.SAMPLE if sampled else Phase.RECORD, step)
        run = gathered_run(self.run) if sampled else self.run
        if self.rows is None:
            return
        metrics, samples = self.rows
        metrics.write(row)
        self.trackers.scalars(step, _numbers(row))
        self.view.row(row)
        if sampled:
            sample = self.sampler.row(run, self.corpus, self.recipe, step)
            samples.write(sample)
            if sample["text"] is not None:
                self.trackers.sample(step, sample["text"])
                self.view.sample(step, sample["text"])

    def _save(self, row: MetricsRow, last: bool) -> None:
        step = row["step"]
        self.status.enter(Phase.SAVE, step)
        for rows in self.rows or ():
            rows.sync()
        extra = {
            "step": step,
            "tokens": row["tokens"],
            "loader": self.loader.state(),
            "corpus": self.corpus.digest,
            "recipe": self.recipe.digest,
        }
        metrics = {"val_loss": row.get("val_loss")}
        self.saver.save(step, self.run.model, self.run.optimizer, extra, metrics, last=last)

    def _finish_save(self) -> None:
        """Wait for the save under way; the run ends for another reason, so an error of the save is dropped."""
        with suppress(Exception):
            self.saver.wait()

    def _rows(self) -> Iterator[MetricsRow]:
        return read_rows(self.folder.metrics, MetricsRow)

    def _summary(self, step: int, tokens: int, speed: float) -> Summary:
        return Summary(**self.run.ranks.on_rank0(lambda: asdict(self._own_summary(step, tokens, speed))))

    def _own_summary(self, step: int, tokens: int, speed: float) -> Summary:
        rows = list(self._rows())
        val = [loss for row in rows if (loss := row.get("val_loss")) is not None]
        last = min(MOST_LAST, max(1, len(rows) // 10))
        return Summary(
            folder=str(self.folder.path),
            step=step,
            steps=self.recipe.steps,
            loss=_mean_loss(rows[-last:]),
            loss_steps=len(rows[-last:]),
            epochs=rows[-1].get("epoch", 0.0),
            val_loss=val[-1] if val else None,
            best_val_loss=min(val) if val else None,
            tokens=tokens,
            tokens_per_s=speed,
            interrupted=step < self.recipe.steps,
        )


def _numbers(row: MetricsRow) -> dict[str, float]:
    """The metrics that a tracker logs per step."""
    return {
        k: v
        for k, v in row.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "step"
    }


def _mean_loss(rows: Sequence[MetricsRow]) -> float:
    """The mean over all labels of these steps: a single uneven batch is noisy."""
    labels = [row.get("labels", 1) for row in rows]
    return sum(row["loss"] * count for row, count in zip(rows, labels, strict=True)) / max(1, sum(labels))


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A recorded timing event; None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _title(recipe: Recipe, run: Run) -> str:
    named = [name for name, _ in recipe.technique_uses()]
    named += [name for use in run.uses if (name := use.technique.name) not in named]
    names = ", ".join(named) or "none"
    ranks = "" if run.ranks.alone else f"{run.ranks.data_ranks} × "
    return (
        f"{recipe.model.name} on {run.machine.summary()} · {_in_turn(recipe.step_sizes)} tokens a step "
        f"({ranks}{_in_turn(recipe.accumulations)} × {recipe.micro} × {recipe.batch.sequence}) · techniques: {names}"
    )


def _in_turn(numbers: Sequence[int]) -> str:
    """`16,384 → 32,768`: sizes of the batch over the run."""
    return " → ".join(f"{number:,}" for number in numbers)


@dataclass
class _Stop:
    asked: bool = False


@contextmanager
def _graceful_stop(ranks: Ranks) -> Iterator[_Stop]:
    """Ctrl-C or SIGTERM ends the run after its step, with a checkpoint; a second Ctrl-C ends it at once.

    Rank 0 of several ignores SIGTERM from then on: a launcher sends it as soon as another rank has exited, while rank 0 still
    writes the page and prints the summary.
    """
    stop = _Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        # Batch systems and `timeout` send SIGTERM more than once; only a second Ctrl-C means "now".
        if stop.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # signals belong to the main thread; elsewhere the caller decides how to stop
        before = {}
    last = ranks.main and not ranks.alone
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last and number == signal.SIGTERM else handler)
