"""`rush bench` as a person uses it: a table and a page, JSON for machines, and a sentence for what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rush.cli import main
from tests.report import made_up_benches as made

RACED = {
    "verdict": "sooner",
    "against": "itself",
    "tokens": 80_000_000,
    "seeds": 3,
    "net": {"ratio": 1.31, "ci95": [1.21, 1.4], "samples": [1.31]},
    "gross": {"ratio": 1.4, "ci95": [1.3, 1.5], "samples": [1.4]},
    "more_tokens": {"ratio": 1.07, "ci95": [1.05, 1.09], "samples": [1.07]},
}


def call(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capfd.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_a_kernel_bench_shows_a_table_says_what_it_is_worth_and_draws_its_page(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def measured(ops: list[str], folder: Path, *, quick: bool, device: str, watch: Any) -> dict[str, Any]:
        asked.update(ops=ops, quick=quick, device=device)
        watch("swiglu", "timing both", 0, 1)
        record = made.interpreted_kernels()
        folder.mkdir()
        (folder / "kernels.json").write_text(json.dumps(record))
        return record

    monkeypatch.setattr("rush.bench.kernel_bench.bench_kernels", measured)
    folder = tmp_path / "bench"
    code, out, err = call(capfd, "bench", "kernels", "swiglu", "--quick", "--device", "cpu", "--out", folder)
    assert code == 0, err
    assert asked == {"ops": ["swiglu"], "quick": True, "device": "cpu"}
    assert "[0/1] swiglu: timing both" in err
    assert "ran in the interpreter" in out
    assert "plain torch" in out
    assert "flash-attn (flash_attn is not installed)" in err
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_targets_are_a_table_of_their_own_and_json_is_the_record(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(ops: list[str], folder: Path, **rest: Any) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        (folder / "kernels.json").write_text(json.dumps(made.kernels()))
        return made.kernels()

    monkeypatch.setattr("rush.bench.kernel_bench.bench_kernels", measured)
    code, out, err = call(capfd, "bench", "kernels", "--out", tmp_path / "bench")
    assert code == 0, err
    words = " ".join(out.split())
    assert "Targets" in words
    assert "reached" in words
    assert "missed" in words
    code, out, _ = call(capfd, "bench", "kernels", "--json", "--out", tmp_path / "bench")
    assert code == 0
    assert json.loads(out) == made.kernels()


def test_a_model_bench_shows_the_ratio_beside_the_wanted_one(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(workloads: list[Any], folder: Path, **rest: Any) -> dict[str, Any]:
        asked.extend(workloads)
        folder.mkdir()
        record = made.models()
        record["workloads"][0]["ours"][0]["rung"]["net"] = RACED
        (folder / "models.json").write_text(json.dumps(record))
        return record

    monkeypatch.setattr("rush.bench.baselines.bench_models", measured)
    file = tmp_path / "w.toml"
    file.write_text(
        """[workloads.small]
        about = "small"
        batch = { "batch.micro" = 2 }
        ours = [{ recipe = "llama-tiny", at_least = 1.1 }]
        baseline = { title = "them", kind = "transformers", recipe = "llama-tiny" }
        """
    )
    words = ("bench", "models", "small", "batch.sequence=64", "--file", file, "--out", tmp_path / "bench")
    code, out, err = call(capfd, *words)
    assert code == 0, err
    assert [workload.name for workload in asked] == ["small"]
    assert asked[0].baseline.recipe.batch.sequence == asked[0].ours[0].recipe.batch.sequence == 64
    said = " ".join(out.split())
    assert "681,250" in said
    assert "reached" in said
    assert "it died" in said
    assert (
        "Net ×1.31 (1.21 to 1.40) to the same loss (sooner; a race with itself over 80.0M tokens, 3 seeds)"
        in said
    )
    assert (tmp_path / "bench" / "report.html").read_text().startswith("<!doctype html>")


def test_fine_tuning_shows_memory_lengths_and_what_it_took(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(workloads: list[Any], folder: Path, **rest: Any) -> dict[str, Any]:
        folder.mkdir()
        (folder / "models.json").write_text(json.dumps(made.finetuning()))
        return made.finetuning()

    monkeypatch.setattr("rush.bench.baselines.bench_models", measured)
    code, out, err = call(capfd, "bench", "models", "lora-8b", "--out", tmp_path / "bench")
    assert code == 0, err
    said = " ".join(out.split())
    for word in (
        "0.850×",
        "≤ 0.9×",
        "1.100×",
        "150,528",
        "150,528 tokens ran in 80 GB at 2,100 tokens/s",
    ):
        assert word in said, word
    assert "PEFT took 41 s: build 6 s, timing 20 s" in err


def test_what_it_does_not_know_is_refused_with_the_nearest(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = call(capfd, "bench", "kernels", "layer_norm", "--out", tmp_path)
    assert code == 2
    assert "layernorm" in err
    code, _, err = call(capfd, "bench", "models", "llama-1b", "--out", tmp_path)
    assert code == 2
    assert "llama-3.2-1b" in err
