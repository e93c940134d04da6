"""`rush launch --sky`: what the task says, what of it a node's shell runs, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rush.cli import app
from rush.clusters import Job, Sky, task, task_file
from rush.errors import RecipeError
from tests.clusters.jobs import job

WHEEL = "/here/optimization_rush-1.0-py3-none-any.whl"
ONE_NODE: dict[str, Any] = {"nodes": 1, "gpus_per_node": 16}
TASKS: dict[str, tuple[Job, Sky]] = {
    "a volume": (job(), Sky("H100", image="registry/rush:1", volume="shared")),
    "a bucket and spot": (job(**ONE_NODE), Sky("H100", image="registry/rush:1", bucket="s3://our-runs/a", spot=True)),
    "a machine's own disk": (job(**ONE_NODE, run_folder="$HOME/rush/runs/tiny"), Sky("A100-80GB", package="optimization-rush>=1")),
    "everything": (
        job(cpus_per_node=96, memory_per_node="900G", environment={"SAID": "a 'quoted' $word"}, max_restarts=5),
        Sky("H100", package=WHEEL, wheel=True, infra="kubernetes", volume="shared", autostop_minutes=0, constraints="/here/cuda.txt",
            mounts={"~/rush/data": "/here/data", "/checkpoints": "s3://others"}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_a_task_asks_for_the_nodes_and_resumes_what_is_there(name: str) -> None:
    ours, place = TASKS[name]
    found = yaml.safe_load(task_file(ours, place))
    assert found == task(ours, place), "what is read back is what was meant"
    assert found["num_nodes"] == ours.nodes
    assert found["resources"]["accelerators"] == f"{place.accelerator}:{ours.gpus_per_node}"
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": ours.max_restarts}
    assert f"--nnodes={ours.nodes} --nproc-per-node={ours.gpus_per_node}" in found["run"]
    assert "--resume" in found["run"]


def test_a_task_says_where_the_run_is_kept_and_what_becomes_of_an_idle_cluster() -> None:
    found = {name: task(*given) for name, given in TASKS.items()}
    kept = {"idle_minutes": 10, "down": True}
    assert found["a volume"]["volumes"] == {"/shared": "shared"}
    assert found["a volume"]["envs"] == {"RUSH_CACHE": "/shared/cache"}
    assert found["a volume"]["resources"]["autostop"] == kept
    bucket = found["a bucket and spot"]
    assert bucket["file_mounts"]["/shared"] == {"source": "s3://our-runs/a", "mode": "MOUNT_CACHED"}
    assert (bucket["resources"]["use_spot"], bucket["resources"]["autostop"]) == (True, kept)
    # Taken down, this machine would take the only checkpoints with it; stopped, it keeps its disk.
    assert found["a machine's own disk"]["resources"]["autostop"]["down"] is False
    assert (
        ".venv/bin/python -m pip install 'optimization-rush>=1'\n" in found["a machine's own disk"]["setup"]
    )
    everything = found["everything"]
    assert everything["resources"]["autostop"] is False
    assert everything["resources"]["cpus"] == "96+"
    assert everything["resources"]["memory"] == "900+"
    assert everything["file_mounts"] == {
        "~/rush/data": "/here/data", "/checkpoints": "s3://others", f"~/rush/{Path(WHEEL).name}": WHEEL,
        "~/rush/constraints.txt": "/here/cuda.txt",
    }  # fmt: skip
    assert f"pip install ./{Path(WHEEL).name} -c constraints.txt" in everything["setup"]


def run_as_a_node(script: str, home: Path) -> list[str]:
    """The words that python was called with, on the second of two nodes."""
    stand_in = 'python() { printf "%s\\0" "$@" > "$HOME/said"; }; exec() { "$@"; }\n'
    surroundings = {
        "PATH": os.environ["PATH"], "HOME": str(home), "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_TASK_ID": "sky-1",
        "PLACE": "/place",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", stand_in + script.replace("mkdir -p --", "true")],
        cwd=home,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (home / "said").read_text().split("\0")


@pytest.mark.parametrize(
    "text", ["$(touch pwned)", "`touch pwned`", '";touch pwned;"', "';touch pwned;'", "${HOME:-x}"]
)
def test_nothing_in_a_word_or_a_path_is_run_on_a_node(text: str, tmp_path: Path) -> None:
    (tmp_path / "rush").mkdir()
    ours = job(words=("tiny", text), run_folder=f"$PLACE/{text}")
    said = run_as_a_node(task(ours, TASKS["a volume"][1])["run"], tmp_path)
    assert "--rdzv-endpoint=10.0.0.7:29400" in said
    assert said[said.index("train") + 1 :][:4] == ["tiny", text, "--out", f"/place/{text}"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["rush", "said"]
    setup = task(job(), Sky("H100", package=text, volume="shared"))["setup"]
    (tmp_path / "rush" / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / "rush" / ".venv" / "bin" / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$HOME/said"\n')
    python.chmod(0o755)
    assert run_as_a_node(setup, tmp_path)[:4] == ["-m", "pip", "install", text]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"accelerator": "H100:8"}, "--accelerator is 'H100:8'; allowed: a name of"),
        ({"accelerator": "H100\nrun: id"}, "one line without control characters"),
        ({"infra": "aws us"}, "--infra"),
        ({"volume": "Shared Disk"}, "--volume"),
        ({"bucket": "our-runs"}, "--bucket is 'our-runs'; allowed: a bucket's address"),
        ({"mounts": {"~/a": "b\nc"}}, "one line without control characters"),
    ],
)
def test_a_name_that_skypilot_has_not_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        Sky(**{"accelerator": "H100", **changes})


@pytest.mark.parametrize(
    ("ours", "place", "match"),
    [
        (job(), Sky("H100"), "2 nodes write one checkpoint together, and they share no file system; give --volume"),
        (job(), Sky("H100", bucket="s3://a"), "a bucket is no shared file system"),
        (job(**ONE_NODE), Sky("H100", spot=True), "a spot machine takes its disk with it"),
        (job(**ONE_NODE), Sky("H100", bucket="s3://a", volume="b"), "choose one"),
        (job(**ONE_NODE, memory_per_node="lots"), Sky("H100"), "whole GB, such as 500G"),
    ],
)  # fmt: skip
def test_a_run_that_could_not_be_resumed_is_refused(ours: Job, place: Sky, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        task(ours, place)


def test_the_command_copies_the_recipe_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    (tmp_path / "mine.toml").write_text(runner.invoke(app, ["recipes", "show", "tiny"]).output)
    (tmp_path / "text").mkdir()
    words = ["launch", "mine.toml", "layout.ddp=2", "--gpus-per-node", "2", "--sky"]
    whole = [*words, "--accelerator", "L4", "--image", "registry/rush:1", "--mount", "~/rush/text=text"]
    done = runner.invoke(app, whole)
    assert done.exit_code == 0, done.output
    assert "sky jobs launch mine.sky.yaml" in done.output
    found = yaml.safe_load((tmp_path / "mine.sky.yaml").read_text())
    assert found["file_mounts"] == {
        "~/rush/mine.toml": str(tmp_path / "mine.toml"),
        "~/rush/text": str(tmp_path / "text"),
    }
    assert "-m rush train mine.toml layout.ddp=2 \\\n" in found["run"]
    assert found["resources"]["image_id"] == "docker:registry/rush:1"
    assert '--out "$HOME"/rush/runs/mine --resume' in found["run"]
    for wrong, match in (
        (words, "--sky needs --accelerator"),
        ([*words, "--accelerator", "L4"], "come without rush"),
        ([*words, "--accelerator", "L4", "--package", "missing.whl"], "there is no such file"),
        ([*whole, "--mount", "text"], "write PLACE=SOURCE"),
        ([*whole, "--mount", "~/rush/x=missing"], "which does not exist"),
        ([*whole, "--slurm"], "choose one of --slurm, --k8s and --sky"),
    ):
        with pytest.raises(RecipeError, match=match):
            runner.invoke(app, wrong, catch_exceptions=False)
