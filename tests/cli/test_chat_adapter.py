"""`rush chat` with base and adapter: by options, by commands on standard input, by a key at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rush.cli import main
from rush.data import Tokenizer
from rush.data.tokenizer import train_bpe
from rush.hub.peft import save_adapter
from rush.hub.weights import save_hf_folder
from rush.models import SIZES, build_model
from rush.models.adapters import AdapterSpec, adapt, adapters, chosen_linears, init_adapters

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that knows nothing, and an adapter that changes what it says."""
    import dataclasses

    path = tmp_path_factory.mktemp("models")
    tokenizer: Tokenizer = train_bpe([Path(__file__).read_text()], 300)
    shape = dataclasses.replace(
        SIZES["llama-tiny"], vocab_size=300, hidden=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate=48, context=256,
    )  # fmt: skip
    model = build_model(shape, seed=1)
    save_hf_folder(path / "base", model, shape)
    tokenizer.save(path / "base")
    adapt(model, {name: AdapterSpec(rank=2, alpha=64) for name, _ in chosen_linears(model, "all")})
    init_adapters(model, seed=2)
    with torch.no_grad():
        for _, _, adapter in adapters(model):
            adapter.b.normal_(generator=torch.Generator().manual_seed(3))
    save_adapter(path / "adapter", model, str(path / "base"))
    return path


def chat(
    lines: str, *words: str | Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Answers and remarks of a chat with these lines; greedy, so that an answer is the model's own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    capfd.readouterr()
    options = ("--max-tokens", "6", "--temperature", "0", "--template", "plain")
    with pytest.raises(SystemExit) as ended:
        main(["chat", *map(str, (*words, *options))])
    out, err = capfd.readouterr()
    assert ended.value.code in (0, None), err
    return out, err


def test_chat_switches_between_base_and_adapter(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(lines: str, *words: str | Path) -> tuple[str, str]:
        return chat(lines, *words, capfd=capfd, monkeypatch=monkeypatch)

    base, remarks = said("hello\n/switch\n", models / "base")
    assert "This model has no adapter" in remarks
    with_adapter, _ = said("hello\n", models / "base", "--adapter", models / "adapter")
    assert with_adapter != base
    both, remarks = said(
        "hello\n/base\n/again\n/adapter\n/again\n", models / "base", "--adapter", models / "adapter"
    )
    assert "Now answering with the base model." in remarks
    assert "Now answering with the adapter." in remarks
    assert both == with_adapter + base + with_adapter
    switched, _ = said("/switch\nhello\n/switch\n/again\n", models / "base", "--adapter", models / "adapter")
    assert switched == base + with_adapter


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_gives_the_same_answers(
    models: Path, where: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (models / "base", "--adapter", models / "adapter")
    plain, _ = chat("hello\n/switch\n/again\n", *words, capfd=capfd, monkeypatch=monkeypatch)
    streamed, _ = chat(
        "hello\n/switch\n/again\n", *words, "--offload", where, capfd=capfd, monkeypatch=monkeypatch
    )
    assert streamed == plain


def test_commands_are_explained_and_a_conversation_is_forgotten(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, remarks = chat(
        "/again\nhello\n/new\nhello\n/wat\n/quit\nhello\n",
        models / "base",
        capfd=capfd,
        monkeypatch=monkeypatch,
    )
    assert "There is no question to answer again" in remarks
    assert "New conversation." in remarks
    assert "Unknown command '/wat'" in remarks
    assert "/switch" in remarks
    once, _ = chat("hello\n", models / "base", capfd=capfd, monkeypatch=monkeypatch)
    assert answers == once + once


@pytest.mark.slow
def test_at_a_terminal_a_key_switches(models: Path) -> None:
    """A real pseudo-terminal: Ctrl-T while a line is half written throws the line away and switches."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rush", "chat", str(models / "base"), "--adapter", str(models / "adapter"),
         "--max-tokens", "3", "--temperature", "0", "--template", "plain", "--device", "cpu"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes, after: int = 0) -> None:
        nonlocal seen
        deadline = time.monotonic() + 90
        while text not in seen[after:]:
            assert time.monotonic() < deadline, seen.decode(errors="replace")
            ready, _, _ = select.select([ours], [], [], 1)
            if ready:
                try:
                    seen += os.read(ours, 65536)
                except OSError:
                    break
        assert text in seen[after:], seen.decode(errors="replace")

    try:
        wait_for(b"you> ")
        os.write(ours, b"half a li\x14")
        wait_for(b"Now answering with the base model.")
        at = len(seen)
        os.write(ours, b"\x14")
        wait_for(b"Now answering with the adapter.", at)
        os.write(ours, b"\r")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_merged_model_answers_as_base_and_adapter(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, _ = chat(
        "hello\n", models / "base", "--adapter", models / "adapter", capfd=capfd, monkeypatch=monkeypatch
    )
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(models / "adapter"), "--to", str(tmp_path / "merged"), "--json"])
    out, err = capfd.readouterr()
    assert ended.value.code in (0, None), err
    assert "Merged the adapters of 7 layers into their base." in err
    assert "model.safetensors" in json.loads(out)["files"]
    merged, _ = chat("hello\n", tmp_path / "merged", capfd=capfd, monkeypatch=monkeypatch)
    assert merged == apart


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["chat", "{models}/adapter"], 3, "holds an adapter, not a model; give its base's folder"),
        (["chat", "{models}/base", "--adapter", "{models}/nothing"], 3, "there is no folder"),
        (["chat", "{models}/base", "--adapter", "{models}/base"], 3, "is no adapter folder: it lacks"),
        (["merge", "{models}/base", "--to", "{tmp}/x"], 3, "is no adapter folder: it lacks"),
        (["merge", "{models}/adapter", "--base", "{models}/nothing", "--to", "{tmp}/x"], 2, "give the base's folder with --base"),
        (["merge", "{models}/adapter", "--to", "{models}"], 2, "exists and is not an empty folder"),
        (["export", "{models}/base", "--adapter", "--to", "{tmp}/x"], 3, "was not trained with adapters"),
        (["export", "{models}/base", "--adapter", "--dtype", "bfloat16", "--to", "{tmp}/x"], 2, "is for whole models"),
        (["chat", "{models}/base", "--template", "chatmal"], 2, "which is not a template"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_end_in_one_sentence(
    words: list[str], code: int, message: str, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word.format(models=models, tmp=tmp_path) for word in words])
    _, err = capfd.readouterr()
    assert ended.value.code == code, err
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
