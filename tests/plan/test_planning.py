"""Plans, searches and the command: refusals, the questions the issue asks, what machines read."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rush.cli import app
from rush.cli.plan import count
from rush.errors import MachineError, RecipeError
from rush.hardware import Machine
from rush.hardware.catalog import CATALOG
from rush.hardware.ceilings import Ceilings
from rush.hardware.links import LINKS, SERVERS
from rush.hardware.samples import Sample
from rush.models import SIZES, flops_per_token
from rush.parallel import AXES
from rush.plan import TargetMachine, plan, search, spec_of, target_here, target_of
from rush.plan.check import overflows
from rush.plan.describe import describe
from rush.plan.layout_search import HOST_DOUBT
from rush.plan.memory import GAP, memory_of
from rush.plan.planning import fill_devices, unmet
from rush.plan.spec import check_divides, with_batch
from rush.plan.target import MEASURED
from rush.recipe_io import changed, load_recipe
from rush.report.plan import plan_page

FAST = 'techniques=["amp_bf16", "flash_attention", "fused_adamw", {name = "compile", scope = "block"}]'
EIGHT = (FAST, "batch.sequence=4096", "batch.total_tokens=1048576")


def test_every_accelerator_has_a_server_and_known_links() -> None:
    assert set(SERVERS) == {*CATALOG, "cpu"}
    for key, server in SERVERS.items():
        assert server.link in LINKS
        assert server.network in LINKS
        assert target_of(key).rate("float32") > 0
    assert LINKS["nvlink3"].bytes_per_s / LINKS["nvlink3-a800"].bytes_per_s == pytest.approx(600 / 400)


@pytest.mark.parametrize(("axis", "size"), [("tp", 3), ("tp", 16), ("cp", 3), ("pp", 64)])
def test_a_layout_that_does_not_divide_is_refused(axis: str, size: int) -> None:
    spec = spec_of(load_recipe("llama-3.1-8b", ["batch.sequence=4096"]))
    with pytest.raises(RecipeError, match=rf"layout\.{axis} is {size}.*allowed"):
        check_divides(replace(spec, layout={**spec.layout, axis: size}))
    with pytest.raises(RecipeError, match="does not divide"):
        fill_devices({"fsdp": 4}, 6)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    target = target_of("h200-sxm")
    found = plan(spec_of(load_recipe("llama-3.2-1b-fast")), target)
    assert found.fits
    assert memory_of(with_batch(found.spec, found.largest_micro)).total <= target.memory_bytes
    assert memory_of(with_batch(found.spec, found.largest_micro + 1)).total > target.memory_bytes
    assert found.longest_sequence >= found.spec.sequence


def test_a_recipe_that_ran_out_of_memory_is_not_predicted_to_fit() -> None:
    # From the climbs under results/: batch 32 in fp32 with all scores cannot fit 140 GiB.
    found = plan(
        spec_of(load_recipe("llama-3.2-1b", ["techniques=[]", "batch.micro=32", "batch.total_tokens=65536"])),
        target_of("h200-sxm"),
    )
    assert not found.fits


def test_no_recipe_under_results_that_ran_out_of_memory_is_predicted_to_fit() -> None:
    found = overflows(Path("results"))
    assert {one.study for one in found} >= {"models-qlora-long-h200", "llama-3.2-1b-h200-first-climb"}
    assert [one.name for one in found if one.said_to_fit] == []
    # The one by the device, the other by the host alone.
    assert {one.study: one.beyond_host for one in found} == {
        "models-qlora-long-h200": False,
        "llama-3.2-1b-h200-first-climb": True,
    }


def test_a_plan_respects_memory_limit_gb() -> None:
    asked = ["plan", "qlora", "--machine", "h200-sxm", "--json"]
    free, held = (
        json.loads(CliRunner().invoke(app, [*asked, *more]).stdout)
        for more in ([], ["run.memory_limit_gb=6"])
    )
    assert (free["fits"], held["fits"]) == (True, False)
    assert held["machine"]["memory_bytes"] == 6_000_000_000
    assert "limited to 6 GB (run.memory_limit_gb)" in " ".join(held["machine"]["sources"])
    assert held["longest_sequence"] < free["longest_sequence"]
    refused = CliRunner().invoke(app, [*asked, "run.memory_limit_gb=200"])
    assert isinstance(refused.exception, RecipeError)
    assert "more than the 150 GB of h200-sxm" in str(refused.exception)


def test_fragmentation_is_at_least_a_wide_tensor_without_expandable_segments() -> None:
    recipe = load_recipe("qlora", ["batch.micro=1", "batch.sequence=131072", "batch.total_tokens=131072"])
    fixed = memory_of(spec_of(recipe))
    grown = memory_of(spec_of(changed(recipe, {"techniques": [*recipe.techniques, "expandable_segments"]})))
    assert fixed.tensors == grown.tensors
    assert fixed.parts["unfilled"] == pytest.approx(GAP * 131072 * 14336 * 2)
    assert grown.parts["unfilled"] == pytest.approx(fixed.parts["unfilled"] / 10)


def test_offloaded_block_inputs_count_as_host_memory() -> None:
    host = "{name = 'checkpoint_full', inputs = 'host'}"
    device, away = (
        spec_of(load_recipe("llama-3.1-8b", [f"techniques=['pure_bf16', {one}]", "batch.micro=1"]))
        for one in ("'checkpoint_full'", host)
    )
    moved = 32 * away.tokens * 4096 * 2
    assert memory_of(device).host_bytes == 0
    assert memory_of(away).host_bytes == moved
    assert memory_of(device).tensors > memory_of(away).tensors
    here = replace(target_of("h200-sxm"), host_bytes=moved - 1.0)
    assert not plan(away, here).fits
    assert plan(away, replace(here, host_bytes=moved)).fits


@pytest.mark.slow
def test_an_8b_model_is_predicted_to_fit_eight_a100_and_not_one() -> None:
    recipe = load_recipe("llama-3.1-8b", [*EIGHT])
    with pytest.raises(RecipeError, match="does not fit"):
        search(recipe, target_of("a100-40-sxm", 1))
    # 16 bytes a parameter are too many for 80 GB; 8 are not.
    assert {one.spec.uses("pure_bf16") for one in search(recipe, target_of("a100-80-sxm", 1)).best} == {True}
    found = search(recipe, target_of("a100-80-sxm", 8))
    assert found.best[0].fits
    assert found.lost
    assert len({describe(one.spec) for one in found.best}) == len(found.best)


@pytest.mark.parametrize(
    ("name", "overrides", "machine", "devices"),
    [
        ("llama-3.2-1b", (), "t4", 4),
        pytest.param(
            "llama-3.1-8b",
            ('techniques=["pure_bf16", "flash_attention", "fused_adamw", "compile"]',),
            "a100-80-sxm",
            8,
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2-124m", (), "h100-sxm", 8, marks=pytest.mark.slow),
    ],
)
def test_what_a_search_finds_can_run_there(
    name: str, overrides: tuple[str, ...], machine: str, devices: int
) -> None:
    recipe, target = load_recipe(name, [*overrides]), target_of(machine, devices)
    for one in search(recipe, target, best=6).best:
        techniques = [{"name": each, **knobs} for each, knobs in one.spec.techniques.items()]
        layout = {f"layout.{axis}": size for axis, size in one.spec.layout.items()}
        batch = {"batch.micro": 1, "batch.total_tokens": one.spec.step_tokens}
        # Axes that divide nothing are no techniques of a recipe.
        named = [each for each in techniques if each["name"] not in AXES or one.spec.size(each["name"]) > 1]
        assert unmet(changed(recipe, {"techniques": named, **layout, **batch}), target) == (), describe(
            one.spec
        )


@pytest.mark.slow
def test_a_search_over_precisions_takes_fp16_without_bf16_tensor_cores() -> None:
    old = search(load_recipe("llama-3.2-1b"), target_of("v100-32-sxm", 8))
    assert {one.spec.uses("amp_fp16") for one in old.best} == {True}
    new = search(load_recipe("llama-3.1-8b", [*EIGHT]), target_of("h100-sxm", 8))
    said = "\n".join(new.lost)
    assert all(f"{name}" in said for name in ("amp_bf16: ", "bf16_master with fp8: ", "amp_fp16: "))
    assert new.best[0].spec.uses("fp8")


def test_an_axis_that_is_not_tried_has_its_reason() -> None:
    found = search(load_recipe("gpt2-124m-fast"), target_of("a100-80-sxm", 8))
    barred = [line for line in found.lost if "not tried" in line]
    assert any(line.startswith("tp: not tried, ") and "cannot be combined" in line for line in barred), (
        found.lost
    )


def test_cpu_offload_is_compared_with_other_layouts() -> None:
    recipe = load_recipe("llama-3.1-8b", [FAST, "batch.sequence=4096", "batch.total_tokens=4194304"])
    found = search(recipe, target_of("l40s", 2))
    assert any(
        "CPU offload" in line for line in [*map(describe, [one.spec for one in found.best]), *found.lost]
    )
    top = found.best[0]
    hosted = [one for one in found.best if one.spec.knob("fsdp", "offload", False)]
    assert all(HOST_DOUBT * one.tokens_per_s <= top.tokens_per_s for one in hosted)


@pytest.mark.slow
def test_two_more_devices_are_never_slower() -> None:
    recipe = load_recipe("llama-3.1-8b", [FAST, "batch.sequence=4096", "batch.total_tokens=4194304"])
    speeds = [search(recipe, target_of("l40s", n)).best[0].tokens_per_s for n in (2, 4, 8)]
    assert speeds[0] * 1.5 < speeds[1]
    assert speeds[1] * 1.5 < speeds[2]


@pytest.mark.slow
def test_a_search_is_answered_in_seconds() -> None:
    recipe = load_recipe("llama-3.1-8b", [FAST, "batch.sequence=32768", "batch.total_tokens=16777216"])
    began = time.process_time()
    search(recipe, target_of("b200", 256))
    assert time.process_time() - began < 20, "7 s on a quiet slow core"


@pytest.mark.slow
def test_without_nvlink_the_search_chooses_less_communication() -> None:
    recipe = load_recipe("llama-3.1-8b", [*EIGHT])
    fast, slow = (
        search(recipe, target_of("a100-80-sxm", 8, link=link)).best[0] for link in ("nvlink3", "pcie4")
    )
    assert slow.tokens_per_s < fast.tokens_per_s
    sent = [one.time.parts.get("communication", 0) * target for one, target in ((fast, 1.0), (slow, 1.0))]
    assert slow.spec.size("tp") == 1
    assert all(seconds >= 0 for seconds in sent)


@pytest.mark.slow
def test_405b_on_16384_h100_uses_pipeline_or_tensor_parallelism() -> None:
    recipe = load_recipe(
        "llama-3.1-8b",
        [FAST, "model.name=llama-3.1-405b", "batch.sequence=8192", "batch.total_tokens=16777216"],
    )
    found = search(recipe, target_of("h100-sxm", 8, 2048), beyond=True)
    top = found.best[0]
    assert top.spec.world == 16384
    assert top.spec.size("tp") > 1
    assert top.spec.size("pp") > 1
    today = search(recipe, target_of("h100-sxm", 8, 2048)).best[0]
    assert today.tokens_per_s <= top.tokens_per_s
    assert 0.15 < (top.mfu or 0) < 0.6


@pytest.mark.slow
def test_70b_qlora_fits_two_24_gb_cards_with_cpu_offload_and_two_48_gb_cards_without() -> None:
    recipe = load_recipe("qlora", ["model.name=llama-3.1-70b", "batch.sequence=1024", "batch.micro=1"])
    small, large = (search(recipe, target_of(card, 2)).best[0] for card in ("4090", "l40s"))
    assert small.spec.knob("fsdp", "offload", False) is True
    assert small.memory.host_bytes > 15e9
    assert not large.spec.knob("fsdp", "offload", False)
    for one in (small, large):
        assert one.fits
        assert one.spec.size("fsdp") == 2


def test_an_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="a100-80-sxm"):
        target_of("a100-80-sx")
    with pytest.raises(RecipeError, match="nvlink"):
        target_of("a100-80-sxm", link="nvlink33")


@pytest.mark.slow
def test_the_smallest_step_that_a_search_names_is_one_that_it_can_plan() -> None:
    """What it says of `llama-3.1-8b` on 7 devices and of 405B on 16,384 (below), as small as that."""
    seven = load_recipe("llama-3.1-8b", ["batch.total_tokens=28672"])
    assert search(seven, target_of("h100-sxm", 7)).best[0].spec.world == 7
    many = load_recipe("llama-3.1-8b", ["model.name=llama-3.1-405b", "batch.total_tokens=4194304"])
    assert search(many, target_of("h100-sxm", 8, 2048)).best[0].spec.world == 16384


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("1e9", 1e9), ("300B", 3e11), ("15T", 1.5e13), ("500_000", 5e5), ("2.5 m", 2.5e6), ("8k", 8e3)],
)
def test_a_budget_of_tokens_is_written_as_people_write_it(written: str, tokens: float) -> None:
    assert count(written) == tokens


def test_the_command_suggests_what_to_do_where_a_plan_does_not_fit() -> None:
    asked = ["plan", "llama-3.1-8b", "--machine", "h100-sxm", "--devices", "8", "--tokens", "15T"]
    said = CliRunner().invoke(app, asked, catch_exceptions=False).output
    assert "It fits with batch.micro of at most 1. --search finds" in said
    assert re.search(r"15,000,000,000,000 tokens, if it fitted: [\d,.]+ h \([\d,]+ days\)", said)
    small = CliRunner().invoke(app, [*asked[:5], "--devices", "8", "batch.micro=1"], catch_exceptions=False)
    assert "does not fit" not in small.output


def test_fp8_is_not_planned_on_a_gpu_with_other_fp8_formats() -> None:
    found = search(load_recipe("llama-3.1-8b"), target_of("mi300x"))
    assert not any("fp8" in one.spec.techniques for one in found.best)
    assert any(
        "fp8" in one.spec.techniques
        for one in search(load_recipe("llama-3.1-8b"), target_of("h200-sxm")).best
    )
    recipe = load_recipe("llama-3.1-8b", ["techniques+=fp8"])
    assert any(one.startswith("fp8: it needs an NVIDIA GPU") for one in unmet(recipe, target_of("mi300x")))
    assert not any(one.startswith("fp8") for one in unmet(recipe, target_of("h100-sxm")))


def test_the_command_prints_json() -> None:
    ran = CliRunner().invoke(
        app, ["plan", "llama-3.1-8b", FAST, "batch.micro=1", "layout.fsdp=8", "--machine", "h100-sxm", "--devices", "8",
              "--tokens", "1e9", "--price", "2", "--json"], catch_exceptions=False)  # fmt: skip
    assert ran.exit_code == 0
    found = json.loads(ran.output)
    assert found["tokens_per_s_per_device"] > 0
    assert found["memory_bytes"]["total"] == pytest.approx(
        sum(v for k, v in found["memory_bytes"].items() if k not in ("total", "tensors")), rel=1e-6
    )
    assert isinstance(found["fits"], bool)
    assert set(found["expected_error"]) == {"memory", "time"}
    assert found["budget"]["cost"] == pytest.approx(2 * found["budget"]["device_hours"])


def test_the_command_prints_tables_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    ran = CliRunner().invoke(
        app,
        ["plan", "llama-3.2-1b-fast", "--machine", "h200-sxm", "--html", str(page)],
        catch_exceptions=False,
    )
    assert ran.exit_code == 0
    assert "largest micro batch" in ran.output
    assert "calibrated" in ran.output
    assert "<svg" in page.read_text()


def test_text_from_a_record_is_escaped_on_the_page() -> None:
    found = plan(spec_of(load_recipe("llama-3.2-1b-fast")), target_of("h200-sxm")).to_dict() | {
        "title": "<b>"
    }
    assert "<b>" not in plan_page("<script>", [found], ["<i>lost</i>"]).split("</style>")[1].replace(
        "<body>", ""
    )


def test_this_machine_is_planned_from_what_was_measured_on_it_and_refused_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = Sample("made up", 1e9, (0.01,))
    known = Ceilings("here", 0.0, matmul={"float32": (sample,)}, bandwidth={"copy": sample})
    module = import_module("rush.hardware.ceilings")  # the package has a function of that name
    monkeypatch.setattr(module, "known_ceilings", lambda machine: known)
    command = ["plan", "tiny", "techniques=[]", "run.device=cpu", "--json"]
    found = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).output)
    assert found["machine"]["how"] == "measured here"
    flops = flops_per_token(SIZES["tiny"], found["batch"]["sequence"]) * found["batch"]["step_tokens"]
    assert found["time_s"]["step"] > flops / 1e11 / 1.1
    monkeypatch.setattr(module, "known_ceilings", lambda machine: None)
    with pytest.raises(MachineError, match="rush probe"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_step_bound_by_an_unmeasured_host_has_a_larger_expected_error() -> None:
    short = spec_of(load_recipe("gpt2-124m", ["batch.micro=1", "batch.total_tokens=1024"]))
    long = spec_of(load_recipe("gpt2-124m", ["batch.micro=64", "batch.total_tokens=65536"]))
    unknown = target_of("h200-sxm")
    known = replace(unknown, launch_s=12e-6)
    errors = [plan(one, target, limits=False).expected_error["time"] for one, target in
              ((short, unknown), (long, unknown), (short, known))]  # fmt: skip
    assert errors[0] > errors[1] == errors[2]
    assert (
        "12.0 µs of host time, measured"
        in plan(short, known, limits=False).to_dict()["machine"]["sources"][-1]
    )
    assert "is assumed to take" in plan(short, unknown, limits=False).to_dict()["machine"]["sources"][-1]


def probed(target: TargetMachine, name: str) -> Machine:
    """Such a machine as its probe would describe it."""
    machine = target.machine()
    return replace(machine, devices=tuple(replace(device, name=name) for device in machine.devices))


@pytest.mark.parametrize(("share", "own"), [(0.94, False), (1.08, False), (0.8, True), (1.2, True)])
def test_a_probe_is_used_where_it_differs_from_the_mean_by_more_than_cards_do(
    share: float, own: bool
) -> None:
    usual = target_of("h200-sxm")
    matmul = {dtype: share * rate for dtype, rate in usual.matmul.items()}
    rates = {"matmul": matmul, "copy_bytes_per_s": share * usual.bytes_per_s}
    here = target_here(probed(usual, "NVIDIA H200"), rates)
    assert here.how == ("measured here" if own else "calibrated")
    means = MEASURED["h200-sxm"]  # not of int8
    expected = {dtype: rate if own or dtype not in means else means[dtype] for dtype, rate in matmul.items()}
    assert here.matmul == pytest.approx(expected)
    assert here.bytes_per_s == pytest.approx((share if own else 1.0) * usual.bytes_per_s)
    # Of a card that no findings are of, its probe is all there is.
    other = probed(target_of("a100-80-sxm"), "NVIDIA A100-SXM4-80GB")
    assert target_here(other, {**rates, "matmul": {"bfloat16": 2e14}}).matmul == {"bfloat16": 2e14}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["tiny", "--link", "pcie4"], "--link needs --machine"),
        (["tiny", "--network-cards", "2"], "--network-cards needs --machine"),
        (["tiny", "--machine", "t4", "--price", "2"], "--price needs --tokens"),
        (["tiny", "--machine", "t4", "--beyond"], "--beyond needs --search"),
        (["tiny", "--machine", "t4", "--best", "2"], "--best needs --search"),
        (["tiny", "--check"], "takes no recipe; found 'tiny'"),
        (["tiny", "--machine", "t4", "--tokens", "inf"], "--tokens is 'inf'; allowed: a number of tokens"),
        (
            ["tiny", "--machine", "t4", "--tokens", "1e999"],
            "--tokens is '1e999'; allowed: a number of tokens",
        ),
        (["tiny", "--machine", "t4", "--tokens", "3 Q"], "--tokens is '3 Q'; allowed: a number of tokens"),
        (
            ["tiny", "--machine", "t4", "--tokens", "1.2.3B"],
            "--tokens is '1.2.3B'; allowed: a number of tokens",
        ),
        (
            ["tiny", "--machine", "t4", "--tokens", "0"],
            "--tokens is '0'; allowed: a number of tokens of at least one",
        ),
        (
            ["llama-3.1-70b", "--machine", "t4"],
            "llama-3.1-70b is a model without its own recipe; use another model's, as in llama-3.1-8b model.name=llama-3.1-70b.",
        ),
        (
            ["llama-3.1-8b", "--machine", "h100-sxm", "--devices", "7", "--search"],
            "no layout of 7 × h100-sxm divides a step of 524,288 tokens, 256 sequences of 2,048. Set batch.total_tokens to 28,672 or a multiple of that",
        ),
        (
            [
                "llama-3.1-8b",
                "model.name=llama-3.1-405b",
                "--machine",
                "h100-sxm",
                "--devices",
                "8",
                "--nodes",
                "2048",
                "--search",
            ],
            "Set batch.total_tokens to 4,194,304 or a multiple of that",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(asked: list[str], words: str) -> None:
    ran = CliRunner().invoke(app, ["plan", *asked])
    assert isinstance(ran.exception, RecipeError)
    assert words in str(ran.exception)


def test_the_title_names_the_model_that_is_planned() -> None:
    ran = CliRunner().invoke(
        app, ["plan", "llama-3.1-8b", "model.name=llama-3.2-1b", "--machine", "h100-sxm", "--search"]
    )
    assert ran.stdout.startswith("llama-3.2-1b as llama-3.1-8b on 1 × h100-sxm")


def test_the_fastest_plan_is_written_as_a_recipe_that_is_planned_alike(tmp_path: Path) -> None:
    out = tmp_path / "recipe.toml"
    words = ["plan", "llama-3.2-1b", "--machine", "h100-sxm", "--devices", "2", "--search"]
    ran = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == f"Next: rush train {out} --nproc 2"
    best = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["best"][0]
    again = CliRunner().invoke(app, ["plan", str(out), "--machine", "h100-sxm", "--devices", "2", "--json"])
    assert json.loads(again.stdout)["tokens_per_s_per_device"] == pytest.approx(
        best["tokens_per_s_per_device"]
    )
    refused = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert isinstance(refused.exception, RecipeError)
    assert "already exists" in str(refused.exception)
