"""The bench for trials on several ranks: runs them one after another and keeps what they came to.

As the ladder's bench does: a finished trial is a file, named after everything its outcome depends on, so a study that was
interrupted goes on and repeats nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.files import write_json_atomic
from rush.hardware import Machine
from rush.lab.scaling.study_file import StudyPlan
from rush.lab.trial.runner import TIMING
from rush.lab.trial.starter import Starter
from rush.lab.trial.trial import Outcome, execute
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.version import __version__

PRELOADED = (
    "rush.lab.scaling.rank_trial",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
LINKS_S = 4.0
"""Seconds for the exchanges between one number of ranks."""
PEERLESS = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""Without direct access between GPUs, and without the switch's own sums, NCCL goes through the host's memory."""
SHARED = {"RUSH_SHARE_DEVICE": "1"}
GROUP_OF_ONE = {"RUSH_GROUP_OF_ONE": "1"}


@dataclass
class RankBench:
    plan: StudyPlan
    folder: Path
    starter: Starter
    machine: Machine
    ceilings: Mapping[str, Any] | None = None
    """Measured rates of a GPU."""
    seconds: list[float] = field(default_factory=list)
    """How long the trials made by this bench took."""

    @property
    def threads(self) -> int | None:
        """A device of a CPU study: the same number of cores for every rank, whatever the number of ranks. None on GPUs."""
        if self.machine.device != "cpu" or self.plan.launcher:
            return None
        cores = self.machine.cpu.num_threads
        most = max((count for count in self.plan.devices if count <= cores), default=cores)
        return max(1, cores // most)

    def shared(self, devices: int) -> bool:
        """Whether so many ranks would have to share devices. Of a cluster's devices only its launcher knows."""
        if self.plan.launcher:
            return False
        room = self.machine.cpu.num_threads if self.machine.device == "cpu" else self.machine.num_devices
        return devices > room

    def known(self, recipe: Recipe, kind: str, environment: Mapping[str, str]) -> Outcome | None:
        return _stored(self._path(recipe, kind, environment))

    def run(
        self,
        recipe: Recipe,
        kind: str,
        environment: Mapping[str, str],
        *,
        timed: bool = True,
        profile: bool = False,
        parity: Recipe | None = None,
    ) -> Outcome:
        """The outcome of a trial, made now or earlier."""
        path = self._path(recipe, kind, environment)
        if (known := _stored(path)) is not None:
            return known
        spec = {
            "kind": "rush.lab.scaling.rank_trial:lead",
            "recipe": write_toml(recipe),
            "world": recipe.world,
            "machine": self.machine.to_dict(),
            "threads": self.threads,
            "timing": self.plan.measure.model_dump(include=set(TIMING)) if timed else None,
            "profile": profile,
            "parity": write_toml(parity) if parity is not None else None,
            "extra_techniques": list(self.plan.extra_techniques),
            "launcher": self.plan.launcher,
        }
        return self._execute(spec, path, f"compiled-{recipe.digest[:16]}", environment)

    def exchange(self, ranks: int, environment: Mapping[str, str]) -> Outcome:
        """How fast so many ranks exchange messages of every size."""
        told = [ranks, self.machine.fingerprint(), dict(environment), self.plan.launcher, __version__]
        path = self.folder / "trials" / f"{_digest(told)}-links.json"
        if (known := _stored(path)) is not None:
            return known
        spec = {
            "kind": "rush.lab.scaling.rank_trial:lead",
            "recipe": None,
            "world": ranks,
            "machine": self.machine.to_dict(),
            "threads": self.threads,
            "budget_s": LINKS_S,
            "launcher": self.plan.launcher,
        }
        return self._execute(spec, path, None, environment)

    def _execute(
        self, spec: Mapping[str, Any], path: Path, compiled: str | None, environment: Mapping[str, str]
    ) -> Outcome:
        work = self.folder / "work"
        outcome = execute(
            self.starter,
            spec,
            work / path.stem,
            self.plan.measure.limit_s,
            (work / compiled).resolve() if compiled else None,
            environment,
        )
        self.seconds.append(outcome.wall_s)
        path.parent.mkdir(exist_ok=True)
        write_json_atomic(path, outcome.to_dict())
        return outcome

    def clean(self) -> None:
        """Remove what only unfinished trials and compilers need."""
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def _path(self, recipe: Recipe, kind: str, environment: Mapping[str, str]) -> Path:
        told: dict[str, Any] = {
            "recipe": recipe.model_dump(mode="json"),
            "machine": self.machine.fingerprint(),
            "measure": self.plan.measure.model_dump(include={*TIMING, "limit_s"}),
            "parity": self.plan.parity.model_dump(),
            "step_tokens": self.plan.step_tokens,
            "threads": self.threads,
            "environment": dict(environment),
            "launcher": self.plan.launcher,
            "version": __version__,
            "extra": [hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in self.plan.extra_techniques],
        }
        # The order in which techniques are named means nothing.
        told["recipe"]["techniques"] = sorted(map(json.dumps, told["recipe"]["techniques"]))
        return self.folder / "trials" / f"{_digest(told)}-{kind}.json"


def _stored(path: Path) -> Outcome | None:
    return Outcome.from_dict(json.loads(path.read_text())) if path.exists() else None


def _digest(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def open_rank_bench(plan: StudyPlan, folder: Path) -> Iterator[RankBench]:
    """Learn what the machine is in a process of its own: the study never touches a device."""
    starter = Starter(PRELOADED)
    try:
        spec = {"kind": "look", "device": plan.recipe.run.device}
        outcome = execute(starter, spec, folder / "work" / "look", plan.measure.limit_s)
        if outcome.status != "ok":
            raise MachineError(f"the machine could not be probed: {outcome.reason}")
        machine = Machine.from_dict(outcome.found["machine"])
        if machine.device == "mps":
            raise MachineError("An Apple GPU cannot train together with others; set run.device=cpu.")
        yield RankBench(plan, folder, starter, machine, outcome.found.get("ceilings"))
    finally:
        starter.close()
