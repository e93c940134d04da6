"""Numbers, names and folders made to break a program: each ends in one sentence, with its exit code, within two seconds.

The commands run in this process, under the limits of the fuzzers: two seconds of processor time and 4 GiB of further memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from rush.cli import main
from rush.hub.weights import save_hf_folder
from rush.models import Shape, build_model
from tests.fresh_cache import fresh_cache
from tests.fuzz.harness import LONGEST_MESSAGE, limits, unreadable
from tests.training.small_runs import rush, small_recipe, write_corpus

LARGE = 1 << 40
"""Bytes of a file with nothing in it: the system keeps none of them."""
SHAPE = Shape("gpt2", 16, 8, 8, 1, 2, 2, 4, 16, 1e-5, tied_head=True)
NAME, DIGITS, DEEP = "n" * 300, "9" * 5000, '{"a":' * 10_000
HUGE = 1_000_000_000_001


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe, a link to itself, and a folder of something else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    (tmp_path / "small.toml").write_text(small_recipe(write_corpus(tmp_path / "corpus")))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    return tmp_path


def config(**changes: object) -> Callable[[Path], list[str]]:
    """`rush generate` on a model folder whose config.json says something else."""

    def words(here: Path) -> list[str]:
        return folder_with("config.json", lambda text: json.dumps({**json.loads(text), **changes}))(here)

    return words


def folder_with(name: str, change: Callable[[str], str]) -> Callable[[Path], list[str]]:
    """`rush generate` on a model folder with one file changed."""

    def words(here: Path) -> list[str]:
        model = build_model(SHAPE)
        model.init_weights(0)
        save_hf_folder(here / "model", model, SHAPE)
        file = here / "model" / name
        file.write_text(change(file.read_text() if file.exists() else ""))
        return ["generate", "model", "--prompt", "x"]

    return words


def pipe(path: Path) -> None:
    """A pipe that nobody writes to: opening it as a file would wait for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.truncate(LARGE)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def with_file(make: Callable[[Path], None], name: str, *words: str) -> Callable[[Path], list[str]]:
    """A command in a folder where a file is something else."""

    def prepared(here: Path) -> list[str]:
        (here / name).parent.mkdir(exist_ok=True)
        make(here / name)
        return list(words)

    return prepared


def model_with(make: Callable[[Path], None], name: str) -> Callable[[Path], list[str]]:
    """`rush generate` on a model folder in which one file is something else."""

    def words(here: Path) -> list[str]:
        given = folder_with("generation_config.json", lambda text: "{}")(here)
        make(here / "model" / name)
        return given

    return words


