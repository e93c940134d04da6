"""Where metrics go besides `metrics.jsonl`: TensorBoard by default, Weights & Biases on request.

Only the recipe and the metrics are sent. Keys and tokens are read by the services' own clients from the environment; nothing
here reads or stores them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rush.errors import MachineError
from rush.recipe import Recipe


class MetricSink(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder; rows after the resumed step are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise MachineError(
                "run.tensorboard is on but the package tensorboard is not installed; install it or set "
                "run.tensorboard=false."
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in a Weights & Biases project; resumed under the same id."""

    def __init__(self, project: str, recipe: Recipe, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise MachineError(
                f"run.wandb is {project!r} but the package wandb is not installed; install the extra `wandb` "
                "or leave run.wandb out."
            ) from None
        # Without a key the client would stop and ask on the terminal, in the middle of a batch job.
        if os.environ.get("WANDB_MODE") not in ("offline", "disabled") and not _has_login():
            raise MachineError(
                "run.wandb is set but no login was found; run `wandb login`, or set WANDB_MODE=offline to log "
                "to files only."
            )
        self._run: Any = wandb.init(
            project=project,
            id=f"{folder.resolve().name}-{recipe.digest[:8]}",
            resume="allow",
            dir=str(folder),
            config=recipe.model_dump(mode="json"),
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_login() -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())


def open_sinks(recipe: Recipe, folder: Path, first_step: int) -> list[MetricSink]:
    """The sinks the recipe asks for, besides `metrics.jsonl`."""
    sinks: list[MetricSink] = []
    if recipe.run.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", first_step))
    if recipe.run.wandb:
        sinks.append(WeightsAndBiases(recipe.run.wandb, recipe, folder))
    return sinks
