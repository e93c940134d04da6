"""End-to-end baselines: both sides do the same work, and a ratio counts only with its proofs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rush.bench import workloads
from rush.bench.baselines import bench_models, target_of
from rush.data import Batch
from rush.errors import MachineError, RecipeError
from rush.hardware import Device, probe
from rush.hub.weight_names import exported_name
from rush.lab.parity.judge import without_speed
from rush.models import Shape, build_model
from rush.recipe_io import load_recipe, write_toml
from rush.records.models import read_models
from rush.report.models import model_page
from rush.techniques import check

SHAPE = Shape(
    family="llama", num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate=48, vocab_size=101,
    context=64, norm_eps=1e-5, rope_theta=10000.0, tied_head=True,
)  # fmt: skip


def rung(ratio: float | None, parity: str = "equal", idle: bool = False) -> dict[str, Any]:
    gain = None if ratio is None else {"over": "rival", "ratio": ratio, "ci95": [ratio - 0.01, ratio + 0.01]}
    evidence = [{"technique": "compile", "took_effect": not idle, "what": "seen"}]
    return {
        "gain": gain,
        "parity": {"verdict": parity, "why": "because"},
        "evidence": evidence,
        "reason": "it died",
    }


def test_a_target_needs_the_ratio_the_parity_and_the_evidence() -> None:
    def judged(*args: Any, **rest: Any) -> dict[str, Any]:
        return dict(target_of(1.2, rung(*args, **rest)))  # type: ignore[arg-type]

    assert judged(1.25)["verdict"] == "reached"
    assert judged(1.25)["why"] is None
    assert "close call" in judged(1.205)["why"]
    assert judged(1.205)["verdict"] == "reached"
    slow, wrong, idle = judged(1.19), judged(1.25, "different"), judged(1.25, idle=True)
    assert {case["verdict"] for case in (slow, wrong, idle)} == {"missed"}
    assert "1.190× is less than 1.2×" in slow["why"]
    assert "parity is different: because" in wrong["why"]
    assert "no trace of compile" in idle["why"]
    assert judged(None)["verdict"] == "not measured"
    assert judged(None)["why"] == "it died"
    life = {"verdict": "broken", "problem": "it cannot validate: X.", "parts": []}
    unusable = target_of(1.2, {**rung(1.25), "life": life})  # type: ignore[typeddict-item]
    assert (unusable["verdict"], unusable["why"]) == ("missed", "it cannot validate: X")
    life["verdict"] = "not known"
    assert target_of(1.2, {**rung(1.25), "life": life})["verdict"] == "reached"  # type: ignore[typeddict-item]


def test_an_unknown_workload_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"no workload named 'gpt2'.*gpt2-124m"):
        workloads.load_workloads(["gpt2"])


def test_a_memory_target_has_a_verdict_of_its_own() -> None:
    def judged(ours: int | None, theirs: int | None, **rest: Any) -> dict[str, Any]:
        mine = {**rung(1.25, **rest), "peak_memory_bytes": ours}
        baseline = {"peak_memory_bytes": theirs, "reason": "it ran out"}
        whole = target_of(1.2, mine, 0.9, baseline)  # type: ignore[arg-type]
        return dict(whole["memory"])

    assert judged(89, 100) == {"at_most": 0.9, "reached": 0.89, "verdict": "reached", "why": None}
    assert judged(90, 100)["verdict"] == "reached"
    large, wrong = judged(91, 100), judged(50, 100, parity="different")
    assert large["verdict"] == wrong["verdict"] == "missed"
    assert large["why"] == "0.910× is more than 0.9×"
    assert "parity is different" in wrong["why"]
    assert judged(50, None) == {
        "at_most": 0.9,
        "reached": None,
        "verdict": "not measured",
        "why": "the memory of the baseline is not known: it ran out",
    }
    assert judged(None, 100)["why"] == "the memory of ours is not known: it died"
    assert "memory" not in target_of(1.2, rung(1.25))  # type: ignore[arg-type]


def test_what_decides_what_is_learned_stays_in_the_reference_and_out_of_the_promise() -> None:
    recipe = load_recipe("lora")
    assert [name for name, _ in without_speed(recipe).technique_uses()] == ["lora"]
    assert without_speed(recipe).technique_uses()[0][1] == {"rank": 16, "alpha": 32}
    assert without_speed(load_recipe("llama-3.1-8b-fast")).techniques == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_leest = 1.2", r"ours.at_leest is not a key.*at_least"),
        ("name = 'x'", r"has no at_least; give the ratio"),
    ],
)
def test_a_workload_with_wrong_keys_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "w.toml"
    file.write_text(
        f"""[workloads.small]
        about = "small"
        batch = {{ "batch.micro" = 2 }}
        ours = [{{ recipe = "llama-tiny", {text} }}]
        baseline = {{ title = "them", kind = "transformers", recipe = "llama-tiny" }}
        """
    )
    with pytest.raises(RecipeError, match=message):
        workloads.load_workloads([], [], file)


def test_the_old_key_of_a_workload_s_baseline_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(
        """[workloads.small]
        about = "small"
        batch = { "batch.micro" = 2 }
        ours = [{ recipe = "llama-tiny", at_least = 1.0 }]
        rival = { title = "them", kind = "transformers", recipe = "llama-tiny" }
        """
    )
    (workload,) = workloads.load_workloads([], [], file)
    assert workload.baseline is not None
    assert workload.baseline.title == "them"


FINE_TUNING = ["sft-3b", "lora-8b", "qlora-8b-1", "qlora-8b-4", "qlora-8b-long"]
FAMILIES = [
    "qwen3-1.7b",
    "qwen3-8b-lora",
    "qwen3-8b-qlora-1",
    "qwen3-8b-qlora-4",
    "gemma-3-4b",
    "gemma-3-4b-flex",
]


@pytest.mark.parametrize(
    "name", ["gpt2-124m", "gpt2-124m-biases", "llama-3.2-1b", "llama-3.1-8b", "dpo", *FINE_TUNING, *FAMILIES]
)
def test_the_workloads_that_ship_can_run_on_a_hopper_gpu(name: str) -> None:
    (workload,) = workloads.load_workloads([name])
    hopper = Device("NVIDIA H200", 140 * 2**30, capability=(9, 0))
    machine = dataclasses.replace(probe("cpu"), device="cuda", devices=(hopper,), triton="3.6")
    recipes = [*([workload.baseline.recipe] if workload.baseline else []), *(o.recipe for o in workload.ours)]
    for recipe in recipes:
        check(recipe, machine)
    same = {
        (
            r.batch.micro,
            r.batch.sequence,
            r.step_tokens,
            r.data.source,
            r.data.vocab_size,
            r.data.shuffle,
            r.objective,
            r.model.name,
        )
        for r in recipes
    }
    assert len(same) == 1, "both sides must get the same batch and text"
    assert len({ours.name for ours in workload.ours}) == len(workload.ours)
    assert any(ours.primary for ours in workload.ours)


def test_the_targets_of_fine_tuning_are_those_that_were_set() -> None:
    told = {
        w.name: (w.ours[0].at_least, w.ours[0].memory_at_most) for w in workloads.load_workloads(FINE_TUNING)
    }
    assert told == {
        "sft-3b": (1.7, None),
        "lora-8b": (1.15, 0.9),
        "qlora-8b-1": (1.6, 1.0),
        "qlora-8b-4": (1.25, 1.0),
        "qlora-8b-long": (0.0, None),
    }
    assert workloads.load_workloads(["qlora-8b-1"])[0].baseline.options == {  # type: ignore[union-attr]
        "dtype": "bfloat16", "with_liger": True, "rank": 16, "alpha": 32, "quantized": True, "checkpointing": True,
        "autocast": True,
    }  # fmt: skip


def test_recipes_of_other_families_must_be_a_tenth_faster_and_their_adapters_no_larger() -> None:
    for workload in workloads.load_workloads(FAMILIES):
        full = workload.name in ("qwen3-1.7b", "gemma-3-4b", "gemma-3-4b-flex")
        assert (workload.ours[0].at_least, workload.ours[0].memory_at_most) == (1.1, None if full else 1.0)
        assert workload.baseline is not None
        assert workload.baseline.options["with_liger"], workload.name
        assert workload.baseline.recipe.shape().family in ("qwen3", "gemma3_text")


def small_workloads(folder: Path, recipe: Path, baseline: str, ours: str = "", **measure: Any) -> Path:
    settings = {
        "processes": 2,
        "windows": 4,
        "window_ms": 1.0,
        "warmup_max_steps": 7,
        "limit_s": 120.0,
        **measure,
    }
    file = folder / "workloads.toml"
    file.write_text(
        "[measure]\n"
        + "\n".join(f"{key} = {value}" for key, value in settings.items())
        + f"""
        [workloads.small]
        about = "a few thousand parameters"
        batch = {{ "batch.micro" = 4, "batch.total_tokens" = "none" }}
        parity = {{ steps = 3 }}
        ours = [{{ recipe = {json.dumps(str(recipe))}, name = "ours", at_least = 0.001{ours} }}]
        [workloads.small.baseline]
        title = "the baseline"
        recipe = {json.dumps(str(recipe))}
        {baseline}
        """
    )
    return file


def test_overrides_reach_every_recipe_and_the_measure(small_recipe: Path, tmp_path: Path) -> None:
    file = small_workloads(tmp_path, small_recipe, 'kind = "recipe"\ntechniques = ["gc_control"]')
    changes = ["measure.processes=3", "batch.sequence=16"]
    (workload,) = workloads.load_workloads([], changes, file)
    assert workload.measure.processes == 3
    recipes = [workload.baseline.recipe, workload.ours[0].recipe]
    assert [(r.batch.micro, r.batch.sequence, r.step_tokens) for r in recipes] == [(4, 16, 64)] * 2
    assert [name for name, _ in workload.baseline.recipe.technique_uses()] == ["gc_control"]
    assert workload.ours[0].recipe.technique_uses() == []


@pytest.mark.slow
def test_the_baseline_and_ours_take_turns_in_fresh_processes_and_a_second_call_measures_nothing(
    small_recipe: Path, tmp_path: Path
) -> None:
    file = small_workloads(tmp_path, small_recipe, 'kind = "recipe"\ntechniques = ["gc_control"]')
    loaded = workloads.load_workloads([], [], file)
    said: list[str] = []
    record = bench_models(loaded, tmp_path / "out", watch=lambda p: said.append(p.doing))
    assert said == ["the baseline (1 of 2)", "ours (1 of 2)", "the baseline (2 of 2)", "ours (2 of 2)"]
    assert record == read_models(tmp_path / "out")
    (found,) = record["workloads"]
    (ours,) = found["ours"]
    for side in (found["rival"], ours["rung"]):
        assert side["status"] == "ok", side["reason"]
        assert side["tokens_per_s"] is not None
        assert len(side["tokens_per_s"]["processes"]) == 2
    assert ours["rung"]["parity"] is not None
    assert ours["rung"]["parity"]["verdict"] == "equal"
    assert ours["rung"]["gain"] is not None
    assert ours["target"]["verdict"] == "reached"
    assert ours["target"]["reached"] == ours["rung"]["gain"]["ratio"]
    assert found["rival"]["life"] is None
    assert ours["rung"]["life"] is not None
    assert ours["rung"]["life"]["verdict"] == "ok", ours["rung"]["life"]["problem"]
    assert "Short life: ok: trained, validated, sampled, saved and resumed." in model_page(record)

    trials = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").iterdir()}
    again = bench_models(loaded, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").iterdir()} == trials
    assert again["workloads"] == record["workloads"]


@pytest.mark.slow
def test_adapters_beside_peft_s_are_judged_against_adapters_and_memory_gets_its_verdict(
    small_recipe: Path, tmp_path: Path
) -> None:
    """The whole bench with the real library: LoRA beside PEFT's, parity against plain LoRA, both targets."""
    pytest.importorskip("peft")
    baseline = 'kind = "transformers"\nrank = 4\nalpha = 8'
    ours = ', techniques = [{ name = "lora", rank = 4, alpha = 8 }, "gc_control"], memory_at_most = 100.0'
    file = small_workloads(tmp_path, small_recipe, baseline, ours, processes=1)
    llama = ["model.name=llama-tiny", "model.shape.num_heads=4"]
    record = bench_models(workloads.load_workloads([], llama, file), tmp_path / "out")
    (found,) = record["workloads"]
    (mine,) = found["ours"]
    assert found["rival"]["status"] == "ok", found["rival"]["reason"]
    assert set(found["rival_versions"]) == {"transformers", "peft"}
    assert found["rival_weights"] is not None
    assert found["rival_weights"].startswith("trained: 4,352 float32; frozen: ")
    parity = mine["rung"]["parity"]
    assert parity is not None
    assert (parity["verdict"], parity["class"], parity["against"]) == (
        "equal",
        "EXACT",
        "plain fp32 with lora",
    )
    assert parity["losses"] == parity["reference_losses"]
    assert mine["target"]["verdict"] == mine["target"]["memory"]["verdict"] == "reached"
    assert mine["target"]["memory"]["reached"] == pytest.approx(
        mine["rung"]["peak_memory_bytes"] / found["rival"]["peak_memory_bytes"]  # type: ignore[operator]
    )
    assert [one["who"] for one in found["took"]] == [
        "the baseline",
        "ours",
        "fp32 for ours",
        "ours, a short life",
    ]
    assert {"build", "timing"} <= found["took"][0]["parts"].keys()
    assert record == read_models(tmp_path / "out")


