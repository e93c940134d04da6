"""Uploads and commands in real processes, against a hub on the loopback interface."""

from __future__ import annotations

import getpass
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.hub.folders import load_model
from rush.lab.trial.starter import Streams
from tests.forks import shared_starter
from tests.fresh_cache import fresh_cache
from tests.hub.hub_server import TOKEN, Hub, running_hub
from tests.small_recipe import write_small_recipe

pytest.importorskip("huggingface_hub")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


Rush = Callable[..., Ended]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def rush(hub: Hub, work: Path) -> Iterator[Rush]:
    """Runs a command, with caches of its own; whatever happens, without a traceback and without the token."""
    known = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(work / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "",
        "RUSH_CACHE": str(fresh_cache(work / "cache")),
    }
    streams = Streams(Path(os.devnull), work / "stdout", work / "stderr")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in known.items():
            environment.setenv(name, value)
        starter = shared_starter(["rush.hub.push"])

        def run(*words: str | Path, **changes: str) -> Ended:
            codes = starter.rush([str(word) for word in words], streams, [{**known, **changes}], 120.0)
            ended = Ended(codes[0] if codes else -1, streams.stdout.read_text(), streams.stderr.read_text())
            said = ended.stdout + ended.stderr
            assert "Traceback" not in said, said
            assert TOKEN not in said
            return ended

        yield run
        starter.close()


@pytest.fixture(scope="module")
def trained(rush: Rush, work: Path) -> Path:
    recipe = write_small_recipe(work, steps=4, run="validate_every = 2\nsave_every = 4")
    done = rush("train", recipe, "--out", work / "run")
    assert done.returncode == 0, done.stderr
    return work / "run"


@pytest.fixture(scope="module")
def pushed(rush: Rush, hub: Hub, trained: Path) -> str:
    """The name of the run on the hub."""
    done = rush("push", trained, "--to", "someone/small", "--license", "apache-2.0", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
    assert "Uploaded" in done.stdout
    return "someone/small"


def files_of(hub: Hub, name: str, ref: str = "main") -> dict[str, bytes]:
    repo = hub.repos["model", name]
    return repo.commits[repo.refs[ref]]


def test_nothing_is_uploaded_without_a_name_or_a_token(rush: Rush, hub: Hub, trained: Path) -> None:
    assert "--to OWNER/NAME" in rush("push", trained).stderr
    done = rush("push", trained, "--to", "someone/forbidden")
    assert done.returncode == 4
    assert "does not let you upload" in done.stderr
    assert ("model", "someone/forbidden") not in hub.repos


def test_the_card_tells_the_run_and_nothing_of_this_machine(hub: Hub, pushed: str, work: Path) -> None:
    files = files_of(hub, pushed)
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers")
    for part in (
        'license: "apache-2.0"',
        "## Loss",
        "held-out loss",
        "## Verified",
        "step 4 of 4",
        '[model]\nname = "tiny"',
    ):
        assert part in card, part
    private = [str(work), str(Path.home()), platform.node(), os.sep + getpass.getuser() + os.sep]
    for name, content in files.items():
        if name != "model.safetensors":
            assert not [word for word in private if word and word in content.decode()], name


def test_what_was_pushed_is_read_by_transformers(hub: Hub, pushed: str, trained: Path, work: Path) -> None:
    """The same logits as rush's own model."""
    transformers: Any = pytest.importorskip("transformers")
    from huggingface_hub import snapshot_download

    folder = snapshot_download(pushed, endpoint=hub.url, cache_dir=work / "theirs", token=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("def main():")])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, load_model(trained)(ids), atol=1e-4, rtol=1e-4)


