"""SkyPilot's task file of a run: cloud machines (or pods) are provisioned, set up, and released when the run is done.

The file lists the resources of a node (accelerators, spot or not), the files to copy (`file_mounts`), how to install rush
(`setup`, once per machine) and the command: torchrun on every node, with the rendezvous at the first address of
SKYPILOT_NODE_IPS. The command is always the same, so a managed job (`sky jobs launch`) that lost a spot machine resumes from
the last checkpoint. For that the run folder must outlive the machine: a volume that all nodes mount, or, on one node, a bucket.
A bucket is not a shared file system: each node sees its own cache of it, so ranks on several nodes cannot seal one checkpoint
there.
Source: skypilot-org/skypilot, docs/source/reference/yaml-spec.rst; the tests parse the file with its own package.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rush.clusters.job import Job, check_lines
from rush.clusters.slurm import quoted_path
from rush.errors import MachineError, RecipeError

HOME = "~/rush"
"""Where the commands run on a node; relative paths of a recipe start here."""
SHARED = "/shared"
PORT = 29400
ACCELERATOR = re.compile(r"[A-Za-z][\w.-]*")
INFRA = re.compile(r"[\w.*/@:-]+")
VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
BUCKET = re.compile(r"[a-z0-9]+://[\w.%/-]+")
MEMORY = re.compile(r"(\d+)(G|Gi|GB|GiB)?")
Table = dict[str, Any]


@dataclass(frozen=True)
class Sky:
    """Settings for SkyPilot only. None means its default."""

    accelerator: str
    package: str | None = None
    """The package to install with pip on a node: a local wheel or a requirement. None: the image has rush."""
    wheel: bool = False
    image: str | None = None
    infra: str | None = None
    spot: bool = False
    autostop_minutes: int = 10
    """Idle minutes after which a cluster is stopped, or terminated if the run folder outlives it. 0: never."""
    volume: str | None = None
    bucket: str | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Path on the node: file or folder of this machine, or a bucket."""
    constraints: str | None = None
    """A lock of this machine for pip."""

    def __post_init__(self) -> None:
        check_lines({name: value for name, value in vars(self).items() if isinstance(value, str)})
        check_lines({f"the mount at {place}": f"{place}{source}" for place, source in self.mounts.items()})
        for name, value, pattern, allowed in (
            ("--accelerator", self.accelerator, ACCELERATOR, "a name of `sky gpus list`, such as H100 or A100-80GB"),
            ("--infra", self.infra, INFRA, "a cloud with its region, such as aws/us-east-1 or kubernetes"),
            ("--volume", self.volume, VOLUME, "a name of `sky volumes ls`"),
            ("--bucket", self.bucket, BUCKET, "a bucket's address, such as s3://NAME or gs://NAME"),
        ):  # fmt: skip
            if value is not None and not pattern.fullmatch(value):
                raise RecipeError(f"{name} is {value!r:.200}; allowed: {allowed}.")

    @property
    def keeps_runs(self) -> bool:
        return self.volume is not None or self.bucket is not None


