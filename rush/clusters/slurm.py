"""The Slurm batch script of a run.

Each node runs one task, torchrun, which starts a rank for each GPU; the rendezvous is on the first node. A few minutes
before the time limit Slurm signals the script (`--signal=B:USR1@300`), which has Slurm send SIGTERM to the ranks; they
end after the same step with a checkpoint, and the job is requeued. The command is always the same: `--resume` starts a
new run or resumes an existing one. A node failure requeues the job as well. Sources: sbatch(1) and srun(1),
https://slurm.schedmd.com/sbatch.html and srun.html; container options are those of pyxis,
https://github.com/NVIDIA/pyxis.
"""

from __future__ import annotations

import re
import shlex

from rush.clusters.job import Job
from rush.errors import RecipeError

VALUE = re.compile(r"[\w.,:@%+=/\[\]-]+")
"""Allowed characters of a directive: sbatch reads the rest of a line, so a blank or a line break would add to it."""
VARIABLE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*)")


def script(job: Job) -> str:
    """A script for `sbatch`."""
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by `rush launch`: {job.recipe.world} ranks on {job.nodes} nodes. Submit it with sbatch.",
            *(f"#SBATCH {option}" for option in options(job)),
            "",
            "set -euo pipefail",
            *_surroundings(job),
            "",
            "# All nodes meet at the first one, on a port that another job there does not take. A node's name need not be",
            "# one that hosts resolve: its address is what Slurm itself reaches it at.",
            'FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            r"""MASTER_ADDR=$(scontrol show node -o "$FIRST" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')""",
            "MASTER_ADDR=${MASTER_ADDR:-$FIRST}",
            "MASTER_PORT=$((20000 + SLURM_JOB_ID % 40000))",
            "export MASTER_ADDR MASTER_PORT",
            f"mkdir -p -- {quoted_path(job.run_folder)}",
            "",
            "# Before the time limit: let the ranks end after their step, with a checkpoint, and queue the job again.",
            "stopping=0",
            "# The signal goes to the tasks: srun itself would take SIGTERM as an order to kill them at once.",
            'stop() { stopping=$((stopping + 1)); echo "The time limit is near: stopping after the current step."; '
            'scancel --signal=TERM "$SLURM_JOB_ID" || true; }',
            "trap stop USR1",
            "",
            f"{_step(job)} &",
            "step=$!",
            "code=0",
            "# A signal ends a wait with an exit code of its own: then wait again, also where the step has ended meanwhile.",
            'while true; do before=$stopping; wait "$step" && code=0 || code=$?; [ "$stopping" != "$before" ] || break; done',
            'if [ "$stopping" != 0 ] && [ "$code" != 0 ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "  exit 0",
            "fi",
            'exit "$code"',
            "",
        ]
    )


def options(job: Job) -> list[str]:
    """The directives; names as sbatch's manual has them."""
    tasks = 1 if job.torchrun else job.gpus_per_node
    given = {
        "job-name": job.label,
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_node // tasks if job.cpus_per_node else None,
        "mem": job.memory_per_node,
        "time": job.time_limit,
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:USR1@{job.grace_s}",
        "output": f"{job.label}-%j.log",
        "open-mode": "append",
    }
    for name, value in given.items():
        if value is not None and not VALUE.fullmatch(str(value)):
            raise RecipeError(
                f"--{name} of the job would be {str(value)!r}; allowed are letters, digits and . , : @ % + = / [ ] - _."
            )
    flags = ["requeue", *([] if job.cpus_per_node else ["exclusive"])]
    return [f"--{name}={value}" for name, value in given.items() if value is not None] + [
        f"--{f}" for f in flags
    ]


def _surroundings(job: Job) -> list[str]:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    # Ranks that are signaled need time for their step and its checkpoint before torchrun's timeout kills them.
    lines.append(f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(30, job.grace_s - 60)}")
    if job.venv is not None and job.container is None:
        lines.append(f"source {quoted_path(f'{job.venv}/bin/activate')}")
    return lines


def _step(job: Job) -> str:
    tasks = 1 if job.torchrun else job.gpus_per_node
    # The step gets all cores that the job has on a node; since Slurm 22.05 it does not take them over by itself.
    cores = '"$((SLURM_CPUS_ON_NODE / ' + str(tasks) + '))"'
    words = [
        "srun",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cores}",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
    ]
    if job.container is not None:
        folder = quoted_path(f"{job.run_folder}:{job.run_folder}")
        words += [
            f"--container-image={shlex.quote(job.container)}",
            f'--container-mounts={folder},"$PWD:$PWD"',
        ]
        words.append('--container-workdir="$PWD"')
    lines = [" ".join(words)]
    if job.torchrun:
        lines.append(
            f"python -m torch.distributed.run --nnodes={job.nodes} --nproc-per-node={job.gpus_per_node} "
            f'--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" '
            f"--max-restarts={job.max_restarts}"
        )
    lines.append(f"{'' if job.torchrun else 'python '}-m rush train {' '.join(map(shlex.quote, job.words))}")
    lines.append(f"--out {quoted_path(job.run_folder)} --resume")
    return " \\\n  ".join(lines)


def quoted_path(path: str) -> str:
    """A path for the shell. A plain variable in it ($HOME, $SCRATCH) stays one; everything else is literal."""
    parts = VARIABLE.split(path)  # every second one is a variable
    return "".join(
        f'"{part}"' if place % 2 else shlex.quote(part) for place, part in enumerate(parts) if part
    )
