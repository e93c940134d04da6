"""Ranks that Slurm started itself: `srun python -m rush train …`, a task for each GPU, without torchrun.

srun sets its own variables; here they become torchrun's, which all other code reads. A process in the batch script itself has
some of these variables, too, but no step: it is no rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


def set_rank_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """In a task of srun, set the variables that torchrun would set."""
    for name, value in rank_variables(environment).items():
        environment.setdefault(name, value)


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, from srun's; empty unless this is one of several tasks of a step."""
    world = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    in_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if "RANK" in environment or "SLURM_PROCID" not in environment or in_batch_script or int(world) == 1:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", world))
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        # As in 8(x2): eight on each of two nodes. Other nodes may have another number; each needs only its own.
        "LOCAL_WORLD_SIZE": tasks.split(",")[0].split("(")[0],
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(20000 + job % 40000),
    }


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu003 of `gpu[003-006,9],cpu1`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    before, number, after = match.groups(default="")
    return before + number + after
