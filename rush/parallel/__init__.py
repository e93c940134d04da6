"""Several processes that train one model together, on torch's own engine: ranks, their mesh, sharded tensors.

A run on one process uses none of it: `Ranks()` is that case, and nothing of torch.distributed is touched.
"""

from __future__ import annotations

from rush.parallel.process_group import check_world, join
from rush.parallel.ranks import AXES, DATA_AXES, Ranks
from rush.parallel.rendezvous import report_absent, started_rank, started_world

__all__ = [
    "AXES",
    "DATA_AXES",
    "Ranks",
    "check_world",
    "join",
    "report_absent",
    "started_rank",
    "started_world",
]