def test_a_run_starts_from_an_id_records_its_commit_and_resumes_from_it(
    rush: Rush, hub: Hub, pushed: str, work: Path
) -> None:
    words = [
        work / "small.toml",
        f"model.init_from={pushed}",
        f"data.tokenizer={work / 'run' / 'tokenizer'}",
        "schedule.steps=2",
    ]
    done = rush("train", *words, "schedule.warmup=0", "--out", work / "second")
    assert done.returncode == 0, done.stderr
    commit = hub.repos["model", pushed].refs["main"]
    assert f'init_from = "{pushed}@{commit}"' in (work / "second" / "recipe.toml").read_text()
    hub.repos["model", pushed].commit({"README.md": b"all gone"})
    again = rush("train", *words, "schedule.warmup=0", "--out", work / "second", "--resume")
    assert again.returncode == 0, again.stderr
    hub.repos["model", pushed].refs["main"] = commit


def test_generate_takes_an_id_and_its_cache_without_network(rush: Rush, pushed: str) -> None:
    words = ["generate", pushed, "--prompt", "def ", "--max-tokens", "3", "--json", "--device", "cpu"]
    first, second = rush(*words), rush(*words, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert json.loads(first.stdout) == json.loads(second.stdout)


@pytest.fixture(scope="module")
def adapted(rush: Rush, pushed: str, work: Path) -> Path:
    """A run that trained adapters beside the pushed model."""
    words = [
        work / "small.toml",
        f"model.init_from={pushed}",
        f"data.tokenizer={work / 'run' / 'tokenizer'}",
        "schedule.steps=2",
    ]
    done = rush("train", *words, "schedule.warmup=0", 'techniques=["lora"]', "--out", work / "lora")
    assert done.returncode == 0, done.stderr
    return work / "lora"


@pytest.mark.slow
def test_an_adapter_is_pushed_as_one_and_used_by_id(
    rush: Rush, hub: Hub, pushed: str, adapted: Path, work: Path
) -> None:
    done = rush(
        "push", adapted, "--to", "someone/adapter", "--private", "--revision", "first", HF_TOKEN=TOKEN
    )
    assert done.returncode == 0, done.stderr
    assert hub.repos["model", "someone/adapter"].private
    files = files_of(hub, "someone/adapter", "first")
    config = json.loads(files["adapter_config.json"])
    commit = hub.repos["model", pushed].refs["main"]
    assert (config["base_model_name_or_path"], config["revision"]) == (pushed, commit)
    assert f'base_model: "{pushed}"' in files["README.md"].decode()
    line = ["generate", pushed, "--adapter", "someone/adapter@first", "--max-tokens", "2", "--device", "cpu"]
    assert "needs your token" in rush(*line).stderr
    done = rush(*line, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    kept = [path for path in work.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert not kept


def test_a_run_with_adapters_is_pushed_merged_as_a_whole_model(
    rush: Rush, hub: Hub, pushed: str, adapted: Path, work: Path
) -> None:
    done = rush("push", adapted, "--to", "someone/merged", "--merged", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    files = files_of(hub, "someone/merged")
    assert "adapter_config.json" not in files
    assert f'base_model: "{pushed}"' in files["README.md"].decode()
    folder = work / "merged"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        whole, run, base = (load_model(path)(tokens) for path in (folder, adapted, work / "run"))
    torch.testing.assert_close(whole, run)
    assert not torch.allclose(whole, base), "the adapters are in it"


def test_a_dry_run_writes_the_folder_and_asks_nobody(rush: Rush, hub: Hub, trained: Path, work: Path) -> None:
    count = len(hub.requests)
    done = rush("push", trained, "--dry-run", "--out", work / "dry", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {path.name: path.stat().st_size for path in (work / "dry").iterdir()} == said["files"]
    assert len(hub.requests) == count


def test_a_private_upload_never_goes_to_a_public_repository(rush: Rush, hub: Hub, trained: Path) -> None:
    hub.add("someone/open", {"README.md": b"mine"})
    done = rush("push", trained, "--to", "someone/open", "--private", HF_TOKEN=TOKEN)
    assert done.returncode == 2
    assert "is public" in done.stderr
    assert files_of(hub, "someone/open") == {"README.md": b"mine"}
