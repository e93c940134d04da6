"""Trackers: TensorBoard, Weights & Biases, MLflow and trackio, behind the recipe key `run.trackers`.

Each is one file with a `Tracker`. A run is never slowed down or stopped by one: a thread of its own feeds it, and a tracker
that fails gets nothing more, with one warning; `metrics.jsonl` has every row anyway. What cannot work at all (a library that
is not installed, no login) is an error before the first step. A resumed run continues in the same run of its tracker: its id
is in `trackers.json`. A step that is trained again, after a crash, is logged again.

Only what rush itself records is sent: the recipe, the metrics, the samples, how the run ended. Keys and tokens are read by
the libraries' own clients from the environment; nothing here reads or stores them.
"""

from __future__ import annotations

from rush.training.trackers.feed import Trackers
from rush.training.trackers.opening import check_trackers, open_trackers, where_to_look

__all__ = ["Trackers", "check_trackers", "open_trackers", "where_to_look"]
