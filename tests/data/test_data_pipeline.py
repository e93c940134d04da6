"""Preparation on datatrove gives the same folder, to the byte, as the plain path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rush.data import Preparation, verify_shards
from rush.data.pipeline import build_executors, prepare_pipeline
from rush.data.preparation_unit import run_unit
from rush.data.prepare import fingerprint, open_workspace
from rush.errors import DataError, MachineError, RecipeError

pytest.importorskip("datatrove")
ROOT = Path(__file__).parents[2]
SLURM = {"partition": "cpu", "time": "04:00:00", "env_command": "source /shared/venv/bin/activate"}


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    named = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: content for name, content in named.items() if not name.startswith("pipeline/")}


def run_script(executor: str, preparation: Preparation, cache: Path, **environment: str) -> None:
    """In a process of its own: the engines keep managers, loggers and daemons."""
    script = cache / "script.py"
    script.write_text(
        "import sys\nfrom rush.data import Preparation, sources\n"
        "from rush.data.pipeline import prepare_pipeline\n"
        "sources.MIN_UNIT_BYTES = 8192\n"
        "if __name__ == '__main__':\n"
        "    what = Preparation('files', (sys.argv[2],), tokenizer=sys.argv[3], validation=0.2)\n"
        "    prepare_pipeline(what, sys.argv[4], executor=sys.argv[1], tasks=3, workers=2)\n"
    )
    command = [sys.executable, str(script), executor, *preparation.files, preparation.tokenizer, str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_the_local_executor_writes_the_same_folder(
    preparation: Preparation, prepared: Path, tmp_path: Path
) -> None:
    run_script("local", preparation, tmp_path)
    folder = tmp_path / prepared.name
    verify_shards(folder, full=True)
    assert contents(folder) == contents(prepared)


@pytest.mark.slow
def test_ray_writes_the_same_folder(preparation: Preparation, prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run_script("ray", preparation, tmp_path, RAY_USAGE_STATS_ENABLED="0")
    folder = tmp_path / prepared.name
    verify_shards(folder, full=True)
    assert contents(folder) == contents(prepared)


@pytest.mark.usefixtures("small_units")
def test_the_blocks_assign_units_to_ranks_and_finish_what_prepare_began(
    preparation: Preparation, prepared: Path, tmp_path: Path
) -> None:
    from rush.data.datatrove_blocks import MergeManifest, jobs_of

    key, tokenizer = fingerprint(preparation)
    folder = tmp_path / prepared.name
    folder.mkdir()
    workspace = open_workspace(preparation, folder, key, tokenizer)
    dealt = [job.unit.index for rank in range(3) for job in jobs_of(workspace.jobs, rank, 3)]
    assert sorted(dealt) == list(range(len(workspace.jobs)))
    run_unit(workspace.jobs[1])
    begun = (folder / "train" / "00001.bin").stat().st_mtime_ns
    runner, _ = build_executors(workspace, "local", tasks=3)
    merge = MergeManifest(workspace)
    with pytest.raises(DataError, match="units are not prepared"):
        list(merge.run())
    for rank in (2, 0, 1):
        read, tokenize, write = runner.pipeline
        list(write.run(tokenize.run(read.run(None, rank, 3), rank, 3), rank, 3))
    list(merge.run())
    assert contents(folder) == contents(prepared)
    assert (folder / "train" / "00001.bin").stat().st_mtime_ns == begun


@pytest.mark.usefixtures("small_units")
def test_units_without_documents_after_a_filter_are_still_recorded(
    preparation: Preparation, tmp_path: Path
) -> None:
    key, tokenizer = fingerprint(preparation)
    workspace = open_workspace(preparation, tmp_path, key, tokenizer)
    runner, _ = build_executors(workspace, "local", tasks=1)
    read, tokenize, write = runner.pipeline
    kept = (document for document in read.run() if document.metadata["unit"] in (2, 3))
    list(write.run(tokenize.run(kept)))
    assert not workspace.missing()
    shards = sorted(path.name for path in tmp_path.glob("train/*.bin"))
    assert shards == ["00002.bin", "00003.bin"]


def slurm_script(executor: Any) -> str:
    """The batch script that a Slurm executor would submit."""
    pickled = executor.logging_dir.resolve_paths("executor.pik")
    arguments = executor.get_sbatch_args(min(executor.tasks, executor.max_array_size))
    return str(
        executor.get_launch_file_contents(arguments, f"srun -l -n 1 launch_pickled_pipeline {pickled}")
    )


def test_slurm_scripts_have_the_options_and_an_array_of_tasks(
    preparation: Preparation, tmp_path: Path
) -> None:
    key, tokenizer = fingerprint(preparation)
    workspace = open_workspace(preparation, tmp_path, key, tokenizer)
    runner, merger = build_executors(workspace, "slurm", workers=8, options=SLURM)
    script = slurm_script(runner)
    for line in (
        "#!/bin/bash",
        "#SBATCH --partition=cpu",
        "#SBATCH --time=04:00:00",
        f"#SBATCH --array=0-{runner.tasks - 1}%8",
        "#SBATCH --job-name=rush-tokenize",
        "source /shared/venv/bin/activate",
        f"srun -l -n 1 launch_pickled_pipeline {tmp_path}/pipeline/executor.pik",
    ):
        assert line in script.replace("  ", "").splitlines() or line in script
    assert merger.depends is runner
    assert "#SBATCH --array=0-0" in slurm_script(merger)


@pytest.mark.slow
@pytest.mark.usefixtures("small_units")
def test_the_slurm_jobs_run_as_submitted(
    preparation: Preparation, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Slurm's commands that runs each submitted script at once, here."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "sbatch").write_text(
        "#!/bin/bash\nscript=${@: -1}\n"
        'last=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p" $script)\n'
        'if grep -q "srun" $script; then\n'
        "  for task in $(seq 0 $last); do\n"
        f"    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here bash $script >> {tmp_path}/log 2>&1 || exit 1\n"
        "  done\nfi\necho Submitted batch job 17\n"
    )
    (commands / "srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do shift; done\nexec "$@"\n'
    )
    (commands / "scontrol").write_text("#!/bin/bash\necho here\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = {key: value for key, value in SLURM.items() if key != "env_command"}
    folder = prepare_pipeline(preparation, tmp_path / "cache", executor="slurm", tasks=2, options=options)
    verify_shards(folder, full=True)
    assert contents(folder) == contents(prepared)


def test_without_slurm_the_slurm_executor_is_refused(
    preparation: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no sbatch"):
        prepare_pipeline(preparation, tmp_path, executor="slurm", options=SLURM)


def test_a_job_that_slurm_does_not_take_is_one_sentence(
    preparation: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 3\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(MachineError, match=r"did not take the job .*exit code 3.*sinfo"):
        prepare_pipeline(preparation, tmp_path, executor="slurm", options=SLURM)


def test_bad_executors_are_refused(preparation: Preparation, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean 'slurm'"):
        prepare_pipeline(preparation, tmp_path, executor="slrum")
    with pytest.raises(RecipeError, match=r"needs the option\(s\) partition, time"):
        prepare_pipeline(preparation, tmp_path, executor="slurm")


def test_an_error_in_a_task_reaches_the_user(
    tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable[[Path, list[str]], Path]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["fine"])
    path.write_text(path.read_text() + "broken\n")
    what = Preparation("files", (str(path),), tokenizer=str(tokenizer_folder))
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON"):
        prepare_pipeline(what, tmp_path / "cache", executor="local", tasks=1, workers=1)