def test_a_baseline_whose_library_is_missing_is_refused_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rush.bench import baseline_run

    monkeypatch.setattr(baseline_run, "find_spec", lambda name: None if name == "liger_kernel" else True)
    spec = {"machine": probe("cpu").to_dict(), "recipe": write_toml(load_recipe("llama-tiny"))}
    with pytest.raises(MachineError, match=r"needs liger_kernel; .*optimization-rush\[baselines\]"):
        baseline_run.measure_baseline({**spec, "options": {"with_liger": True}}, None)


def test_a_model_without_rope_is_refused_as_a_baseline_of_that_library() -> None:
    from rush.bench.baseline_run import baseline_model

    shape = load_recipe("tiny").shape()
    with pytest.raises(RecipeError, match="the recipe's model is of the family gpt2"):
        baseline_model(shape, torch.device("cpu"), torch.float32)


def baseline_with_our_weights(shape: Shape, attention: str = "sdpa") -> tuple[Any, Any]:
    pytest.importorskip("transformers")
    from rush.bench.baseline_run import baseline_model

    ours = build_model(shape)
    ours.init_weights(1)
    theirs = baseline_model(shape, torch.device("cpu"), torch.float32, attention)
    names = {exported_name(shape, name): value.detach().clone() for name, value in ours.named_parameters()}
    missing = theirs.load_state_dict(names, strict=False)
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    return ours, theirs


