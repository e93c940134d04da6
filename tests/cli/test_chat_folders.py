"""What learned to chat, taken elsewhere: it stops where a turn ends, keeps its template, and is the checkpoint asked for."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from rush.cli import main
from rush.data import Tokenizer
from rush.hub.weights import save_hf_folder
from rush.models import SIZES, build_model
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import rows, small_recipe

# For each template: the end of a text, the end of a turn, and the other special tokens of its tokenizer.
MARKS = {
    "chatml": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>"]),
    "llama-3": (
        "<|end_of_text|>",
        "<|eot_id|>",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    ),
}
QUESTION = "What is 7?"


def make_base(folder: Path, template: str) -> None:
    """A base model as published: an end of text, an end of turn besides, a token for padding, and no chat template."""
    end, turn, others = MARKS[template]
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        [Path(__file__).read_text()],
        trainer=tokenizers.trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=[end, turn, "<|pad|>", *others],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    bos = others[0] if template == "llama-3" else None
    shape = dataclasses.replace(
        SIZES["llama-tiny"], vocab_size=320, hidden=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate=64,
    )  # fmt: skip
    tokenizer = Tokenizer(core.to_str(), eos_token=end, bos_token=bos)
    save_hf_folder(folder, build_model(shape, seed=1), shape, eos_id=tokenizer.eos_id)
    tokenizer.save(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": "<|pad|>"}))


def train(path: Path, name: str, base: Path, template: str, *words: str) -> None:
    recipe = path / f"{name}.toml"
    recipe.write_text(
        small_recipe(
            path, "llama",
            data={"files": [str(path / "talk.jsonl")], "tokenizer": "model", "template": template, "validation": 0.2},
            objective={"kind": "sft"}, batch={"micro": 2, "sequence": 64, "total_tokens": 128},
            optimizer={"lr": 3e-2}, schedule={"steps": 4, "warmup": 1},
            run={"save_every": 2, "keep": 5, "sample_every": 0, "sample_tokens": 40, "validate_every": 0},
        )
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), f"model.init_from={base}", *words, "--out", str(path / name), "--json"])
    assert ended.value.code in (0, None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Bases, conversations, a run of each template, and one that trained adapters."""
    path = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSH_CACHE", str(fresh_cache(path / "cache")))
        talk = [
            {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
            for n in range(40)
        ]  # fmt: skip
        (path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))
        for template in MARKS:
            make_base(path / f"base-{template}", template)
            asks = f"run.sample_prompt={QUESTION}"
            train(path, template, path / f"base-{template}", template, asks)
        adapt = "techniques=[{name='lora', rank=8, alpha=64}]"
        train(path, "lora", path / "base-chatml", "chatml", adapt, f"run.sample_prompt={QUESTION}")
        yield path


def call(capfd: pytest.CaptureFixture[str], *words: str | Path, fails: bool = False) -> tuple[str, str]:
    """What a command says on both channels."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert (ended.value.code in (0, None)) != fails, err
    return out, err


def generated(folder: Path, tokens: list[int]) -> tuple[list[int], list[int]]:
    """What transformers' own `generate` makes of a model that would say these tokens: the new ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": QUESTION}]
    start = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = start["input_ids"].shape[1]

    class Says(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, tokens[input_ids.shape[1] - length]] = 0.0
            return forced

    found = model.generate(
        **start, max_new_tokens=len(tokens), do_sample=False, logits_processor=LogitsProcessorList([Says()])
    )
    return found[0, length:].tolist(), start["input_ids"][0].tolist()


