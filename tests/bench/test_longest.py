"""The longest sequence: few trials, a line that is believed only as far as a run shows it, and a record of what was tried."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest

from rush.bench import longest, workloads
from rush.bench.baselines import bench_models
from rush.bench.longest import GRAIN, ROOM, LongestSequence
from rush.hardware import probe
from rush.lab.trial.runner import Bench
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.records.life import LifeRecord
from rush.records.models import check_models, read_models
from rush.report.models import longest_words

FIXED, EACH, LIMIT = 6_000_000_000, 500_000, 80_000_000_000


@dataclasses.dataclass
class MadeUp:
    """A bench whose trials take memory by a straight line, and fail above what the allocator can use of the limit."""

    usable: float
    machine: Any = None
    plan: Any = None
    lengths: list[int] = dataclasses.field(default_factory=list)

    def run(self, recipe: Recipe, kind: str, *, first: bool) -> Outcome:
        size, cold = recipe.batch.sequence, self.plan.measure.windows == 0
        assert first == (not self.lengths), "only the shortest is watched"
        self.lengths.append(size)
        peak = FIXED + EACH * size
        if peak > self.usable * LIMIT:
            return Outcome("out_of_memory", "memory ran out.", {}, 9.0)
        timing = {"counted": "processed", "samples_s": [size / 1000], "peak_memory_bytes": peak,
                  "sample_tokens": {"processed": [size]}, "cold": cold}  # fmt: skip
        evidence = [{"technique": "compile", "took_effect": True, "what": "graphs"}] if first else []
        found = {"timing": timing, "seconds": {"build": 3.0}, "evidence": evidence}
        return Outcome("ok", None, found, 9.0)

    def life(self, recipe: Recipe) -> LifeRecord:
        assert [recipe.batch.sequence] == self.lengths, "the shortest lives"
        return {"verdict": "ok", "problem": None, "parts": [{"name": "train", "seconds": 2.0}]}


def searched(usable: float, monkeypatch: pytest.MonkeyPatch) -> tuple[LongestSequence, MadeUp]:
    (workload,) = workloads.load_workloads(["qlora-8b-long"])
    bench = MadeUp(usable, machine=probe("cpu"))
    judged = {"verdict": "equal", "why": "made up"}
    monkeypatch.setattr(longest, "parity_with_plain", lambda *asked: (judged, None))
    search = LongestSequence(workload, cast(Bench, bench))
    assert search.limit_bytes == LIMIT
    for _ in search.rounds():
        search.go()
    return search, bench


def test_two_short_trials_and_one_where_the_line_meets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    search, bench = searched(1.0, monkeypatch)
    found = search.record()["longest"]
    meets = (ROOM * LIMIT - FIXED) / EACH
    assert bench.lengths == [16384, 32768, int(meets) // GRAIN * GRAIN]
    assert found["found"] is not None
    assert found["found"]["sequence"] == bench.lengths[-1] > 140_000
    assert found["found"]["tokens_per_s"] == pytest.approx(1000)
    assert found["fails_at"] is None
    assert (found["published"], found["limit_bytes"]) == (342733, LIMIT)
    assert [point["cold"] for point in found["tried"]] == [False, False, True]
    assert found["parity"] == {"verdict": "equal", "why": "made up"}
    assert [each["technique"] for each in found["evidence"]] == ["compile"]
    assert longest_words(found) == (
        f"{bench.lengths[-1]:,} tokens ran in 80 GB with at least 1,000 tokens/s; the next was not tried; parity equal; "
        "short life ok"
    )


def test_what_does_not_fit_is_tried_shorter_and_both_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    search, bench = searched(0.9, monkeypatch)
    record = search.record()
    tried = record["longest"]["tried"]
    assert [point["status"] for point in tried] == ["ok", "ok", "ok", "out_of_memory", "out_of_memory"]
    assert record["longest"]["found"] == tried[2]
    assert record["longest"]["fails_at"] == tried[3]["sequence"]
    assert [took["who"] for took in record["took"]] == [
        *(f"{size:,} tokens" for size in bench.lengths),
        "a short life",
    ]


def test_nothing_longer_is_tried_where_a_probe_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    search, bench = searched(0.2, monkeypatch)
    assert bench.lengths == [16384, 32768]
    assert search.record()["longest"]["found"]["sequence"] == 16384  # type: ignore[index]


def test_a_longer_row_stretches_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = searched(1.0, monkeypatch)
    long, short = search.recipe(200_000), search.recipe(20_000)
    assert (long.batch.sequence, long.shape().context, long.step_tokens) == (200_000, 200_000, 200_000)
    assert short.shape().context == 131_072
    assert long.run.memory_limit_gb == 80


@pytest.mark.slow
def test_it_runs_by_the_real_bench_and_its_record_reads_back(small_recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(
        f"""[measure]
        limit_s = 60.0
        [workloads.long]
        about = "how long a row may be"
        batch = {{ "batch.micro" = 1, "batch.total_tokens" = "none" }}
        longest = {{ probes = [32, 64], published = 1000, source = "nobody", up_to = 300 }}
        ours = [{{ recipe = {json.dumps(str(small_recipe))} }}]
        """
    )
    record = bench_models(workloads.load_workloads([], [], file), tmp_path / "out")
    (found,) = record["workloads"]
    tried = found["longest"]["tried"]
    assert [point["status"] for point in tried] == ["ok"] * 3, tried
    assert [point["sequence"] for point in tried] == [32, 64, 300]
    assert all(point["tokens_per_s"] and point["peak_memory_bytes"] for point in tried)
    assert [point["cold"] for point in tried] == [False, False, True]
    parity = found["longest"]["parity"]
    assert parity is not None
    assert parity["verdict"] == "equal", parity
    assert record == read_models(tmp_path / "out")
    tried[0]["status"] = "fine"
    with pytest.raises(Exception, match=r"tried\[0\].*status is 'fine'"):
        check_models(record, "here")