BASELINE_SHAPES = {
    "llama": SHAPE,
    "qwen3": dataclasses.replace(SHAPE, family="qwen3", head_dim=16),
    "gemma3": dataclasses.replace(
        SHAPE, family="gemma3_text", head_dim=16, window=7, window_layers=(True, False), local_rope_theta=50.0
    ),
}


@pytest.mark.parametrize("name", BASELINE_SHAPES)
def test_the_library_s_pass_gives_the_summed_loss_and_gradients_of_our_own(name: str) -> None:
    from rush.bench.baseline_run import baseline_pass

    ours, theirs = baseline_with_our_weights(BASELINE_SHAPES[name])
    tokens = torch.randint(0, 101, (2, 20), generator=torch.Generator().manual_seed(2))
    labels = tokens.roll(-1, 1)
    labels[1, 3:9] = -100
    share = torch.tensor(1 / 34)
    expected = ours(tokens, labels)
    (expected * share).backward()
    found = baseline_pass(theirs)(Batch(tokens, labels), share)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    there = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        mine, other = parameter.grad, there[exported_name(ours.shape, name)].grad
        assert float((mine - other).norm() / mine.norm()) < 1e-4, name


def test_every_family_with_a_workload_gets_its_own_patch_of_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library needs a GPU; that its patched models compute the same is what the bench shows there."""
    from rush.bench import baseline_run

    patched: list[str] = []
    library = SimpleNamespace(
        apply_liger_kernel_to_qwen3=lambda model: patched.append("qwen3"),
        apply_liger_kernel_to_gemma3_text=lambda model: patched.append("gemma3_text"),
    )
    monkeypatch.setattr(baseline_run, "import_module", lambda name: library)
    monkeypatch.setattr(baseline_run, "version", lambda name: "0.8.5")
    for family in ("qwen3", "gemma3_text"):
        baseline_run.apply_liger(SimpleNamespace(config=SimpleNamespace(model_type=family)))
    assert patched == ["qwen3", "gemma3_text"]
    with pytest.raises(
        RecipeError, match=r"Liger 0.8.5 has no kernels for models of type gpt2; set with_liger"
    ):
        baseline_run.apply_liger(SimpleNamespace(config=SimpleNamespace(model_type="gpt2")))


def test_the_library_s_model_steps_in_our_loop() -> None:
    pytest.importorskip("transformers")
    from rush.bench.baseline_run import BaselineOptions, build_baseline
    from rush.training.step import train_step

    recipe = load_recipe("llama-tiny", ["batch.micro=2", "batch.sequence=16", "batch.total_tokens=32"])
    run = build_baseline(recipe, probe("cpu"), BaselineOptions(dtype="float32"))
    assert run.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr, attr-defined]
    tokens = torch.randint(0, 200, (2, 17), generator=torch.Generator().manual_seed(3))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ("a", "b"))
    losses = [train_step(run, step, 1e-2, [batch]).loss for step in range(1, 6)]
    assert losses[-1] < losses[0] - 0.5, losses
