"""The log of a trial's steps: the batches given, what reached the model, and the results, recorded during the timing.

A speed counts only for steps that trained on their batches. So each step, warm-up and timed, logs its loss and gradient norm,
its rows, labels and tokens, a digest of the loader's batches (taken before a technique can modify them), and the rows and
tokens that reached the innermost pass, inside all wrappers of techniques. All of that is known on the host, so nothing
synchronizes the device: it reads shapes, and a digest covers a few columns of each row. What only the device knows (the labels
that reached the model) is counted after the timing, while `looking`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.lab.trial.found import FlowFound, StepsFound
from rush.techniques.api.contract import Pass
from rush.training.build import Run
from rush.training.step import StepResult

COLUMNS = 16
"""Positions of a row that its digest covers."""


@dataclass
class Flow:
    """What was given and what reached the innermost pass, step by step: labels, and digests of whole micro batches."""

    given: list[list[tuple[int, str]]] = field(default_factory=list)
    reached: list[list[tuple[int, str]]] = field(default_factory=list)

    def begin(self, batches: Sequence[Batch]) -> None:
        self.given.append([_told(batch) for batch in batches])
        self.reached.append([])

    def to_dict(self) -> FlowFound:
        return {
            "labels": [sum(labels for labels, _ in step) for step in self.given],
            "reached_labels": [sum(labels for labels, _ in step) for step in self.reached],
            "digests": [[text for _, text in step] for step in self.given],
            "reached_digests": [[text for _, text in step] for step in self.reached],
        }


def _told(batch: Batch) -> tuple[int, str]:
    labels = int(
        np.count_nonzero(batch.labels_bt.cpu().numpy() != IGNORED)
    )  # counted anew: it may have changed
    return labels, digest([batch], columns=None)


@dataclass
class StepLog:
    """A row for each step, in order."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    reached_rows: list[int] = field(default_factory=list)
    reached_tokens: list[int] = field(default_factory=list)
    skipped: int = 0
    captured: bool = False
    """Whether a CUDA graph was captured: replays of it call no pass."""
    looking: Flow | None = None
    """Set after the timing: everything that reaches the innermost pass."""
    _rows: int = 0
    _tokens: int = 0

    def watch(self, run: Run) -> None:
        """Count what reaches the run's innermost pass. (A replayed graph calls none: nothing is counted then.)"""
        innermost, on_gpu = run.innermost, run.device.type == "cuda"

        def counted(batch: Batch, loss_scale: Tensor) -> Tensor:
            rows, width = batch.tokens_bt.shape
            self._rows += rows
            self._tokens += rows * width
            capturing = on_gpu and torch.cuda.is_current_stream_capturing()
            self.captured |= capturing
            if self.looking is not None and not capturing:  # in a captured graph nothing may be read
                self.looking.reached[-1].append(_told(batch))
            return innermost(batch, loss_scale)

        counted_pass: Pass = counted
        run.set_innermost(counted_pass)

    def given(self, batches: Sequence[Batch]) -> None:
        """A step's batches, as the loader returned them."""
        self.rows.append(sum(batch.tokens_bt.shape[0] for batch in batches))
        self.labels.append(sum(batch.num_labels for batch in batches))
        self.tokens.append(sum(batch.tokens_bt.numel() for batch in batches))
        self.digests.append(digest(batches))
        self._rows = self._tokens = 0
        if self.looking is not None:
            self.looking.begin(batches)

    def launched(self) -> None:
        """Called when all of the step's passes are launched."""
        self.reached_rows.append(self._rows)
        self.reached_tokens.append(self._tokens)

    def result(self, found: StepResult) -> None:
        self.losses.append(found.loss)
        self.grad_norms.append(found.grad_norm)
        self.skipped += found.skipped

    def to_dict(self) -> StepsFound:
        return {
            "losses": list(self.losses),
            "grad_norms": list(self.grad_norms),
            "rows": list(self.rows),
            "labels": list(self.labels),
            "tokens": list(self.tokens),
            "digests": list(self.digests),
            "reached_rows": list(self.reached_rows),
            "reached_tokens": list(self.reached_tokens),
            "skipped": self.skipped,
            "captured": self.captured,
        }


def digest(batches: Iterable[Batch], columns: int | None = COLUMNS) -> str:
    """CRC-32 of inputs and of labels, of a few columns or of all; the same however rows are split into micro batches."""
    inputs = labels = 0
    for batch in batches:
        width = batch.tokens_bt.shape[1]
        every = slice(None, None, 1 if columns is None else max(1, width // columns))
        inputs = zlib.crc32(batch.tokens_bt[:, every].cpu().numpy().tobytes(), inputs)
        labels = zlib.crc32(batch.labels_bt[:, every].cpu().numpy().tobytes(), labels)
    return f"{inputs:08x}{labels:08x}"
