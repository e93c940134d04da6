"""The bench for trials on several ranks: runs them one after another and stores their outcomes, as the ladder's bench does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.hardware import Machine
from rush.lab.scaling.study_file import StudyPlan
from rush.lab.trial.runner import TIMING, TrialFolder, canonical, file_digests
from rush.lab.trial.starter import Starter
from rush.lab.trial.trial import Outcome, execute
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.techniques.api.own_files import package_digests
from rush.version import __version__

PRELOADED = (
    "rush.lab.scaling.rank_trial",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
LINKS_S = 4.0
"""Seconds for the collectives of one number of ranks."""
PEERLESS = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""Without peer-to-peer and NVLink SHARP, NCCL goes through host memory."""
SHARED = {"RUSH_SHARE_DEVICE": "1"}
GROUP_OF_ONE = {"RUSH_GROUP_OF_ONE": "1"}


@dataclass
class RankBench(TrialFolder):
    plan: StudyPlan
    folder: Path
    starter: Starter
    machine: Machine
    ceilings: Mapping[str, Any] | None = None
    """Measured rates of a GPU."""
    seconds: list[float] = field(default_factory=list)

    @property
    def threads(self) -> int | None:
        """Cores per rank of a CPU study, the same for every number of ranks. None on GPUs."""
        if self.machine.device != "cpu" or self.plan.launcher:
            return None
        cores = self.machine.cpu.num_threads
        most = max((count for count in self.plan.devices if count <= cores), default=cores)
        return max(1, cores // most)

    def shared(self, devices: int) -> bool:
        """Whether this number of ranks would have to share devices; not known with a launcher."""
        if self.plan.launcher:
            return False
        room = self.machine.cpu.num_threads if self.machine.device == "cpu" else self.machine.num_devices
        return devices > room

    def known(self, recipe: Recipe, kind: str, environment: Mapping[str, str]) -> Outcome | None:
        return self.stored(self._path(recipe, kind, environment))

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
        """The outcome of a trial, run now or earlier."""
        path = self._path(recipe, kind, environment)
        if (known := self.stored(path)) is not None:
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
        return self.execute(spec, path, self.plan.measure.limit_s, recipe, environment)

    def collectives(self, ranks: int, environment: Mapping[str, str]) -> Outcome:
        """Time the collectives between this number of ranks over message sizes."""
        inputs = [ranks, self.machine.fingerprint(), dict(environment), self.plan.launcher, __version__]
        path = self.trial_path(inputs, "links")
        if (known := self.stored(path)) is not None:
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
        return self.execute(spec, path, self.plan.measure.limit_s, environment=environment)

    def _path(self, recipe: Recipe, kind: str, environment: Mapping[str, str]) -> Path:
        inputs = {
            "recipe": canonical(recipe.model_dump(mode="json")),
            "machine": self.machine.fingerprint(),
            "measure": self.plan.measure.model_dump(include={*TIMING, "limit_s"}),
            "parity": self.plan.parity.model_dump(),
            "step_tokens": self.plan.step_tokens,
            "threads": self.threads,
            "environment": dict(environment),
            "launcher": self.plan.launcher,
            "version": __version__,
            "extra": [*file_digests(self.plan.extra_techniques), *package_digests(recipe)],
        }
        return self.trial_path(inputs, kind)


@contextmanager
def open_rank_bench(plan: StudyPlan, folder: Path) -> Iterator[RankBench]:
    """Probe the machine in a separate process: the study never touches a device."""
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
