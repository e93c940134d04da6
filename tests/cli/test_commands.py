"""The commands as a person uses them: train, listen, export, look at data; and their JSON for machines."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rush
from rush.cli import main
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import ROOT, small_recipe, write_corpus

FAMILIES = ("gpt2", "llama")


def call(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Standard output of a command that must succeed."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert ended.value.code in (0, None), err
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of each family."""
    path = tmp_path_factory.mktemp("runs")
    before = os.environ.get("RUSH_CACHE")
    os.environ["RUSH_CACHE"] = str(fresh_cache(path / "cache"))
    corpus = write_corpus(path / "corpus")
    for family in FAMILIES:
        recipe = path / f"{family}.toml"
        changes: dict[str, Any] = {
            "schedule": {"steps": 12, "warmup": 2},
            "run": {"save_every": 4, "validate_every": 4},
        }
        recipe.write_text(small_recipe(corpus, family, **changes))
        with pytest.raises(SystemExit) as ended:
            main(["train", str(recipe), "run.tensorboard=true", "--out", str(path / family), "--json"])
        assert ended.value.code in (0, None)
    yield path
    if before is None:
        del os.environ["RUSH_CACHE"]
    else:
        os.environ["RUSH_CACHE"] = before


def test_a_run_folder_holds_what_the_architecture_page_says(runs: Path) -> None:
    folder = runs / "gpt2"
    assert {"recipe.toml", "machine.json", "metrics.jsonl", "samples.jsonl", "tokenizer", "tensorboard",
            "checkpoints", "report.html"} <= {path.name for path in folder.iterdir()}  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"} <= rows[0].keys()
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8, 12]
    assert rows[-1]["tokens"] == 12 * 64
    assert any(path.name.startswith("events") for path in (folder / "tensorboard").iterdir())
    assert json.loads((folder / "machine.json").read_text())["torch"] == torch.__version__
    assert rush.load_recipe(str(folder / "recipe.toml")).schedule.steps == 12
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    best = min(rows, key=lambda row: row.get("val_loss", 1e9))["step"]
    assert set(saved) == {"step-000008", "step-000012", f"step-{best:06d}"}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_run_gives_the_same_logits_in_the_reference_library(
    runs: Path, family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    told = json.loads(call(capfd, "export", runs / family, "--to", tmp_path / "hf", "--json"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert told["parameters"] == sum(p.numel() for p in reference.parameters())
    tokens = torch.randint(0, 320, (2, 13), generator=torch.Generator().manual_seed(1))
    ours = rush.load_model(runs / family)(tokens)
    with torch.no_grad():
        theirs = reference(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    again = rush.load_model(tmp_path / "hf")(tokens)
    assert torch.equal(again, ours)
    text = "def apply(build):\n    return 1\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == rush.load_tokenizer(
        runs / family
    ).encode(text)


def test_a_run_can_start_from_another_runs_weights(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = runs / "llama.toml"
    call(capfd, "train", recipe, f"model.init_from={runs / 'llama'}", "schedule.steps=1", "schedule.warmup=0",
         "optimizer.lr=1e-12", "--out", tmp_path / "on", "--json")  # fmt: skip
    before, after = (
        rush.load_model(runs / "llama").state_dict(),
        rush.load_model(tmp_path / "on").state_dict(),
    )
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-9)


def test_generate_streams_prompt_and_text_and_repeats_itself_for_a_seed(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("generate", runs / "gpt2", "--prompt", "def ", "--max-tokens", "20", "--seed", "5")
    first, second = call(capfd, *words), call(capfd, *words)
    assert first == second
    assert first.startswith("def ")
    told = json.loads(call(capfd, *words, "--json"))
    assert "def " + told["text"] + "\n" == first
    assert 1 <= len(told["tokens"]) <= 20


def test_chat_continues_plain_text_and_uses_a_template_where_there_is_one(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\n"))
    call(capfd, "chat", runs / "llama", "--max-tokens", "5")
    call(capfd, "export", runs / "llama", "--to", tmp_path / "chatty")
    config = json.loads((tmp_path / "chatty" / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    )
    (tmp_path / "chatty" / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    out = call(capfd, "chat", tmp_path / "chatty", "--max-tokens", "4", "--temperature", "0")
    assert out.count("\n") >= 2


def test_the_list_of_recipes_carries_the_published_parameter_counts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    listed = {row["name"]: row for row in json.loads(call(capfd, "recipes", "--json"))}
    assert listed["gpt2-124m"]["parameters"] == 124_439_808
    assert listed["llama-3.1-8b"]["parameters"] == 8_030_261_248
    table = call(capfd, "recipes")
    assert re.search(r"^llama-3.2-1b +1.24B +20,000 steps  Llama 3.2 1B", table, re.MULTILINE)


def test_show_prints_a_recipe_that_loads_to_the_same_digest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = call(capfd, "recipes", "show", "gpt2-124m", "batch.micro=8")
    (tmp_path / "shown.toml").write_text(text)
    shown = rush.load_recipe(str(tmp_path / "shown.toml"))
    assert shown.batch.micro == 8
    assert text.startswith(f"# digest {shown.digest}\n")


def test_the_schema_is_json_schema(capfd: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(call(capfd, "recipes", "schema"))
    assert schema["properties"]["batch"]["$ref"] == "#/$defs/BatchSection"


def test_data_prepare_show_and_verify_agree(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = json.loads(call(capfd, "data", "prepare", runs / "gpt2.toml", "--json"))
    assert told["splits"]["train"]["tokens"] > 1000
    shown = json.loads(call(capfd, "data", "show", told["folder"], "--json", "--sequence", "32"))
    assert len(shown["sample"]["tokens"]) == 33
    assert "all" in call(capfd, "data", "verify", told["folder"])
    assert "median length" in call(capfd, "data", "show", told["folder"])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train"],
        ["generate"],
        ["chat"],
        ["export"],
        ["recipes"],
        ["data"],
        ["data", "prepare"],
        ["probe"],
    ],
)
def test_every_command_has_help(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    out = call(capfd, *words, "--help")
    assert "Usage: rush" in out
    assert len(out.splitlines()) > 8


def test_shell_completion_offers_recipes() -> None:
    from rush.cli.options import complete_recipe

    assert complete_recipe("gpt2-1") == ["gpt2-1.5b", "gpt2-124m", "gpt2-124m-fast", "gpt2-124m-fp8"]


def test_python_dash_m_rush_works_from_a_checkout() -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "rush", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == rush.__version__


def test_a_python_without_torch_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    command = [
        sys.executable,
        "-c",
        "import sys; sys.modules['torch'] = None; import rush.cli; rush.cli.main()",
    ]
    done = subprocess.run([*command, "train", "tiny"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert re.match(r"error: \S+ has no torch. Install it \(\S+ -m pip install torch\)", done.stderr)
    assert "Traceback" not in done.stderr