@pytest.mark.parametrize("template", list(MARKS))
def test_an_exported_chat_model_stops_in_transformers(
    made: Path, template: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(capfd, "export", made / template, "--to", tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    end, turn, pad = (tokenizer.special_ids[name] for name in (*MARKS[template][:2], "<|pad|>"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == end
    told = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert told["eos_token_id"] == [end, turn]
    assert told["pad_token_id"] == pad
    assert told.get("bos_token_id") == tokenizer.bos_id
    assert generated(tmp_path / "out", [50, 51, turn, 52, 53, 54])[0] == [50, 51, turn]
    assert generated(tmp_path / "out", [50, 51, end, 52, 53, 54])[0] == [50, 51, end]


def test_what_the_base_says_about_generation_is_kept(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when transformers itself saves a model; also from one Hugging Face folder to another."""
    call(capfd, "export", made / "chatml", "--to", tmp_path / "chatml")
    config = tmp_path / "chatml" / "generation_config.json"
    kept = {"temperature": 0.6, "do_sample": True, "eos_token_id": [0, 1, 3], "_from_model_config": True}
    config.write_text(json.dumps(kept))
    call(capfd, "export", tmp_path / "chatml", "--to", tmp_path / "again", "--dtype", "bfloat16")
    told = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert told == {"temperature": 0.6, "do_sample": True, "eos_token_id": [0, 1, 3]}


def test_a_base_model_ends_with_its_text_only(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(capfd, "export", made / "base-chatml", "--to", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_an_exported_adapter_brings_its_template(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    said = json.loads(
        call(capfd, "export", made / "lora", "--adapter", "--to", tmp_path / "adapter", "--json")[0]
    )
    assert set(said["files"]) == {path.name for path in (tmp_path / "adapter").iterdir()}
    answers = []
    for adapter in (made / "lora", tmp_path / "adapter"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
        words = ("--adapter", adapter, "--max-tokens", "12", "--temperature", "0", "--device", "cpu")
        out, err = call(capfd, "chat", made / "base-chatml", *words)
        assert "no chat template" not in err
        answers.append(out)
    assert answers[0] == answers[1]
    _, err = call(
        capfd, "merge", tmp_path / "adapter", "--base", made / "base-chatml", "--to", tmp_path / "merged"
    )
    call(capfd, "merge", made / "lora", "--to", tmp_path / "wanted")
    for name in ("tokenizer_config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    assert generated(tmp_path / "merged", [50, 1, 51, 52])[0] == [50, 1]
    asked = [{"role": "user", "content": QUESTION}]
    written = AutoTokenizer.from_pretrained(tmp_path / "adapter").apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert written == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def test_merging_an_adapter_without_a_tokenizer_says_that_no_template_comes_along(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(capfd, "export", made / "lora", "--adapter", "--to", tmp_path / "adapter")
    for path in (tmp_path / "adapter").glob("tokenizer*"):
        path.unlink()
    _, err = call(
        capfd, "merge", tmp_path / "adapter", "--base", made / "base-chatml", "--to", tmp_path / "merged"
    )
    assert "has no tokenizer" in err


def test_an_adapters_tokenizer_beyond_the_vocabulary_gives_only_its_template(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some trainers add a token for padding, for which the embedding has no row."""
    call(capfd, "export", made / "lora", "--adapter", "--to", tmp_path / "adapter")
    file = tmp_path / "adapter" / "tokenizer.json"
    core = tokenizers.Tokenizer.from_file(str(file))
    core.add_special_tokens(["<more>"])
    core.save(str(file))
    _, err = call(
        capfd, "merge", tmp_path / "adapter", "--base", made / "base-chatml", "--to", tmp_path / "merged"
    )
    assert "entries beyond the model's 320" in err
    merged = Tokenizer.load(tmp_path / "merged")
    assert merged.vocab_size == 320
    assert merged.chat_template is not None


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_requested_checkpoint_is_loaded(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, run = made / "base-chatml", made / "lora"
    call(capfd, "merge", run, "--checkpoint", "2", "--to", tmp_path / "early")
    call(capfd, "merge", run, "--to", tmp_path / "late")
    assert weights(tmp_path / "early") != weights(tmp_path / "late")
    call(capfd, "merge", run, "--base", base, "--checkpoint", "2", "--to", tmp_path / "named")
    assert weights(tmp_path / "named") == weights(tmp_path / "early")
    _, err = call(
        capfd, "merge", run, "--base", base, "--checkpoint", "3", "--to", tmp_path / "none", fails=True
    )
    assert "there is no checkpoint '3'" in err
    assert "2, 4" in err
    assert not (tmp_path / "none").exists()

    def text(*words: str | Path) -> Any:
        options = ("--prompt", "What", "--max-tokens", "12", "--device", "cpu", "--json")
        return json.loads(call(capfd, "generate", *words, *options)[0])["tokens"]

    early, late = text(run, "--checkpoint", "2"), text(run)
    assert early != late
    for offload in ("cpu", "disk"):
        assert text(run, "--checkpoint", "2", "--offload", offload) == early
        assert text(base, "--adapter", run, "--checkpoint", "2", "--offload", offload) == early
    assert text(base, "--adapter", run, "--checkpoint", "2") == early
    assert text(base, "--adapter", run) == late


def test_a_checkpoint_of_a_folder_that_is_no_run_is_refused(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, adapter = made / "base-chatml", tmp_path / "adapter"
    call(capfd, "export", made / "lora", "--adapter", "--to", adapter)
    commands: list[tuple[str | Path, ...]] = [
        ("generate", base),
        ("generate", base, "--offload", "cpu"),
        ("generate", base, "--offload", "disk"),
        ("generate", base, "--adapter", adapter),
        ("chat", base),
        ("evaluate", base, "--prompt", "What?"),
        ("export", base, "--to", tmp_path / "out"),
        ("merge", adapter, "--base", base, "--to", tmp_path / "out"),
    ]
    for command in commands:
        _, err = call(capfd, *command, "--checkpoint", "2", fails=True)
        assert "has no checkpoints" in err, command
        assert len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "out").exists()


def test_samples_ask_in_the_runs_template_and_end_with_the_turn(made: Path) -> None:
    begin = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    for name in ("chatml", "lora"):
        (sample,) = rows(made / name, "samples.jsonl")
        assert sample["prompt"] == QUESTION
        assert sample["text"].startswith(begin)
        assert "<|im_end|>" not in sample["text"].removeprefix(begin)
    (sample,) = rows(made / "llama-3", "samples.jsonl")
    assert sample["text"].startswith(
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert sample["text"].count("<|eot_id|>") == 1


def test_an_adapter_over_a_run_says_what_peft_needs(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    adapt = "techniques=[{name='lora', rank=8, alpha=64}]"
    train(made, "over", made / "chatml", "chatml", adapt)
    _, err = call(capfd, "export", made / "over", "--adapter", "--to", tmp_path / "noted")
    assert f"rush export {made / 'chatml'} --to" in err
    assert json.loads((tmp_path / "noted" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(made / "chatml")
    call(capfd, "export", made / "chatml", "--to", tmp_path / "base")
    words = ("export", made / "over", "--adapter", "--base")
    _, err = call(capfd, *words, tmp_path / "base", "--to", tmp_path / "adapter")
    assert "PEFT cannot" not in err
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert opened.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    _, err = call(capfd, *words, made / "chatml", "--to", tmp_path / "x", fails=True)
    assert "is a run folder, which PEFT cannot open" in err
    _, err = call(capfd, *words, made / "base-chatml", "--to", tmp_path / "x", fails=True)
    assert "other weights" in err
    _, err = call(
        capfd, "export", made / "over", "--base", tmp_path / "base", "--to", tmp_path / "x", fails=True
    )
    assert "use it with --adapter" in err