def task_file(job: Job, sky: Sky) -> str:
    """The task as YAML, for `sky launch` and `sky jobs launch`."""
    try:
        import yaml
    except ImportError:
        raise MachineError(
            "a task file is written with PyYAML, which is not installed; pip install pyyaml."
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Scripts as readable YAML blocks."""

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    head = f"# Written by `rush launch`: {job.recipe.world} ranks on {job.nodes} nodes.\n"
    head += f"# Submit it with sky jobs launch (resumes by itself) or sky launch -c {job.label}.\n"
    return head + str(
        yaml.dump(task(job, sky), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    )


def task(job: Job, sky: Sky) -> Table:
    _check_storage(job, sky)
    found: Table = {"name": job.label, "num_nodes": job.nodes, "resources": _resources(job, sky)}
    mounts = _mounts(sky)
    if mounts:
        found["file_mounts"] = mounts
    if sky.volume:
        found["volumes"] = {SHARED: sky.volume}
    environment = {**({"RUSH_CACHE": f"{SHARED}/cache"} if sky.volume else {}), **job.environment}
    if environment:
        found["envs"] = environment
    return {**found, "setup": _setup(sky), "run": _run(job, sky)}


def _check_storage(job: Job, sky: Sky) -> None:
    if sky.volume and sky.bucket:
        raise RecipeError("--volume and --bucket both hold the run folder; choose one.")
    if job.nodes > 1 and not sky.volume:
        said = "a bucket is no shared file system" if sky.bucket else "they share no file system"
        raise RecipeError(
            f"{job.nodes} nodes write one checkpoint together, and {said}; give --volume NAME (`sky volumes ls`), "
            "or take one node."
        )
    if sky.spot and not sky.keeps_runs:
        raise RecipeError(
            "a spot machine takes its disk with it; give --volume NAME or --bucket s3://NAME, where checkpoints stay."
        )


def _resources(job: Job, sky: Sky) -> Table:
    found: Table = {"accelerators": f"{sky.accelerator}:{job.gpus_per_node}"}
    if sky.infra:
        found["infra"] = sky.infra
    if job.cpus_per_node:
        found["cpus"] = f"{job.cpus_per_node}+"
    if job.memory_per_node:
        amount = MEMORY.fullmatch(job.memory_per_node)
        if amount is None:
            raise RecipeError(
                f"--memory is {job.memory_per_node!r:.200}; allowed with --sky: whole GB, such as 500G."
            )
        found["memory"] = f"{amount[1]}+"
    if sky.image:
        found["image_id"] = f"docker:{sky.image}"
    found["use_spot"] = sky.spot
    # A lost machine is always replaced; a run that fails by itself is restarted this many times.
    found["job_recovery"] = {"max_restarts_on_errors": job.max_restarts}
    found["autostop"] = (
        {"idle_minutes": sky.autostop_minutes, "down": sky.keeps_runs} if sky.autostop_minutes else False
    )
    return found


def _mounts(sky: Sky) -> Table:
    found: Table = dict(sky.mounts)
    if sky.package is not None and sky.wheel:
        found[f"{HOME}/{_file_name(sky.package)}"] = sky.package
    if sky.constraints:
        found[f"{HOME}/constraints.txt"] = sky.constraints
    if sky.bucket:
        # Written to the disk first and uploaded behind the run's back; renaming works, as checkpoints need.
        found[SHARED] = {"source": sky.bucket, "mode": "MOUNT_CACHED"}
    return found


def _setup(sky: Sky) -> str:
    lines = ["set -euo pipefail", f"mkdir -p {HOME}", f"cd {HOME}"]
    if sky.package is not None:
        what = f"./{_file_name(sky.package)}" if sky.wheel else sky.package
        lock = " -c constraints.txt" if sky.constraints else ""
        lines += [
            "test -x .venv/bin/python || python3 -m venv .venv",
            f".venv/bin/python -m pip install {shlex.quote(what)}{lock}",
        ]
    return "\n".join(lines) + "\n"


def _run(job: Job, sky: Sky) -> str:
    torchrun = (
        f"python -m torch.distributed.run --nnodes={job.nodes} --nproc-per-node={job.gpus_per_node} "
        f'--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:{PORT}" --rdzv-id="$SKYPILOT_TASK_ID" '
        f"--max-restarts={job.max_restarts}"
    )
    lines = [
        "set -euo pipefail",
        f"cd {HOME}",
        *(["source .venv/bin/activate"] if sky.package is not None else []),
        "# All nodes meet at the first one.",
        'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)',
        f"mkdir -p -- {quoted_path(job.run_folder)}",
        "exec "
        + " \\\n  ".join(
            [
                torchrun,
                f"-m rush train {' '.join(map(shlex.quote, job.words))}",
                f"--out {quoted_path(job.run_folder)} --resume",
            ]
        ),
    ]
    return "\n".join(lines) + "\n"


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]
