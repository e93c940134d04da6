"""Studies of scale: what layouts mean, what becomes a finding, and real ranks that fail, hang or learn something else."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rush.cli.scale import row_of
from rush.errors import RecipeError
from rush.hardware import probe
from rush.lab.paired import Floors
from rush.lab.scaling.layouts import ONE, laid_out, sizes_of
from rush.lab.scaling.points import ScalingPoint, comparisons_of, judged, point_of, predicted
from rush.lab.scaling.study import ScalingProgress, study
from rush.lab.scaling.study_file import StudyPlan, load_study
from rush.lab.statistics import Floor
from rush.lab.trial.trial import Outcome
from rush.plan import target_of
from rush.recipe_io import load_recipe
from rush.records.scaling import read_scale
from rush.techniques import add_axes, resolve_uses
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
FLOORS = Floors(Floor(0.0, 0, 0.01), Floor(0.0, 0, 0.01))
PLANTED = Path(__file__).parent / "planted" / "on_rank_one.py"
QUICK = (
    "measure.processes=1", "measure.windows=2", "measure.window_ms=1.0", "measure.warmup_max_steps=6", "measure.limit_s=90.0",
    "parity.steps=3", "batch.total_tokens=256",
)  # fmt: skip


def plan_of(
    recipe: Path, *overrides: str, devices: str = "1,2", layouts: str = "ddp", **options: Any
) -> StudyPlan:
    return load_study(str(recipe), [*QUICK, *overrides], devices, layouts, **options)


@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        ("ddp", 2, {"ddp": 2}),
        ("zero1", 3, {"fsdp": 3}),
        ("fsdp", 8, {"fsdp": 8}),
        ("hybrid", 8, {"ddp": 2, "fsdp": 4}),
        ("zero3xtp2", 8, {"fsdp": 4, "tp": 2}),
        ("tp2xpp2", 4, {"tp": 2, "pp": 2}),
        ("hybridxcp2", 8, {"ddp": 2, "fsdp": 2, "cp": 2}),
    ],
)
def test_a_layouts_name_determines_how_devices_are_divided(
    name: str, devices: int, sizes: dict[str, int]
) -> None:
    assert sizes_of(name, devices) == sizes
    assert math.prod(sizes.values()) == devices


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("zero4", 2, "Allowed: cp, ddp, fsdp"),
        ("dpp", 2, "did you mean"),
        ("ddpxtp", 4, "more than one factor has no size"),
        ("zero2xfsdp2", 4, "divides by fsdp twice"),
        ("hybridxddp2", 8, "divides by ddp twice"),
        ("zero3xtp2", 3, "takes a multiple of 2 devices; found 3"),
        ("tp2", 4, "takes 2 devices; found 4"),
        ("hybrid", 2, "even number of devices from 4; found 2"),
    ],
)
def test_what_devices_cannot_be_divided_into_is_refused(name: str, devices: int, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        sizes_of(name, devices)


def test_a_layout_keeps_the_knobs_of_its_techniques_and_one_device_has_none_of_them() -> None:
    recipe = load_recipe("tiny", ['techniques=[{name="fsdp", prefetch=2}, "fused_adamw"]'])
    two = laid_out(recipe, "zero2", 2, 2048)
    assert dict(two.technique_uses()) == {"fused_adamw": {}, "fsdp": {"prefetch": 2, "stage": "gradients"}}
    assert (two.layout.fsdp, two.world, two.step_tokens) == (2, 2, 2048)
    assert [name for name, _ in laid_out(recipe, ONE, 1, 2048).technique_uses()] == ["fused_adamw"]
    with pytest.raises(RecipeError, match="the nearest allowed: 2,048 or 4,096"):
        laid_out(recipe, "ddp", 2, 2500)


def test_the_recipes_step_is_that_of_the_most_devices() -> None:
    plan = load_study("tiny", ["batch.total_tokens=8192"], "4,1,2", "ddp")
    assert plan.devices == (1, 2, 4)
    assert [plan.tokens("strong", n) for n in plan.devices] == [8192, 8192, 8192]
    assert [plan.tokens("weak", n) for n in plan.devices] == [2048, 4096, 8192]
    with pytest.raises(RecipeError, match="multiple of 3"):
        load_study("tiny", [], "1,3", "ddp").tokens("weak", 1)
    for devices, said in (("0,2", "whole numbers"), ("two", "whole numbers")):
        with pytest.raises(RecipeError, match=said):
            load_study("tiny", [], devices, "ddp")
    with pytest.raises(RecipeError, match=r"layout\.tp is 2, but a study of scale sets the layout itself"):
        load_study("tiny", ["layout.tp=2"], "1,2", "ddp")
    with pytest.raises(RecipeError, match=r"measure\.windws is not a key"):
        load_study("tiny", ["measure.windws=2"], "1,2", "ddp")


def scaling_point(
    layout: str, devices: int, rate: float, *, parity: str = "equal", seen: bool = True, **rest: Any
) -> ScalingPoint:
    """A point as made-up trials leave it: two processes around a rate."""
    outcomes = [
        Outcome(
            "ok",
            None,
            {
                "timing": {
                    "samples_s": [2048 / (rate * off * within) for within in (0.99, 1.0, 1.01)],
                    "sample_tokens": {"processed": [2048.0] * 3},
                    "counted": "processed",
                    "compile_s": 1.0,
                    "warmup_s": 1.0,
                    "environment": {},
                },
                "ranks": [
                    {
                        "peak_memory_bytes": 100 + rank,
                        "exposed_ms": 1.0 + rank,
                        "exchange_ms": 4.0,
                        "profiled_step_ms": 10.0,
                        "evidence": [{"technique": layout, "took_effect": seen or rank == 0, "what": "seen"}],
                    }
                    for rank in range(devices)
                ],
            },
        )
        for off in (0.995, 1.005)
    ]
    sizes = {layout: devices} if devices > 1 else {}
    recipe = load_recipe("tiny")
    found = ScalingPoint(
        layout,
        devices,
        ["strong"],
        True,
        False,
        recipe,
        None,
        sizes,
        {},
        outcomes,
        {"verdict": parity, "why": "x"},
    )
    return replace(found, **rest)


def test_an_efficiency_is_tokens_per_device_over_those_of_one_device() -> None:
    points = [
        scaling_point(ONE, 1, 1000.0),
        scaling_point("ddp", 4, 3000.0),
        scaling_point("tp", 2, 1000.0, parity="different"),
    ]
    points += [
        scaling_point("cp", 2, 1000.0, parity="not judged"),
        scaling_point("pp", 2, 1900.0, seen=False),
    ]
    points += [scaling_point("zero2", 2, 1800.0, shared=True)]
    one, ddp, tp, cp, pp, shared = (point_of(s, points, FLOORS) for s in points)
    assert (one["verdict"], one["efficiency"], one["exposed"]) == ("baseline", {}, None)
    found = ddp["efficiency"]["strong"]
    assert found["ratio"] == pytest.approx(0.75, rel=1e-3)
    assert 0.7 < found["ci95"][0] < 0.745
    assert 0.755 < found["ci95"][1] < 0.8
    assert found["over"] == ONE
    exposed = ddp["exposed"]
    assert exposed is not None
    assert exposed["share"] == pytest.approx(0.4), "of the rank that waits longest"
    assert exposed["ranks"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert ddp["memory_bytes"] == [100, 101, 102, 103]
    for point, verdict in (
        (tp, "different"),
        (cp, "not judged"),
        (pp, "no effect"),
        (shared, "shared device"),
    ):
        assert point["verdict"] == verdict
        assert point["efficiency"] == {}, "what is no finding has no efficiency"
        assert "%" not in "".join(row_of(point)[3:5])
    assert "rank 1" in str(pp["reason"])
    assert (shared["tokens_per_s"], shared["exposed"]) == (None, None)
    assert row_of(shared)[2] == ""


def test_where_one_device_is_too_small_the_layouts_own_smallest_number_is_what_counts() -> None:
    points = [
        scaling_point("zero3", 4, 4000.0),
        scaling_point("zero3", 8, 6000.0),
        scaling_point("ddp", 8, 7000.0),
    ]
    four, eight, ddp = (point_of(s, points, FLOORS) for s in points)
    assert eight["efficiency"]["strong"]["ratio"] == pytest.approx(0.75, rel=1e-3)
    assert eight["efficiency"]["strong"]["over"] == "zero3 on 4"
    assert four["efficiency"] == ddp["efficiency"] == {}, "there is nothing below it"


def test_zero2_stands_beside_zero3_and_peer_to_peer_beside_none() -> None:
    points = [
        scaling_point("zero2", 2, 1000.0),
        scaling_point("zero3", 2, 900.0),
        scaling_point("zero3", 2, 450.0, peers=False),
    ]
    points.append(scaling_point("zero2", 2, 800.0, peers=False, parity="different"))
    stages, peers = comparisons_of(points, FLOORS)
    assert (stages["first"], stages["second"]) == ("zero2 on 2", "zero3 on 2")
    assert stages["speed"] is not None
    assert stages["speed"]["ratio"] == pytest.approx(0.9, rel=1e-3)
    assert stages["real"]
    assert stages["memory"] == 1.0
    assert peers["second"] == "zero3 on 2, no peer-to-peer"
    assert peers["speed"] is not None
    assert peers["speed"]["ratio"] == pytest.approx(0.5, rel=1e-3)


def test_the_planner_predicts_for_gpus_and_keeps_quiet_about_a_cpu() -> None:
    machine = target_of("h100-sxm", 8).machine()
    rates = {"matmul": {"float32": 5e13, "bfloat16": 7e14}, "copy_bytes_per_s": 3e12}
    recipe = load_recipe("tiny")
    one = predicted(laid_out(recipe, ONE, 1, 8192), machine, rates)
    four = predicted(laid_out(recipe, "ddp", 4, 8192), machine, rates)
    assert one is not None
    assert four is not None
    assert one < four < 4 * one, "faster than one, and no faster than four"
    assert predicted(laid_out(recipe, ONE, 1, 8192), machine, None) is None
    assert predicted(laid_out(recipe, ONE, 1, 8192), probe("cpu"), rates) is None


def test_ranks_that_are_off_by_more_than_rounding_are_different() -> None:
    one = {"losses": [2.0, 1.0], "grad_norms": [1.0, 1.0], "dtype": "float32"}
    near = judged({**one, "losses": [2.0, 1.000005]}, one, None)
    assert (near["verdict"], near["worst"]) == ("equal", pytest.approx(5e-6))
    far = judged({**one, "losses": [2.0, 1.00002]}, one, None)
    assert far["verdict"] == "different"
    assert "the loss of step 2 is off by 2.0e-05, beyond" in far["why"]
    assert judged({**one, "grad_norms": [1.0, None]}, one, None)["verdict"] == "different"
    bf16 = judged({**one, "losses": [2.0, 1.002], "dtype": "bfloat16"}, one, None)
    assert bf16["verdict"] == "equal"
    assert judged(None, one, "after the timing: it died")["why"] == "after the timing: it died"
    assert judged(one, None, None)["verdict"] == "not judged"


@pytest.mark.slow
def test_a_study_of_real_ranks_is_recorded_and_repeats_nothing(small_recipe: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "out", list[ScalingProgress]()
    plan = plan_of(small_recipe, layouts="zero2,hybrid,zero3xtp4")
    record = study(plan, out, watch=told.append)
    assert read_scale(out) == record
    points = {(p["layout"], p["step_tokens"]): p for p in record["points"]}
    strong, weak, zero2 = points[ONE, 256], points[ONE, 128], points["zero2", 256]
    for point in (strong, weak, zero2):
        assert point["status"] == "ok", point["reason"]
        assert point["parity"] is not None
        assert point["parity"]["verdict"] == "equal", point["parity"]["why"]
    assert [p["scalings"] for p in (strong, weak, zero2)] == [["strong"], ["weak"], ["strong", "weak"]]
    assert zero2["verdict"] == "equal"
    assert set(zero2["efficiency"]) == {"strong", "weak"}
    assert all(low > 0 for e in zero2["efficiency"].values() for low in e["ci95"])
    assert zero2["memory_bytes"] is not None
    assert len(zero2["memory_bytes"]) == 2
    assert zero2["exposed"] is not None
    assert 0 < zero2["exposed"]["share"] < 1
    assert len(zero2["exposed"]["ranks"]) == 2
    assert any(e["technique"] == "fsdp" and "reduce-scatters" in e["what"] for e in zero2["evidence"])
    refused = {p["layout"]: p for p in record["points"] if p["verdict"] == "unsupported"}
    assert "from 4; found 2" in str(refused["hybrid"]["reason"])
    assert "takes a multiple of 4 devices" in str(refused["zero3xtp4"]["reason"])
    by_name = {link["operation"]: link for link in record["links"]}
    assert set(by_name) == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    for operation, factor in (
        ("all_reduce", 1.0),
        ("all_gather", 0.5),
        ("reduce_scatter", 0.5),
        ("send", 1.0),
    ):
        sizes = by_name[operation]["sizes"]
        assert len(sizes) >= 4
        assert [s["bus_bytes_per_s"] for s in sizes] == pytest.approx(
            [factor * s["bytes_per_s"] for s in sizes]
        )
    assert record["drift"] is not None
    assert record["finished"] is not None
    assert told[-1].doing is None
    assert told[-1].done == told[-1].total
    before = {file: file.stat().st_mtime_ns for file in (out / "trials").iterdir()}
    again = study(plan, out)
    assert {file: file.stat().st_mtime_ns for file in (out / "trials").iterdir()} == before
    assert [p["tokens_per_s"] for p in again["points"]] == [p["tokens_per_s"] for p in record["points"]]
    with pytest.raises(RecipeError, match="holds another study"):
        study(plan_of(small_recipe, "optimizer.lr=0.5"), out)


def test_a_group_of_one_that_cannot_be_measured_is_refused(small_recipe: Path) -> None:
    with pytest.raises(RecipeError, match="--devices is 2; add 1 to it"):
        plan_of(small_recipe, devices="2", group_of_one=True)
    recorded = resolve_uses(load_recipe("tiny", ["techniques=['cuda_graph']"]))
    with pytest.raises(RecipeError, match="ddp and cuda_graph cannot be combined: a captured graph"):
        add_axes(recorded, ["ddp"])


@pytest.mark.slow
def test_a_rank_that_is_its_own_group_is_listed_beside_one_without_a_group(
    small_recipe: Path, tmp_path: Path
) -> None:
    plan = plan_of(small_recipe, devices="1", layouts="zero2", group_of_one=True, links=False)
    record = study(plan, tmp_path / "out")
    plain, ours = record["points"]
    assert (plain["layout"], plain["verdict"], plain["backend"]) == (ONE, "baseline", None)
    assert (ours["layout"], ours["devices"], ours["backend"]) == ("ddp", 1, "gloo")
    assert ours["verdict"] == "equal", ours["reason"] or ours["parity"]
    assert [e["technique"] for e in ours["evidence"] if e["took_effect"]] == ["ddp"]
    assert set(ours["efficiency"]) == {"strong", "weak"}
    assert ours["efficiency"]["strong"]["over"] == ONE
    assert ours["parity"] is not None
    assert ours["parity"]["worst"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "verdict", "said"),
    [
        ("killed", "out of memory", "rank 1 was killed from outside"),
        ("memory", "out of memory", "memory ran out (planted)"),
        ("raises", "crashed", "rank 1: ValueError: planted on rank 1"),
        ("hangs", "timed out", "was not done after 60 s"),
        ("unequal", "different", "beyond"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_a_result_and_leaves_nobody(
    kind: str, verdict: str, said: str, small_recipe: Path, tmp_path: Path
) -> None:
    planted = f'techniques=[{{name="on_rank_one", kind="{kind}"}}]'
    plan = plan_of(
        small_recipe,
        planted,
        f"measure.limit_s={60.0 if kind == 'hangs' else 120.0}",
        links=False,
        extra_techniques=(str(PLANTED),),
    )
    record = study(plan, tmp_path / "out")
    # The starter stays for the next study, whichever test came first; what it started does not.
    # (A browser that other tests look at pages with is none of it.)
    kept = [child for child in psutil.Process().children() if "tests.forks" not in child.cmdline()]
    for one in [*kept, *map(psutil.Process, forks.serving())]:
        assert "chrom" in one.name() or not one.children(recursive=True), one.cmdline()
    one, _, two = record["points"]
    assert one["verdict"] == "baseline", one["reason"]
    assert two["verdict"] == verdict, two["reason"]
    assert said in str(two["reason"] or (two["parity"] or {}).get("why"))
    assert two["efficiency"] == {}


@pytest.mark.slow
def test_a_clusters_launcher_starts_the_ranks(small_recipe: Path, tmp_path: Path) -> None:
    launcher = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={{ranks}} --no-python"
    )
    plan = plan_of(small_recipe, layouts="ddp", links=False, launcher=launcher)
    record = study(plan, tmp_path / "out")
    two = record["points"][-1]
    assert two["verdict"] == "equal", two["reason"]
    assert two["memory_bytes"] is not None
    assert len(two["memory_bytes"]) == 2
    broken = study(replace(plan, launcher="false {ranks}"), tmp_path / "broken")
    assert broken["points"][-1]["verdict"] == "unsupported"
    assert "the launcher ended with 1" in str(broken["points"][-1]["reason"])


@pytest.mark.slow
def test_more_ranks_than_cores_are_for_correctness_only(small_recipe: Path, tmp_path: Path) -> None:
    count = 2 * (os.cpu_count() or 1)
    total = f"batch.total_tokens={64 * count}"
    plan = plan_of(small_recipe, total, devices=f"1,{count}", layouts="ddp", without_peers=True)
    record = study(plan, tmp_path / "out")
    many = [p for p in record["points"] if p["devices"] == count]
    assert [p["verdict"] for p in many] == ["shared device", "unsupported"]
    assert many[0]["shared"]
    assert many[0]["tokens_per_s"] is None
    assert "no peer-to-peer to disable" in str(many[1]["reason"])
    assert all(
        "share a device" in str(link["reason"]) or "no peer" in str(link["reason"])
        for link in record["links"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_study_that_is_killed_leaves_no_process_and_resumes(
    number: signal.Signals, small_recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [
        str(small_recipe),
        *QUICK,
        "--devices",
        "1,2",
        "--layouts",
        "ddp,zero3",
        "--no-links",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "rush", "scale", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _until(lambda: any(out.glob("trials/*.json")), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    _until(lambda: not any(member.is_running() and member.status() != "zombie" for member in family), None)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "no process is left" in said
    before = {file.name: file.read_bytes() for file in out.glob("trials/*.json")}
    done = subprocess.run(
        [sys.executable, "-m", "rush", "scale", *words, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["finished"] is not None
    assert [p["verdict"] for p in record["points"]] == ["baseline", "baseline", "equal", "equal"]
    after = {file.name: file.read_bytes() for file in out.glob("trials/*.json")}
    assert {name: after[name] for name in before} == before
    assert (out / "report.html").stat().st_size > 10_000


def _until(happened: Callable[[], bool], process: subprocess.Popen[str] | None, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert process is None or process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
