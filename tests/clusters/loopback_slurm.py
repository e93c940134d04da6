"""A real Slurm on this machine: one slurmctld and three slurmd on the loopback device, with a munge key of their own.

Nothing of the system's is touched: every file is in a folder of the test's, and every daemon runs in the foreground as
a child, so its end is known. A node is a name and a port; each has two cores and one GPU that stands for a device
(`/dev/null`), since Slurm hands out devices without using them. A job in `high` preempts one in `low`, which is requeued.
Install it with `apt-get install slurm-wlm munge` (Debian); the daemons have to be started by root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("n1", "n2", "n3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")


def missing() -> str | None:
    """Why it cannot run here, or None."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"Slurm is not installed ({', '.join(lacking)}); apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmctld and slurmd of a test have to be started by root"


@dataclass(frozen=True)
class Cluster:
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str | Path, cwd: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            env={**self.environment, **environment},
            cwd=cwd or self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *words: str | Path, cwd: Path | None = None, **environment: str) -> str:
        """The job's number."""
        return self.ask("sbatch", "--parsable", *words, cwd=cwd, **environment)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job: JobState, NodeList, Restarts, Reason …"""
        shown = self.ask("scontrol", "show", "job", "-o", number)
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def node(self, name: str) -> str:
        shown = self.ask("scontrol", "show", "node", "-o", name).split()
        return next(word.partition("=")[2] for word in shown if word.startswith("State="))

    def lose(self, name: str) -> None:
        """A node without power: its slurmd, its step daemons and whatever they started end at once."""
        self.daemons[name].kill()
        ours = (
            b"SLURMD_NODENAME=" + name.encode(),
            b"SLURM_CONF=" + str(self.folder / "slurm.conf").encode(),
        )
        for process in _processes():
            said = process.environment.split(b"\0")
            if all(word in said for word in ours):
                for number in (process.parent, process.number):
                    if number == process.number or _name(number).startswith("slurmstepd"):
                        with suppress(ProcessLookupError):
                            os.kill(number, signal.SIGKILL)

    def wait(self, what: str, found: Callable[[], bool], limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while not found():
            assert time.monotonic() < deadline, f"after {limit_s:.0f} s not seen: {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of the daemons' logs and of the jobs'."""
        paths = sorted([*self.folder.glob("*.log"), *self.folder.parent.glob("*.log")])
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


@contextmanager
def loopback_slurm(folder: Path) -> Iterator[Cluster]:
    folder.mkdir(mode=0o755)
    (folder / "spool").mkdir()
    cluster = Cluster(folder)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    # The test's own folders are closed to others, which munged's clients here (all root) do not mind: --force.
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge'}"]
    munged += [f"--{name}-file={folder / f'munged.{name}'}" for name in ("pid", "seed")]
    (folder / "slurm.conf").write_text(configuration(folder, _free_ports(1 + len(NODES))))
    (folder / "gres.conf").write_text("".join(f"NodeName={name} Name=gpu File=/dev/null\n" for name in NODES))
    with ExitStack() as daemons:
        daemons.enter_context(_daemon("munged", munged, cluster))
        cluster.wait("munged's socket", (folder / "munge").exists, 20)
        daemons.enter_context(_daemon("slurmctld", ["slurmctld", "-D", "-i"], cluster))
        for name in NODES:
            daemons.enter_context(_daemon(name, ["slurmd", "-D", "-N", name], cluster))
        cluster.wait("three idle nodes", lambda: all(cluster.node(name) == "IDLE" for name in NODES), 60)
        yield cluster


def configuration(folder: Path, ports: list[int]) -> str:
    lines = [
        "ClusterName=loopback",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={folder / 'munge'}",
        f"StateSaveLocation={folder / 'spool'}",
        f"SlurmdSpoolDir={folder / 'spool' / '%n'}",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder / 'slurmd.%n.pid'}",
        # What a container has: no cgroups, no MPI, no database.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "SlurmdTimeout=8",
        "SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "GresTypes=gpu",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        *(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 Gres=gpu:1"
            for name, port in zip(NODES, ports[1:], strict=True)
        ),
        "PartitionName=low Nodes=ALL Default=YES PriorityTier=1 State=UP",
        "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP",
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def _daemon(name: str, command: list[str], cluster: Cluster) -> Iterator[None]:
    with (cluster.folder / f"{name}.log").open("w") as log:
        running = subprocess.Popen(
            command,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cluster.folder,
        )
        cluster.daemons[name] = running
        try:
            yield
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


@dataclass(frozen=True)
class Process:
    number: int
    parent: int
    environment: bytes


def _processes() -> list[Process]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            found.append(Process(int(path.name), parent, (path / "environ").read_bytes()))
    return found


def _name(number: int) -> str:
    try:
        return Path(f"/proc/{number}/comm").read_text()
    except OSError:
        return ""


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
