"""The study of scale: one recipe on several numbers of devices with several layouts, in rounds, the record written after every trial.

The first round measures every point once, profiles it and traces its losses; further rounds measure every point that ran again,
in turn, so that thermal or load changes affect all alike. At the end the first point is measured again (drift), and the
collectives of the layouts are timed over message sizes.

A device of a CPU study is a fixed number of cores, the same for every rank, so that two ranks have twice the FLOP/s of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rush.errors import RecipeError
from rush.files import timestamp
from rush.hardware.samples import Sample, bus_factor
from rush.lab.ladder.findings import drift_of
from rush.lab.paired import floors_of
from rush.lab.parity.trace import parity_recipe
from rush.lab.progress import Progress
from rush.lab.scaling.layouts import ONE, laid_out, sizes_of
from rush.lab.scaling.points import FORMULAS, ScalingPoint, comparisons_of, judged, point_of, predicted
from rush.lab.scaling.rank_runner import GROUP_OF_ONE, PEERLESS, SHARED, RankBench, open_rank_bench
from rush.lab.scaling.study_file import StudyPlan
from rush.lab.trial.found import TraceFound
from rush.lab.trial.timing import timed
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.lock import FolderLock
from rush.records.scaling import FILE, FORMAT, SCALINGS, LinkRecord, ScaleRecord, read_scale, write_scale
from rush.training.corpus import open_corpus

ScalingProgress = Progress[ScaleRecord]
Watch = Callable[[ScalingProgress], None]


def study(
    plan: StudyPlan,
    folder: Path,
    *,
    watch: Watch = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> ScaleRecord:
    """Measure a study into `folder`, or resume the one there. Returns its record."""
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        _check_same(plan, folder)
        open_corpus(plan.recipe, None, note)  # prepared before the clock runs
        with open_rank_bench(plan, folder) as bench:
            record = ScalingStudy(bench, watch).go()
        bench.clean()
    return record


def _check_same(plan: StudyPlan, folder: Path) -> None:
    """A folder holds one study; resuming it must mean the same recipe. Devices and layouts may be added."""
    if not (folder / FILE).exists():
        return
    there = read_scale(folder)
    base = str(there["base"].get("digest"))
    if (base, there["step_tokens"]) != (plan.recipe.digest, plan.step_tokens):
        raise RecipeError(
            f"{folder} holds another study ({there['name']}, recipe {base[:12]}, {there['step_tokens']:,} "
            "tokens a step); choose another --out."
        )


class ScalingStudy:
    """A study being measured."""

    def __init__(self, bench: RankBench, watch: Watch) -> None:
        self.bench, self.plan, self.watch = bench, bench.plan, watch
        self.file = bench.folder / FILE
        self.started = read_scale(self.file)["started"] if self.file.exists() else timestamp()
        self.finished: str | None = None
        self.points = list(self._points())
        self.traces: dict[tuple[str, int, bool], TraceFound] = {}
        self.again: list[Outcome] = []
        self.links: list[LinkRecord] = []
        self.done = 0

    def _points(self) -> Iterator[ScalingPoint]:
        """Every point, those of one device first."""
        for peers in (True, *((False,) if self.plan.without_peers else ())):
            for devices in self.plan.devices:
                alone = (ONE, "ddp") if self.plan.group_of_one else (ONE,)
                layouts = alone if devices == 1 else self.plan.layouts
                if devices > 1 or peers:
                    for layout in layouts:
                        yield from self._of(layout, devices, peers)

    def _of(self, layout: str, devices: int, peers: bool) -> Iterator[ScalingPoint]:
        """The points of a layout on a number of devices: one for both scalings where the step is the same."""
        scalings = [SCALINGS] if devices == self.plan.devices[-1] else [(scaling,) for scaling in SCALINGS]
        for kinds in scalings:
            shared = self.bench.shared(devices)
            recipe, refused, sizes = None, self._refusal(devices, peers), {}
            try:
                sizes = {} if layout == ONE else sizes_of(layout, devices)
                recipe = laid_out(self.plan.recipe, layout, devices, self.plan.tokens(kinds[0], devices))
            except RecipeError as error:
                refused = refused or str(error)
            environment = {
                **({} if peers else PEERLESS),
                **(SHARED if shared and self.bench.threads is None else {}),
                **(GROUP_OF_ONE if devices == 1 and layout != ONE else {}),
            }
            found = recipe if refused is None else None
            point = ScalingPoint(
                layout, devices, list(kinds), peers, shared, found, refused, sizes, environment
            )
            if found is not None and peers and not shared:
                point.predicted = predicted(found, self.bench.machine, self.bench.ceilings)
            yield point

    def _refusal(self, devices: int, peers: bool) -> str | None:
        machine = self.bench.machine
        if (
            self.plan.launcher
            and "{ranks}" not in self.plan.launcher
            and len(self.plan.devices) > 1
            and devices > 1
        ):
            return "the launcher has no {ranks} in it, so it starts the same number of ranks whatever is asked for."
        if not peers and machine.device == "cpu":
            return "ranks on CPUs communicate through gloo; there is no peer-to-peer to disable."
        if machine.device == "cuda" and self.bench.shared(devices) and not self.plan.share_device:
            return (
                f"{devices} devices were asked for, and this machine has {machine.num_devices} GPU(s). With --share-device ranks "
                "share them, for correctness only."
            )
        return None

    def go(self) -> ScaleRecord:
        for point in self.points:
            if point.recipe is not None:
                self._trial(point, 0)
        for number in range(1, self.plan.measure.processes):
            for point in self.points:
                if point.processes:
                    self._trial(point, number)
        if (first := self._first) is not None:
            self._report(f"{first.name} again")
            assert first.recipe is not None
            self.again = [self.bench.run(first.recipe, "again", first.environment)]
            self.done += 1
        if self.plan.links:
            self._links()
        self.finished = timestamp()
        return self._report(None)

    @property
    def _first(self) -> ScalingPoint | None:
        return next((point for point in self.points if point.processes), None)

    def _trial(self, point: ScalingPoint, number: int) -> None:
        assert point.recipe is not None
        kind = f"time-{number}"
        if self.bench.known(point.recipe, kind, point.environment) is None:
            self._report(point.name)
        key = point.layout, point.devices, point.peers
        wanted = None if number or key in self.traces else self._parity_recipe(point)
        outcome = self.bench.run(
            point.recipe,
            kind,
            point.environment,
            timed=not point.shared,
            profile=number == 0,
            parity=wanted if isinstance(wanted, Recipe) else None,
        )
        point.outcomes.append(outcome)
        if number == 0:
            if "trace" in outcome.found:
                self.traces[key] = outcome.found["trace"]
            if outcome.status == "ok":
                refused = wanted if isinstance(wanted, str) else None
                point.parity = judged(self.traces.get(key), self._one_rank(), refused or outcome.reason)
        self.done += 1
        self._report(point.name)

    def _parity_recipe(self, point: ScalingPoint) -> Recipe | str:
        """The steps a point is judged by: those of strong scaling; or why there are none."""
        assert point.recipe is not None
        base = laid_out(self.plan.recipe, ONE, 1, self.plan.step_tokens)
        try:
            return parity_recipe(point.recipe, base, self.plan.parity.steps, self.plan.parity.changes)
        except RecipeError as error:
            return str(error)

    def _one_rank(self) -> TraceFound | None:
        """What one rank learns in the same steps; traced by itself where one device is not part of the study."""
        key = ONE, 1, True
        if key not in self.traces and self.plan.devices[0] > 1:
            plain = laid_out(self.plan.recipe, ONE, 1, self.plan.step_tokens)
            wanted = parity_recipe(plain, plain, self.plan.parity.steps, self.plan.parity.changes)
            made = self.bench.run(plain, "reference", {}, timed=False, parity=wanted)
            if "trace" in made.found:
                self.traces[key] = made.found["trace"]
        return self.traces.get(key)

    def _links(self) -> None:
        for peers in (True, *((False,) if self.plan.without_peers else ())):
            for ranks in (count for count in self.plan.devices if count > 1):
                why = self._refusal(ranks, peers)
                if why is None and self.bench.shared(ranks):
                    why = "ranks that share a device wait for each other."
                if why is None:
                    self._report(f"collectives between {ranks} ranks")
                    outcome = self.bench.collectives(ranks, {} if peers else PEERLESS)
                    self.links += _links_of(outcome, ranks, peers)
                    self.done += 1
                else:
                    self.links.append(_no_link(ranks, peers, why))

    def _report(self, doing: str | None) -> ScaleRecord:
        """Write the record and report progress."""
        record = self.record()
        write_scale(self.file, record)
        able = [point for point in self.points if point.recipe is not None]
        once = sum(bool(point.outcomes) and not point.processes for point in able)
        total = (len(able) - once) * self.plan.measure.processes + once + 1
        total += sum(count > 1 for count in self.plan.devices) * self.plan.links
        seconds = self.bench.seconds
        left = sum(seconds) / len(seconds) * max(0, total - self.done) if seconds else None
        self.watch(ScalingProgress(record, doing, self.done, max(total, self.done), left))
        return record

    def record(self) -> ScaleRecord:
        """The record of everything measured so far."""
        tried = [point for point in self.points if point.outcomes or point.refused]
        again = [timed(o.found["timing"]) for o in self.again if "timing" in o.found]
        families = [point.timed + (again if point is self._first else []) for point in tried]
        floors = floors_of(families, self.plan.measure.noise_floor)
        drift = None
        if again and (first := self._first) is not None:
            drift = drift_of(first.timed, again, floors)
        counted = (str(t.get("counted", "processed")) for point in tried for t in point.timings)
        return {
            "format": FORMAT,
            "name": self.plan.name,
            "started": self.started,
            "finished": self.finished,
            "trials_s": sum(o.wall_s for o in [*self.again, *(o for p in tried for o in p.outcomes)]),
            "machine": self.bench.machine.to_dict(),
            "base": {"recipe": write_toml(self.plan.recipe), "digest": self.plan.recipe.digest},
            "devices": list(self.plan.devices),
            "layouts": list(self.plan.layouts),
            "step_tokens": self.plan.step_tokens,
            "tokens_per_device": self.plan.step_tokens / self.plan.devices[-1],
            "threads_per_rank": self.bench.threads,
            "counted": next(counted, "processed"),
            "formulas": FORMULAS,
            "points": [point_of(point, tried, floors) for point in tried],
            "comparisons": comparisons_of(tried, floors),
            "links": self.links,
            "drift": drift,
        }


def _links_of(outcome: Outcome, ranks: int, peers: bool) -> list[LinkRecord]:
    if "spectrum" not in outcome.found:
        return [_no_link(ranks, peers, outcome.reason or outcome.status.replace("_", " "))]
    return [
        {
            "operation": operation,
            "backend": outcome.found.get("backend") or "none",
            "ranks": ranks,
            "peer_to_peer": peers,
            "reason": None,
            "sizes": [
                {
                    "bytes": amount,
                    "seconds": list(seconds),
                    "bytes_per_s": (rate := Sample(case, amount, tuple(seconds)).rate),
                    "bus_bytes_per_s": rate * bus_factor(operation, ranks),
                }
                for case, amount, seconds in rows
            ],
        }
        for operation, rows in outcome.found["spectrum"].items()
    ]


def _no_link(ranks: int, peers: bool, why: str) -> LinkRecord:
    return {
        "operation": "none",
        "backend": "none",
        "ranks": ranks,
        "peer_to_peer": peers,
        "sizes": [],
        "reason": why,
    }
