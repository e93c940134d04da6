"""`rush launch`: what it writes is checked against the clusters' own schemas, and a script is run, with stand-ins for Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rush.cli import app
from rush.clusters import Job, check_nodes, documents, manifest, script
from rush.errors import RecipeError
from rush.parallel.slurm_ranks import first_host, rank_variables
from rush.recipe_io import load_recipe, parse
from tests.clusters.jobs import JOBS, job
from tests.training.small_runs import ROOT, environment, rows, small_recipe, write_corpus

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (it comes with .[dev])")

SCHEMAS = Path(__file__).parent / "schemas"
SCHEMA_OF = {
    "PersistentVolumeClaim": "claim",
    "ConfigMap": "configmap",
    "TrainingRuntime": "trainingruntime",
    "TrainJob": "trainjob",
}


@pytest.mark.parametrize("name", JOBS)
def test_a_batch_script_is_bash_with_options_that_sbatch_has(name: str, tmp_path: Path) -> None:
    text = script(JOBS[name])
    file = tmp_path / "job.sbatch"
    file.write_text(text)
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    known = set((SCHEMAS / "sbatch-options.txt").read_text().split())
    lines = text.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert len(options) >= 9
    for option in options:
        match = re.fullmatch(r"--([a-z-]+)(=[^\s=]+)?", option)
        assert match, option
        assert match[1] in known, f"sbatch has no option --{match[1]}"
    # Slurm reads directives only before the first command.
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    given = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    assert (given["nodes"], given["gpus-per-node"], given["open-mode"]) == ("2", "8", "append")
    assert given["signal"] == "B:USR1@300"
    assert "requeue" in given
    assert given["ntasks-per-node"] == ("8" if name == "ranks by srun" else "1")
    assert ("--nnodes=2 --nproc-per-node=8" in text) == (name != "ranks by srun")
    assert "--resume" in text


@pytest.mark.parametrize("name", JOBS)
def test_a_manifest_validates_against_the_schemas(name: str) -> None:
    found = list(yaml.safe_load_all(manifest(JOBS[name])))
    assert found == documents(JOBS[name]), "what is read back is what was meant"
    assert [part["kind"] for part in found] == list(SCHEMA_OF)
    for part in found:
        schema = json.loads((SCHEMAS / f"{SCHEMA_OF[part['kind']]}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(part, schema)
    claim, settings, runtime, train_job = found
    label = claim["metadata"]["name"]
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"],
    }  # fmt: skip
    trainer = train_job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == label
    assert volumes["settings"]["configMap"]["name"] == settings["metadata"]["name"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
    import tomllib

    assert parse(tomllib.loads(settings["data"]["recipe.toml"])) == JOBS[name].recipe


@pytest.mark.parametrize("part", range(4))
def test_the_schemas_refuse_a_misspelt_key(part: int) -> None:
    whole = documents(job())[part]
    schema = json.loads((SCHEMAS / f"{SCHEMA_OF[whole['kind']]}.json").read_text())
    jsonschema.validate(whole, schema)

    def places(node: Any) -> list[dict[str, Any]]:
        inside = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        return ([node] if isinstance(node, dict) else []) + [
            found for value in inside for found in places(value)
        ]

    for place in places(whole):
        free = set(place) & {
            "storage",
            "nvidia.com/gpu",
            "recipe.toml",
            "trainer.kubeflow.org/trainjob-ancestor-step",
        }
        if not free:  # names of quantities, of files and of labels are the user's own
            place["numNode"] = 1
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(whole, schema)
            del place["numNode"]


@pytest.mark.parametrize(
    ("layout", "nodes", "gpus", "said"),
    [
        (
            ["layout.fsdp=8"],
            2,
            8,
            r"takes 8 ranks, but 2 nodes with 8 GPUs are 16; set layout\.ddp=2 or --nodes 1",
        ),
        (
            [],
            1,
            4,
            r"every size of the layout is 1, which takes 1 rank, but 1 node with 4 GPUs are 4; set layout\.ddp=4",
        ),
        (
            ["layout.fsdp=3"],
            2,
            4,
            r"set sizes whose product is 8, such as layout\.ddp=2 layout\.fsdp=4 alone",
        ),
        (["layout.ddp=4", "layout.fsdp=8"], 2, 8, "set --nodes 4"),
        ([], 0, 8, "--nodes is 0; allowed"),
    ],
)
def test_a_layout_for_another_number_of_gpus_is_refused_with_one_that_fits(
    layout: list[str], nodes: int, gpus: int, said: str
) -> None:
    recipe = load_recipe("tiny", [*layout, "batch.micro=1", "batch.total_tokens=393216"])
    with pytest.raises(RecipeError, match=said):
        check_nodes(recipe, nodes, gpus)


def test_the_command_writes_the_file_and_says_how_to_submit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "tiny", "layout.ddp=2", "--nodes", "1", "--gpus-per-node", "2"]
    done = CliRunner().invoke(app, [*words, "--slurm"])
    assert done.exit_code == 0, done.output
    assert "sbatch tiny.sbatch" in done.output
    assert (tmp_path / "tiny.sbatch").read_text().startswith("#!/bin/bash")
    shown = CliRunner().invoke(app, [*words, "--k8s", "--out", "-", "--env", "NCCL_DEBUG=INFO"])
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in list(yaml.safe_load_all(shown.output))[3]["spec"][
        "trainer"
    ]["env"]
    for wrong, match in (
        ([], "choose one"),
        (["--slurm", "--k8s"], "choose one"),
        (["--slurm", "--env", "9=1"], "NAME=VALUE"),
    ):
        with pytest.raises(RecipeError, match=match):
            CliRunner().invoke(app, [*words, *wrong], catch_exceptions=False)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[003-006,9],cpu1", "gpu003"), ("n[7,9-11]", "n7"),
        ("a-b[1-2]-ib,c", "a-b1-ib"), ("rack1-node[01-16]", "rack1-node01"),
    ],
)  # fmt: skip
def test_the_first_of_slurms_nodes_is_found(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_task_of_srun_is_a_rank_and_the_batch_script_is_none() -> None:
    task = {
        "SLURM_PROCID": "11", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "3", "SLURM_JOB_ID": "81234",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    }  # fmt: skip
    assert rank_variables(task) == {
        "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21234",
    }  # fmt: skip
    assert rank_variables({**task, "RANK": "0"}) == {}, "torchrun has spoken"
    in_script = {key: value for key, value in task.items() if "STEP" not in key}
    assert rank_variables(in_script) == {}
    assert rank_variables({}) == {}
    assert rank_variables({**task, "SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    text = small_recipe(
        write_corpus(tmp_path / "corpus"), schedule={"steps": 6, "warmup": 2}, layout={"ddp": 2}
    )
    path.write_text(text)
    return path


def free_port() -> str:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return str(held.getsockname()[1])


@pytest.mark.slow
def test_tasks_that_slurm_started_join_each_other(recipe: Path, tmp_path: Path) -> None:
    out, port = tmp_path / "out", free_port()
    command = [sys.executable, "-m", "rush", "train", str(recipe), "--out", str(out)]
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost",
             "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **environment(tmp_path / "cache"),
                **slurm,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "Done at step 6 of 6" in said[0]
    assert said[1].strip() == "", "rank 0 alone speaks"
    assert len(rows(out)) == 6


STAND_INS = {
    # srun here is one node: its options are dropped, and the command runs in its place, signals included.
    "srun": '#!/bin/bash\necho $$ > "$ASKED.srun"\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
    "scancel": '#!/bin/bash\nkill -TERM "$(cat "$ASKED.srun")"\n',
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "$@" >> "$ASKED"; fi\n',
    "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
}


@pytest.mark.slow
def test_a_script_trains_stops_before_its_time_limit_and_resumes_when_requeued(
    recipe: Path, tmp_path: Path
) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    out, asked = tmp_path / "a run", tmp_path / "asked"
    words = (
        str(recipe),
        "schedule.steps=400",
        "run.validate_every=0",
        "run.sample_every=0",
        "run.save_every=0",
    )
    chosen = load_recipe(words[0], words[1:])
    sbatch = tmp_path / "job.sbatch"
    sbatch.write_text(script(Job("small", chosen, words, 1, 2, str(out), max_restarts=0)))
    surroundings = {
        **environment(tmp_path / "cache"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ASKED": str(asked),
        "SLURM_JOB_ID": free_port(), "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_ON_NODE": "2", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    start: Callable[[], subprocess.Popen[str]] = lambda: subprocess.Popen(  # noqa: E731
        ["bash", str(sbatch)],
        cwd=ROOT,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first = start()
    deadline = time.monotonic() + 200
    while len(rows(out)) < 5:
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGUSR1)  # what sbatch's --signal does
    said, _ = first.communicate(timeout=200)
    assert first.returncode == 0, said
    assert "stopping after the current step" in said
    assert asked.read_text().split() == ["requeue", surroundings["SLURM_JOB_ID"]]
    done = len(rows(out))
    assert 5 <= done < 400
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    second = start()
    said, _ = second.communicate(timeout=280)
    assert second.returncode == 0, said
    assert f"Resuming from step-{done:06d}" in said
    assert [row["step"] for row in rows(out)] == list(range(1, 401))
    assert asked.read_text().count("requeue") == 1, "a run that is done is not queued again"


HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    '";touch pwned;"',
    "';touch pwned;'",
    "${HOME:-x}",
    "$((1+1))",
)


@pytest.mark.parametrize("field", ["run_folder", "venv", "container", "words", "image", "partition"])
def test_a_line_break_in_a_word_is_refused(field: str) -> None:
    value: Any = ("tiny", "a\ntouch pwned\n") if field == "words" else "a\n#SBATCH --wrap=x"
    with pytest.raises(RecipeError, match="one line without control characters"):
        job(**{field: value})


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", ["run_folder", "venv", "container", "words"])
def test_nothing_in_a_path_or_a_word_is_run_by_the_shell(field: str, text: str, tmp_path: Path) -> None:
    """Only a plain $NAME is expanded; every other character is part of the name."""
    said = tmp_path / "said"
    given, expected = (
        (f"$PLACE/{text}", f"/place/{text}") if field in ("run_folder", "venv") else (text, text)
    )
    value: Any = ("tiny", given) if field == "words" else given
    lines = script(job(**{field: value})).splitlines()
    start, end = (
        next(i for i, line in enumerate(lines) if line.startswith("set -euo")),
        lines.index("step=$!"),
    )
    commands = "\n".join(lines[start:end]).removesuffix("&")
    stubs = "\n".join(
        f'{name}() {{ printf "%s\\0" "$@" >> {said}; }}' for name in ("srun", "source", "mkdir", "scontrol")
    )
    surroundings = {"PATH": os.environ["PATH"], "PLACE": "/place", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_CPUS_ON_NODE": "8"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", f"{stubs}\n{commands}"],
        check=False,
        cwd=tmp_path,
        env=surroundings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["said"]
    assert any(expected in word for word in said.read_text().split("\0"))


@pytest.mark.parametrize("field", ["partition", "account", "memory_per_node", "time_limit"])
@pytest.mark.parametrize("value", ["gpu\n#SBATCH --wrap=id", "gpu --wrap=id", "", "$(id)"])
def test_a_directive_that_would_add_to_the_script_is_refused(field: str, value: str) -> None:
    with pytest.raises(
        RecipeError,
        match=r"of the job would be .* allowed are letters, digits|allowed: one line|is empty; give a value",
    ):
        script(job(**{field: value}))


@pytest.mark.parametrize("option", ["--run", "--venv", "--name", "--container"])
def test_an_option_whose_value_is_nothing_is_refused(option: str) -> None:
    """As where the shell puts in a variable that is not set: neither the default nor a word less in the script."""
    words = [
        "launch",
        "tiny",
        "layout.ddp=2",
        "--nodes",
        "1",
        "--gpus-per-node",
        "2",
        "--slurm",
        "--out",
        "-",
    ]
    done = CliRunner().invoke(app, [*words, option, ""])
    assert isinstance(done.exception, RecipeError)
    assert str(done.exception) == f"{option} is empty; give a value, or leave the option out."
