"""What `rush launch` writes is a script, a manifest or a task in which a stranger's words are only words.

A script is run for real by bash, with stand-ins for Slurm's commands that write down what they were called with, in a folder
where a command hidden in an option would leave a file. A manifest must be the YAML of the documents that were meant.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from random import Random

import pytest
import yaml
from hypothesis import strategies as st

from rush.clusters import Job, Sky, check_nodes, documents, manifest, script, task, task_file
from rush.recipe_io import load_recipe
from tests.fuzz.harness import cases, explore, fuzz, run_command

HOSTILE = (
    "$(touch hacked)", "`touch hacked`", "; touch hacked", "a && touch hacked", "| touch hacked", "\n touch hacked", "a\n#SBATCH --wrap=x",
    "'; touch hacked; '", '"; touch hacked; "', "${IFS}touch", "$HOME", "$SCRATCH/run", "$(($(touch hacked)))", "a b", "é", "\x00", "\x1b[2J", "-x",
    "--help", "*", "~", "!1", "\\", "\r\n", "n" * 300, "", "\ud800", "{a,b}", "<(touch hacked)", "> hacked", "%j", "# x", "a: b", "- a", "&a", "? ", "\t",
)  # fmt: skip
OPTIONS = ("name", "run_folder", "time_limit", "partition", "account", "container", "venv", "image", "namespace", "storage",
           "storage_class", "memory_per_node", "environment", "words")  # fmt: skip
VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
STAND_INS = ("srun", "scontrol", "torchrun", "python")


def job_of(content: bytes) -> Job:
    """A job with hostile options: a case is a table of them."""
    options = json.loads(content)
    recipe = load_recipe("tiny", ["layout.ddp=2", "layout.fsdp=8", "batch.micro=1"])
    words = ("tiny", *options.pop("words", []))
    check_nodes(recipe, 2, 8)
    return Job(**{"name": "tiny", "run_folder": "/shared/runs/tiny", "words": words, **options}, recipe=recipe, nodes=2, gpus_per_node=8)  # fmt: skip


def hostile_job(chance: Random, content: bytes) -> bytes:
    table = dict(json.loads(content))
    for name in chance.sample(OPTIONS, chance.choice((1, 1, 2, 4))):
        value = "".join(chance.choice(HOSTILE) for _ in range(chance.choice((1, 1, 2, 3))))
        value = chance.choice((value, f"/shared/{value}", f"{value}/x"))
        table[name] = {"environment": {"SAID": value}, "words": [f"data.source={value}"]}.get(name, value)
    return json.dumps(table).encode()


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with stand-ins for Slurm's commands, which print their arguments."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in STAND_INS:
        (bin_folder / name).write_text(
            '#!/bin/bash\nprintf "%s\\0" "$@" >> "$SEEN"\nprintf "\\1" >> "$SEEN"\n'
        )
        (bin_folder / name).chmod(0o755)
    return tmp_path


@cases(0.02)
def test_a_script_runs_no_word_of_a_stranger(count: int, cluster: Path) -> None:
    """Only `bash -n` for most cases; every fourth script is run."""
    number = 0
    file, seen, work = cluster / "job.sbatch", cluster / "seen", cluster / "work"
    work.mkdir()
    values = {"SCRATCH": str(cluster / "scratch"), "HOME": str(cluster / "home"), "SEEN": str(seen)}
    environment = {**values, "PATH": f"{cluster / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "8"}  # fmt: skip

    def read(content: bytes) -> None:
        nonlocal number
        number += 1
        job = job_of(content)
        text = script(job)
        directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in directives), directives
        assert not re.search(r"^#SBATCH --wrap|^\s*touch", text, re.MULTILINE), text
        file.write_text(text)
        if number % 4:
            checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, check=False)
            assert checked.returncode == 0, checked.stderr
            return
        seen.unlink(missing_ok=True)
        safe = text.replace("mkdir -p --", "true").replace("source ", "true ")
        subprocess.run(["bash", "-c", safe], cwd=work, env=environment, capture_output=True, check=False)
        assert not list(work.iterdir()), f"a hidden command ran: {text}"
        named = {
            one[1:]
            for value in vars(job).values()
            if isinstance(value, str)
            for one in VARIABLE.findall(value)
        }
        if not seen.exists() and named - environment.keys():
            return  # `set -u`: a variable that the cluster does not set ends the job before anything is called
        called = [call.split("\0") for call in seen.read_text(errors="surrogateescape").split("\1")]
        step = next(call for call in called if "train" in call)
        place = step.index("train")
        assert step[place + 1 : place + 1 + len(job.words)] == list(job.words)
        expected = VARIABLE.sub(lambda found: environment.get(found[0][1:], ""), job.run_folder)
        assert step[step.index("--out", place) + 1] == expected

    fuzz("launch/slurm", read, [b"{}"], count, [hostile_job])


@cases(0.01)
def test_a_manifest_is_the_yaml_of_what_was_meant(count: int) -> None:
    def read(content: bytes) -> None:
        job = job_of(content)
        text = manifest(job)
        assert list(yaml.safe_load_all(text)) == documents(job)
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", job.label)

    fuzz("launch/kubernetes", read, [b"{}"], count, [hostile_job])


@cases(0.01)
def test_a_task_is_the_yaml_of_what_was_meant(count: int) -> None:
    def read(content: bytes) -> None:
        job = job_of(content)
        place = Sky(
            "H100", image=job.image, volume="shared", package=job.container, mounts={"~/x": job.run_folder}
        )
        assert yaml.safe_load(task_file(job, place)) == task(job, place)

    fuzz("launch/skypilot", read, [b"{}"], count, [hostile_job])


flags = ("--run", "--name", "--time", "--grace", "--nodes", "--gpus-per-node", "--partition", "--account", "--container", "--venv", "--image",
         "--namespace", "--storage", "--storage-class", "--cpus", "--memory", "--env", "--max-restarts", "--accelerator", "--infra", "--autostop", "--volume", "--bucket", "--mount", "--package")  # fmt: skip
lines = st.tuples(
    st.sampled_from(["--slurm", "--k8s", "--sky"]),
    st.lists(
        st.tuples(
            st.sampled_from(flags),
            st.one_of(st.sampled_from(HOSTILE), st.integers().map(str), st.text(max_size=9), st.just("A=b")),
        ),
        max_size=3,
    ),
).map(lambda drawn: json.dumps([drawn[0], *(word for pair in drawn[1] for word in pair)]).encode())


@cases(0.02)
def test_any_line_of_launch_options(count: int, tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        words = json.loads(content)
        base = ["launch", "tiny", "layout.ddp=8", "batch.micro=1", "batch.total_tokens=none"]
        run_command([*base, *words, "--out", str(tmp_path / "job")])

    explore("launch/options", lines, read, count)
