"""Trackers: TensorBoard, Weights & Biases, MLflow and trackio, behind the recipe key `run.trackers`.

Each is one file with a `Tracker`. A tracker never slows down or stops a run: a separate thread feeds it, and after a failure it
gets no more rows, with one warning; `metrics.jsonl` has every row anyway. Setup errors (a library that is not installed, no
login) appear before the first step. A resumed run continues in the same run of its tracker: its id is in `trackers.json`. A
step that is repeated after a crash is logged again.

Only rush's own records are sent: the recipe, the metrics, the samples, how the run ended. The libraries' own clients read keys
and tokens from the environment; nothing here reads or stores them.
"""

from __future__ import annotations

from rush.training.trackers.feed import Trackers
from rush.training.trackers.opening import check_trackers, open_trackers, where_to_look

__all__ = ["Trackers", "check_trackers", "open_trackers", "where_to_look"]
