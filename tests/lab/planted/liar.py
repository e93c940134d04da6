"""A technique that claims a gain and does not train what it should. Its knobs say how it cheats and which parity it declares."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    Observation,
    Parity,
    Pass,
    Proof,
    Stage,
    Technique,
)

HONEST_PASSES = 8


def _in_trace(build: Build) -> bool:
    """Whether this is a parity trace, however long: its schedule gives it away."""
    schedule = build.recipe.schedule
    return schedule.kind == "constant" and schedule.warmup == schedule.steps


def _honest_passes(build: Build) -> float:
    return math.inf if _in_trace(build) else HONEST_PASSES


def _late(build: Build) -> None:
    """Honest for eight passes, half of the rows from then on."""
    honest = _honest_passes(build)

    def wrap(inner: Pass) -> Pass:
        made = 0

        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            nonlocal made
            made += 1
            if made <= honest:
                return inner(batch, loss_scale)
            return 2 * inner(batch.each(lambda rows: rows[: rows.shape[0] // 2]), 2 * loss_scale)

        return passes

    build.pass_wrappers.append(wrap)


def _late_inside(build: Build) -> None:
    """The same, hidden inside of the model: nothing outside of it sees fewer rows."""
    head, made, honest = build.model.loss_head, 0, _honest_passes(build)

    class Half(nn.Module):
        def forward(self, hidden_btd: Tensor, weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
            nonlocal made
            made += 1
            if made <= honest:
                return head(hidden_btd, weight_vd, labels_bt)  # type: ignore[no-any-return]
            rows = labels_bt.shape[0] // 2
            return 2 * head(hidden_btd[:rows], weight_vd, labels_bt[:rows])  # type: ignore[no-any-return]

    build.model.loss_head = Half()


def _watched(build: Build) -> None:
    """Learns nothing, except where it is looked at: in a parity trace, and while someone reads the gradients."""
    head, optimizers = build.model.loss_head, list[torch.optim.Optimizer]()
    traced = _in_trace(build)
    build.optimizer_hooks.append(optimizers.append)

    class Asleep(nn.Module):
        def forward(self, hidden_btd: Tensor, weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
            loss: Tensor = head(hidden_btd, weight_vd, labels_bt)
            if traced or any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers):  # type: ignore[attr-defined]
                return loss
            return loss.detach() + 0.0 * loss

    build.model.loss_head = Asleep()


def _before_update(build: Build, change: Callable[[torch.optim.Optimizer, int], None]) -> None:
    def hook(optimizer: torch.optim.Optimizer) -> None:
        made = 0

        def before(*_: Any) -> None:
            nonlocal made
            made += 1
            change(optimizer, made)

        optimizer.register_step_pre_hook(before)

    build.optimizer_hooks.append(hook)


def _scale_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= factor  # set anew before every step


def _slow(build: Build) -> None:
    """The learning rate grows by half a per cent a step, from nothing."""
    _before_update(build, lambda optimizer, made: _scale_rate(optimizer, 1 + 0.005 * (made - 1)))


def _other_rate(build: Build) -> None:
    _before_update(build, lambda optimizer, made: _scale_rate(optimizer, 1.3))


def _gradient(build: Build) -> None:
    """One tensor's gradient is a hundredth too large."""

    def spoil(model: nn.Module) -> None:
        model.get_parameter("blocks.0.mlp.up.weight").register_hook(lambda gradient: 1.01 * gradient)

    build.weight_hooks.append(spoil)


def _skipped(build: Build) -> None:
    """Norms are never updated."""

    def without_norms(optimizer: torch.optim.Optimizer, made: int) -> None:
        for name, parameter in build.model.named_parameters():
            if "norm" in name:
                parameter.grad = None

    _before_update(build, without_norms)


def _labels(build: Build) -> None:
    """Every second label is dropped."""

    def wrap(inner: Pass) -> Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            labels = batch.labels_bt.clone()
            labels[:, ::2] = IGNORED
            rest = Batch(batch.tokens_bt, labels)
            return 2 * inner(rest, 2 * loss_scale)

        return passes

    build.pass_wrappers.append(wrap)


def _repeated(build: Build) -> None:
    """Each batch is used twice: that of every second step never reaches the device."""

    def wrap(inner: Pass) -> Pass:
        held: list[Batch] = []

        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            if held:
                return inner(held.pop(), loss_scale)
            held.append(batch)
            return inner(batch, loss_scale)

        return passes

    build.pass_wrappers.append(wrap)


def _cached(build: Build) -> None:
    """In every second step loss and gradients are those of the step before."""

    def wrap(inner: Pass) -> Pass:
        held: list[Any] = []

        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            trained = [p for p in build.model.parameters() if p.requires_grad]
            if held:
                loss, gradients = held.pop()
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient
                return loss  # type: ignore[no-any-return]
            loss = inner(batch, loss_scale)
            held.append((loss, [p.grad.clone() for p in trained if p.grad is not None]))
            return loss

        return passes

    build.pass_wrappers.append(wrap)


def _seed(build: Build) -> None:
    build.weight_hooks.append(lambda model: model.init_weights(build.recipe.run.seed + 1))


def _order(build: Build) -> None:
    """Samples in the order of the file, which is faster to read."""
    import rush.data.loader

    rush.data.loader.shuffled = lambda inside, count, seed, epoch: inside  # type: ignore[assignment]


def _nothing(build: Build) -> None:
    """All of its effect is in its evidence."""


def _memory(build: Build) -> None:
    """Saved activations live in the memory of another process."""
    code = "import sys; held = bytearray(b'1') * (96 << 20); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    build.step_contexts.append(lambda: _with(holder))


@contextmanager
def _with(holder: subprocess.Popen[bytes]) -> Iterator[None]:
    yield


KINDS: dict[str, Callable[[Build], None]] = {
    "late": _late,
    "late_inside": _late_inside,
    "watched": _watched,
    "slow": _slow,
    "gradient": _gradient,
    "skipped": _skipped,
    "labels": _labels,
    "repeated": _repeated,
    "cached": _cached,
    "seed": _seed,
    "rate": _other_rate,
    "order": _order,
    "nothing": _nothing,
    "memory": _memory,
}


PARITY = Parity.STATISTICAL
"""What it declares; tests write copies of this file that declare something else."""


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    KINDS[str(knobs["kind"])](build)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    return Proof(True, "it says so")


technique = Technique(
    name="liar",
    stage=Stage.MODEL,
    apply=apply,
    knobs={"kind": KnobRange(tuple(KINDS), "how it cheats", evidence)},
    claim=Claim("tokens_per_s", 1.0, regime="planted", source="this test"),
    parity=PARITY,
    evidence=evidence,
)