def run_with(make: Callable[[Path], None], name: str, *words: str) -> Callable[[Path], list[str]]:
    """A command on the folder of a run, as far as its files are looked at, in which one file is something else."""

    def prepared(here: Path) -> list[str]:
        (here / "theirs").mkdir()
        (here / "theirs" / "recipe.toml").write_bytes((here / "small.toml").read_bytes())
        (here / "theirs" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
        make(here / "theirs" / name)
        return list(words)

    return prepared


def train(*changes: str, out: str = "new") -> Callable[[Path], list[str]]:
    return lambda here: ["train", "small.toml", *changes, "--out", out]


def line(*words: str) -> Callable[[Path], list[str]]:
    return lambda here: list(words)


def index(content: object) -> Callable[[Path], list[str]]:
    return folder_with("model.safetensors.index.json", lambda text: json.dumps(content))


CASES: dict[str, tuple[int, str, Callable[[Path], Sequence[str]]]] = {
    # d: sizes
    "hidden of 10**12": (2, "hidden must be a whole number from 1 to 1,048,576", train(f"model.shape.hidden={HUGE}")),
    "n_embd of 10**12": (3, "hidden must be a whole number from 1", config(n_embd=HUGE)),
    "n_layer of 10**12": (3, "num_layers must be a whole number from 1", config(n_layer=HUGE)),
    "n_layer within bounds": (3, "lacks the tensors", config(n_layer=2**12)),
    "a vocabulary within bounds": (3, "has the shape", config(vocab_size=2**24)),
    # e: memory
    "a micro batch of 10**12": (2, "batch.micro is 1000000000000", train("batch.micro=1000000000000")),
    "a forward pass of a billion tokens": (2, "= 1,024,000,000 tokens in one forward pass", train("batch.micro=4000000", "batch.sequence=256", "batch.total_tokens=none")),
    "memory below zero": (2, "run.memory_limit_gb is -1", train("run.memory_limit_gb=-1")),
    # h: numbers, nesting, links, names, types
    "a seed of 5,000 digits": (2, "run.seed is", train(f"run.seed={DIGITS}")),
    "a learning rate of 5,000 digits": (2, "optimizer.lr is", train(f"optimizer.lr={DIGITS}")),
    "a seed of 2**64": (2, "run.seed is a number with 20 digits", train(f"run.seed={2**64}")),
    "a learning rate of 1e309": (2, "optimizer.lr is inf", train("optimizer.lr=1e309")),
    "a recipe of 300 characters": (2, "there is no recipe named", line("train", NAME)),
    "a recipe's file of 300 characters": (2, "File name too long", line("train", f"{NAME}.toml")),
    "a recipe that links to itself": (2, "symbolic links", line("train", "./loop")),
    "a key of 300 characters": (2, "is not a key of a recipe", train(f"{NAME}=1")),
    "out of 300 characters": (4, "File name too long", train(out=NAME)),
    "out that links to itself": (4, "Cannot write", train(out="loop")),
    "weights in a folder of 300 characters": (3, "there is no folder", train(f"model.init_from={NAME}")),
    "weights in a link to itself": (3, "there is no folder", train("model.init_from=loop")),
    "a tokenizer of 300 characters": (3, "tokenizer", train(f"data.tokenizer={NAME}")),
    "files of 300 characters": (3, "n", train(f"data.files=['{NAME}']")),
    "a model of 300 characters": (3, "there is no folder", line("generate", NAME)),
    "a model that links to itself": (3, "there is no folder", line("generate", "loop")),
    "an export of 300 characters": (3, "there is no folder", line("export", NAME, "--to", "x")),
    "a resume of 300 characters": (2, "holds no run", line("train", "--out", NAME, "--resume")),
    "ladders of 300 characters": (3, "File name too long", line("compare", NAME, "loop")),
    "an explanation of 300 characters": (2, "File name too long", line("explain", "--from", NAME)),
    "Infinity in a config": (3, "is not valid JSON", config(layer_norm_epsilon=float("inf"))),
    "1e309 in a config": (3, "norm_eps must be a number", folder_with("config.json", lambda text: text.replace("1e-05", "1e309"))),
    "a deep config": (3, "recursion limit", folder_with("config.json", lambda text: DEEP)),
    "a list for a number": (3, "n_embd", config(n_embd=[8])),
    "a number for architectures": (3, "architectures", config(architectures=7)),
    "a text for a flag": (3, "tie_word_embeddings", config(tie_word_embeddings="yes")),
    "digits in a config": (3, "number out of range", folder_with("config.json", lambda text: text.replace('"n_layer": 1', f'"n_layer": {DIGITS}'))),
    "an index of lists": (3, "weight_map", index({"weight_map": {"a": ["b"]}})),
    "an index of a number": (3, "weight_map", index({"weight_map": 7})),
    "an index upwards": (3, "points to", index({"weight_map": {"a": "../../x.safetensors"}})),
    "a deep index": (3, "recursion limit", folder_with("model.safetensors.index.json", lambda text: DEEP)),
    # i: folders of others
    "out is another's folder": (2, "holds other files (notes.txt)", train(out="mine")),
    "out is a file": (2, "is a file", train(out="small.toml")),
    # files that are none: pipes without a writer, devices without an end, a terabyte of nothing
    "a recipe that is a pipe": (2, "it is a pipe or a device", with_file(pipe, "pipe.toml", "train", "./pipe.toml")),
    "a recipe without end": (2, "it is a pipe or a device", line("train", "/dev/zero")),
    "a recipe of a terabyte": (2, "it has 1,099,511,627,776 bytes", with_file(large, "large.toml", "train", "./large.toml")),
    "a ladder that is a pipe": (2, "it is a pipe or a device", with_file(pipe, "pipe.toml", "ladder", "./pipe.toml")),
    "a ladder without end": (2, "it is a pipe or a device", line("ladder", "/dev/zero")),
    "data from a pipe": (3, "it is a pipe or a device", lambda here: (pipe(here / "rows.jsonl"), train("data.files=['rows.jsonl']")(here))[1]),
    "Parquet from a pipe": (3, "it is a pipe or a device", lambda here: (pipe(here / "rows.parquet"), train("data.files=['rows.parquet']")(here))[1]),
    "data without end": (3, "it is a pipe or a device", train("data.files=['/dev/zero']")),
    "data to start from that is a pipe": (3, "it is a pipe or a device", with_file(pipe, "rows.jsonl", "start", "tiny", "rows.jsonl")),
    "rows of a terabyte": (3, "a line is longer than 256 MiB", lambda here: (large(here / "rows.jsonl"), train("data.files=['rows.jsonl']")(here))[1]),
    "a config without end": (3, "it is a pipe or a device", line("plan", "--config", "/dev/zero")),
    "a config that is a pipe": (3, "it is a pipe or a device", with_file(pipe, "config", "plan", "--config", "config")),
    "weights that are a pipe": (3, "it is a pipe or a device", model_with(pipe, "model.safetensors")),
    "weights that are a folder": (3, "Is a directory", model_with(folder, "model.safetensors")),
    "a config of a terabyte": (3, "it has 1,099,511,627,776 bytes", model_with(large, "config.json")),
    "an explanation without end": (2, "it is a pipe or a device", line("explain", "--from", "/dev/zero")),
    "an explanation that is a pipe": (2, "it is a pipe or a device", with_file(pipe, "made.json", "explain", "--from", "made.json")),
    "a run's recipe that is a pipe, compared": (0, "", run_with(pipe, "recipe.toml", "compare", "theirs", "theirs")),
    "a ladder's record without end, compared": (3, "", with_file(endless, "new/ladder.json", "compare", "new", "new")),
    "rows that are a pipe": (4, "it is a pipe or a device", run_with(pipe, "metrics.jsonl", "train", "--out", "theirs", "--resume")),
    # numbers on the command line
    "a number of ranks of 5,000 digits": (2, "--nproc is", line("train", "tiny", "--nproc", DIGITS)),
    "a number of devices of 5,000 digits": (2, "--devices is", line("scale", "tiny", "--devices", DIGITS)),
    "a number of devices with a superscript": (2, "--devices is", line("scale", "tiny", "--devices", "²")),
    "3,000 numbers of devices": (2, "--devices has 3,000 numbers", line("scale", "tiny", "--devices", ",".join(["1"] * 3000))),
    "a launcher with an open quote": (2, "is no command line", line("scale", "tiny", "--launcher", "'srun {ranks}")),
    "a launcher that is nothing": (2, "which is no command on this machine", line("scale", "tiny", "--launcher", "")),
    "a launcher that is not here": (2, "which is no command on this machine", line("scale", "tiny", "--launcher", "\x1b[2J {ranks}")),
    "a budget without end": (2, "--budget is", line("race", "tiny", "tiny", "--budget", f"{DIGITS}h")),
    "a search without end": (2, "--budget is", line("tune", "tiny", "--budget", f"{DIGITS}h")),
    "a repository of 9,000 characters": (2, "characters left out", line("push", "x", "n" * 9000)),
    "an option of 9,000 characters": (2, "characters left out", line("--" + "n" * 9000)),
}  # fmt: skip


@pytest.mark.timeout(60)  # what waits takes no processor time
@pytest.mark.parametrize("name", CASES)
def test_hostile_input_ends_in_one_sentence(
    name: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, says, words = CASES[name]
    if code == 4 and torch.cuda.is_available():
        pytest.skip("a GPU has its own memory")
    given = words(here)
    before = {path.name for path in here.iterdir()} | {"new"}
    with pytest.raises(SystemExit) as ended, limits():
        main(list(given))
    said = " ".join(capfd.readouterr().err.split())
    assert ended.value.code == code, said
    assert re.search(re.escape(says), said), said
    message = said[max(said.rfind("error: "), 0) :]  # typer has no such word
    assert unreadable(message, LONGEST_MESSAGE + len("error: ")) is None
    assert "Traceback" not in said
    assert "looks like a bug" not in said
    assert {path.name for path in here.iterdir()} <= before, "files were scattered"
    assert os.listdir(here / "mine") == ["notes.txt"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", DIGITS), ("RANK", "7"), ("WORLD_SIZE", "-1"), ("WORLD_SIZE", "\x1b[2J"), ("WORLD_SIZE", "²"), ("TORCHELASTIC_MAX_RESTARTS", "")],
)  # fmt: skip
def test_an_environment_of_no_launcher_ends_in_one_sentence(
    name: str, value: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(one, "0" if one != "WORLD_SIZE" else "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended, limits():
        main(["train", "small.toml", "layout.ddp=2", "--out", "new"])
    said = capfd.readouterr().err
    assert ended.value.code == 4, said
    assert f"the environment variable {name} is" in said
    assert unreadable(said, LONGEST_MESSAGE) is None


def test_a_memory_limit_of_a_megabyte_ends_in_one_sentence(tmp_path: Path) -> None:
    """In a process of its own: one that has run other tests may find all the memory it needs among what it freed."""
    path = tmp_path / "small.toml"
    path.write_text(small_recipe(write_corpus(tmp_path / "text")))
    words = ["run.memory_limit_gb=0.001", "schedule.steps=1", "schedule.warmup=0", "--out", tmp_path / "run"]
    done = rush("train", path, *words, cache=tmp_path / "cache")
    assert done.returncode == 4, done.stderr
    assert "out of memory" in done.stderr
    assert "Traceback" not in done.stderr
