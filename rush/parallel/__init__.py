"""Distributed training on torch.distributed: ranks, their mesh, sharded tensors.

`Ranks()` is a single process, which uses nothing of torch.distributed.
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
