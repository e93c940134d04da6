"""The stepping part of a run: launch a step, look at the one before, record, validate, sample, save, stop politely.

A step is launched while the device works on the one before, except where its weights are needed at once. Several ranks
do this together and take the same decisions from the same numbers; only rank 0 writes and prints.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from rush.checkpoint.saver import Saver
from rush.errors import Diverged, Drifted, RushError
from rush.hardware import memory_in_use
from rush.parallel.process_group import lost
from rush.parallel.replica_check import check_replicas
from rush.recipe import Recipe
from rush.records.metrics import MetricsWriter, read_rows
from rush.records.run_folder import RunFolder
from rush.train.build import Run
from rush.train.corpus import Corpus
from rush.train.failures import Phase, RunStatus
from rush.train.metric_sinks import Sink
from rush.train.sample import Sampler, gathered_run
from rush.train.schedule import learning_rate
from rush.train.step import LaunchedStep, launch_step
from rush.train.utilization import UtilizationMetric, utilization_metric
from rush.train.validation import Validation, rows_before
from rush.train.view import View


@dataclass(frozen=True)
class Summary:
    """What a finished (or interrupted) run comes to."""

    folder: str
    step: int
    steps: int
    loss: float
    val_loss: float | None
    best_val_loss: float | None
    tokens: int
    tokens_per_s: float
    interrupted: bool


@dataclass(frozen=True)
class _Started:
    """A step that was launched, and what its row will need."""

    launched: LaunchedStep
    lr: float
    began: float
    opened: torch.cuda.Event | None
    """On a device, what its time counts from: the step before, if it was launched behind that, or its own beginning."""
    data_s: float

    def seconds(self) -> float:
        """How long it took, once its result is there. A device keeps the time itself: the host may come back late, from
        launching the next step, and would count that here and miss it there."""
        if self.opened is not None and self.launched.arrived is not None:
            return float(self.opened.elapsed_time(self.launched.arrived)) / 1000
        return time.perf_counter() - self.began


@dataclass
class Session:
    """The stepping part of a run, between start (or resume) and end (or interruption)."""

    recipe: Recipe
    run: Run
    folder: RunFolder
    corpus: Corpus
    loader: Any
    rows: tuple[MetricsWriter, MetricsWriter] | None
    """Metrics and samples; rank 0 has them."""
    sinks: list[Sink]
    view: View
    saver: Saver
    doing: RunStatus
    prepared: bool = False
    """Whether there is memory for copies of the state."""
    last_step: float = math.inf
    """Of several ranks, the step after which they agreed to end."""

    def __post_init__(self) -> None:
        self.validation = Validation(self.run, self.view.note)
        self.sampler = Sampler(self.view.note)

    def go(self, done: int, tokens: int) -> Summary:
        recipe, total = self.recipe, self.recipe.schedule.steps
        self.view.start(_title(recipe, self.run), total, done)
        gauge = UtilizationMetric(**self.run.ranks.on_rank0(lambda: asdict(utilization_metric(self.run))))
        gauge = replace(gauge, rate=gauge.rate and gauge.rate * self.run.ranks.world)
        self.validation.rows = self.run.ranks.on_rank0(lambda: rows_before(read_rows(self.folder.metrics)))
        row: dict[str, Any] = {}
        began, first_tokens = time.perf_counter(), tokens
        try:
            with _graceful_stop() as stop:
                under_way: _Started | None = None
                for step in range(done + 1, total + 1):
                    started = self._start(step, stop.asked or self.saver.failed, under_way)
                    if under_way is not None:
                        row, under_way = self._finish(under_way, tokens, gauge), None
                        tokens = row["tokens"]
                        self._record(row["step"], row, last=False)
                    if not (self._stops(stop, step) or started.launched.ready or self._needs_weights(step)):
                        under_way = started  # the next step is launched while the device works on this one
                        continue
                    row = self._finish(started, tokens, gauge)
                    tokens = row["tokens"]
                    due = step == total or _due(recipe.run.save_every, step)
                    # Several ranks agreed on when to stop, so they know here whether they will.
                    self._check_copies(step, due or self._stops(stop, step))
                    self._record(step, row, last=step == total)
                    # Asked once: a request that comes during the save waits for the next step.
                    stopping = self._stops(stop, step)
                    if stopping or due:
                        self._save(step, row, last=stopping or step == total)
                    if stopping:
                        break
                self.doing.at(Phase.END, row.get("step", done))
                self.saver.wait()
        except RushError:
            self._let_save_end()
            raise
        except BaseException as error:
            if self.saver.failed_step is not None:
                self.doing.at(Phase.SAVE, self.saver.failed_step)
            if isinstance(error, Exception | SystemExit) and not lost(error):
                self._let_save_end()
            else:  # another rank is gone, or there is no time
                self.saver.abandon()
            raise
        finally:
            self.view.close()
        return self._summary(row, done, tokens, (tokens - first_tokens) / (time.perf_counter() - began))

    def _stops(self, stop: _Stop, step: int) -> bool:
        """Whether the run ends after this step. Ranks are asked at different moments: they end after the step that follows
        the first one of which all know that someone was asked. A save that failed asks, too."""
        return stop.asked or self.saver.failed if self.run.ranks.alone else step >= self.last_step

    def _needs_weights(self, step: int) -> bool:
        """Whether something is done with the weights as they are after this step."""
        settings = self.recipe.run
        return step == self.recipe.schedule.steps or any(
            _due(every, step)
            for every in (settings.save_every, settings.validate_every, settings.sample_every, settings.drift_every)
        )  # fmt: skip

    def _check_copies(self, step: int, saving: bool) -> None:
        """What ranks hold alike must be equal to the bit, before it is saved at the latest."""
        every, ranks = self.recipe.run.drift_every, self.run.ranks
        if every and not ranks.alone and (saving or _due(every, step)):
            self.doing.at(Phase.COPIES, step)
            with self._explained():
                check_replicas(ranks, self.run.model.named_parameters(), step)

    def _start(self, step: int, asked: bool, before: _Started | None) -> _Started:
        """Launch a step, on a device perhaps while it is at work on the one before; it may be when this returns."""
        began = time.perf_counter()
        opened = before.launched.arrived if before is not None else _mark(self.run.device)
        self.doing.at(Phase.STEP, step)
        lr = learning_rate(self.recipe, step)
        batches = list(self.loader.next_step())
        data_s = time.perf_counter() - began
        with self._explained():
            launched = launch_step(self.run, step, lr, batches, stopping=asked)
        if not self.prepared and 0 < self.recipe.run.save_every < self.recipe.schedule.steps:
            self.prepared = True  # the optimizer has its state now
            self.saver.prepare(self.run.model, self.run.optimizer)
        return _Started(launched, lr, began, opened, data_s)

    def _finish(self, started: _Started, tokens: int, gauge: UtilizationMetric) -> dict[str, Any]:
        """Wait for a step and make its row."""
        self.doing.at(Phase.STEP, started.launched.step)
        with self._explained():
            result = started.launched.result()
        if result.stopping:
            self.last_step = min(self.last_step, started.launched.step + 1)
        seconds = started.seconds()
        speed = result.num_tokens / seconds
        return {
            "step": started.launched.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": started.lr,
            "tokens": tokens + result.num_tokens,
            "labels": result.num_labels,
            # With padding in it, a step is worth less than its tokens.
            **(
                {"padding": 1 - result.num_real / result.num_tokens}
                if result.num_real < result.num_tokens
                else {}
            ),
            **(
                {"trained_per_s": result.num_labels / seconds}
                if result.num_labels < result.num_tokens
                else {}
            ),
            "tokens_per_s": speed,
            "step_s": seconds,
            "data_s": started.data_s,
            "memory_bytes": memory_in_use(self.run.device.type),
            **gauge.of(speed),
            **result.figures,
            # Mixed precision in fp16 leaves out a step whose scaled gradients overflowed.
            **({"skipped": True} if result.skipped else {}),
        }

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What is left of a run that diverged, in words that help. Other failures are explained further out."""
        try:
            yield
        except Diverged as error:
            self._let_save_end()
            steps = self.folder.checkpoints.steps()
            last = self.folder.checkpoints.path(steps[-1]) if steps else None
            kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been saved yet"
            advice = "Lower optimizer.lr, lengthen schedule.warmup or look at these samples."
            if isinstance(error, Drifted):
                advice = "Look for a faulty device or a technique that leaves an exchange out, and go on with --resume."
            raise type(error)(f"{error} Nothing was overwritten: {kept}. {advice}") from None

    def _record(self, step: int, row: dict[str, Any], last: bool) -> None:
        settings = self.recipe.run
        if last or _due(settings.validate_every, step):
            self.doing.at(Phase.VALIDATION, step)
            with self._explained():
                held_out = partial(self.corpus.validation, self.recipe, self.run.loader_options)
                row["val_loss"] = self.validation.loss(held_out)
                row |= {"val_rows": self.validation.rows} if self.validation.rows else {}
            figures = self.run.objective.figures(self.run.ranks.all_reduce)
            row |= {f"val_{name}": value for name, value in figures.items()}
        sampled = settings.sample_tokens and (last or _due(settings.sample_every, step))
        self.doing.at(Phase.SAMPLE if sampled else Phase.RECORD, step)
        run = gathered_run(self.run) if sampled else self.run
        if self.rows is None:
            return
        metrics, samples = self.rows
        metrics.write(row)
        for sink in self.sinks:
            sink.write(step, {k: v for k, v in row.items() if isinstance(v, float)})
        self.view.row(row)
        if sampled:
            sample = self.sampler.row(run, self.corpus, self.recipe, step)
            samples.write(sample)
            if sample["text"] is not None:
                self.view.sample(step, sample["text"])

    def _save(self, step: int, row: dict[str, Any], last: bool) -> None:
        self.doing.at(Phase.SAVE, step)
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

    def _let_save_end(self) -> None:
        """The run ends for another reason, which is told; if the save that is under way fails, that is not."""
        with suppress(Exception):
            self.saver.wait()

    def _summary(self, row: dict[str, Any], done: int, tokens: int, speed: float) -> Summary:
        return Summary(**self.run.ranks.on_rank0(lambda: asdict(self._own_summary(row, done, tokens, speed))))

    def _own_summary(self, row: dict[str, Any], done: int, tokens: int, speed: float) -> Summary:
        rows = list(read_rows(self.folder.metrics))
        val = [r["val_loss"] for r in rows if r.get("val_loss") is not None]
        step = row.get("step", done)
        return Summary(
            folder=str(self.folder.path),
            step=step,
            steps=self.recipe.schedule.steps,
            loss=rows[-1]["loss"],
            val_loss=val[-1] if val else None,
            best_val_loss=min(val) if val else None,
            tokens=tokens,
            tokens_per_s=speed,
            interrupted=step < self.recipe.schedule.steps,
        )


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Now, on the clock of the device; None for a CPU."""
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
        f"{recipe.model.name} on {run.machine.summary()} · {recipe.step_tokens:,} tokens a step "
        f"({ranks}{recipe.accumulation} × {recipe.micro} × {recipe.batch.sequence}) · techniques: {names}"
    )


@dataclass
class _Stop:
    asked: bool = False


@contextmanager
def _graceful_stop() -> Iterator[_Stop]:
    """Ctrl-C or SIGTERM ends the run after its step, with a checkpoint; a second Ctrl-C ends it now."""
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
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
