"""Ranks that Slurm started itself: `srun python -m rush train …`, a task for each GPU, without torchrun.

srun tells a task its place by variables of its own. They are put into torchrun's words here, once, so that everything else
knows one language. A process in the batch script itself has some of these variables, too, but no step: it is no rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


def join_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """In a task of srun, set what torchrun would have set; elsewhere change nothing."""
    for name, value in step_words(environment).items():
        environment.setdefault(name, value)


def step_words(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK and its companions, from srun's variables; nothing unless this is one of several tasks of a step."""
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
        # As in 8(x2): eight on each of two nodes. Other nodes may have another number; each needs to know its own only.
        "LOCAL_WORLD_SIZE": tasks.split(",")[0].split("(")[0],
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(20000 + job % 40000),
    }


def first_host(nodes: str) -> str:
    """The first name of a list as Slurm writes it: `gpu[003-006,9],cpu1` begins with gpu003."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    before, number, after = match.groups(default="")
    return before + number + after
