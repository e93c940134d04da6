"""Preparation for corpora that outgrow one machine, on datatrove's executors.

The same units, the same blocks of code and the same files as `prepare`; only who runs a unit differs:
processes here (`local`), an array of Slurm jobs (`slurm`), or workers of a Ray cluster (`ray`). All
of them must see the same file system. Because units are cut without regard to who runs them, the
folder comes out the same to the byte, and one way may finish what another began.

With Slurm, datatrove hands its jobs over as a pickled file in the preparation's own `pipeline` folder;
nothing that users exchange is pickled. For a corpus of a few gigabytes, `prepare` is simpler and no slower.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rush.data.prepare import Preparation, Workspace, clear, fingerprint, finish, folder_of, open_workspace
from rush.data.readers import import_extra
from rush.data.shards import verify_shards
from rush.data.storage import folder_lock, writable
from rush.errors import DataError, MachineError, RecipeError, nearest

EXECUTORS = ("local", "slurm", "ray")


def prepare_pipeline(
    preparation: Preparation,
    cache: str | Path,
    *,
    executor: str = "local",
    tasks: int | None = None,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    force: bool = False,
    wait: bool = True,
) -> Path:
    """Prepare with datatrove and return the folder.

    `tasks` is how many parts the work is dealt into, `workers` how many run at once, `options` go to
    datatrove's executor (for Slurm at least `partition` and `time`). With Slurm the jobs are only
    submitted: the folder is ready when the last of them has written the manifest.
    """
    _check_executor(executor, options or {})
    if executor == "slurm" and shutil.which("sbatch") is None:
        raise MachineError("There is no sbatch here: submit from a node of a Slurm cluster.")
    key, tokenizer = fingerprint(preparation)
    folder = folder_of(preparation, cache, key)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=wait):
            if force:
                clear(folder)
            if (folder / "manifest.json").is_file():
                verify_shards(folder)
                return folder
            workspace = open_workspace(preparation, folder, key, tokenizer)
            runner, merger = build_executors(
                workspace, executor, tasks=tasks, workers=workers, options=options
            )
            if merger is None:
                _run_here(runner, executor)
                _finish(workspace)
    if merger is not None:
        merger.run()  # submits the array, and itself to start after it; the merge takes the lock then
    else:
        verify_shards(folder)
    return folder


def _finish(workspace: Workspace) -> None:
    missing = len(workspace.missing())
    if missing:
        raise DataError(
            f"{missing} of {len(workspace.jobs)} units failed; the reasons are in "
            f"{workspace.folder / 'pipeline' / 'logs'}. Finished units are kept."
        )
    finish(workspace)


def build_executors(
    workspace: Workspace,
    executor: str,
    *,
    tasks: int | None = None,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """datatrove's executors for the units and, on Slurm, for the merge that follows them (else None)."""
    options = dict(options or {})
    _check_executor(executor, options)
    module = import_extra(f"datatrove.executor.{executor}", "corpus", "Preparing with datatrove")
    blocks = import_extra("rush.data.blocks", "corpus", "Preparing with datatrove")
    num_tasks = min(tasks or 4 * (os.cpu_count() or 1), len(workspace.jobs))
    steps = [
        blocks.ReadUnits(workspace.jobs),
        blocks.TokenizeDocuments(str(workspace.folder / "tokenizer")),
        blocks.WriteShards(workspace.jobs, workspace.tokenizer.eos_id),
    ]
    # What is done is known from the units' own records; datatrove's marks would only be a second truth.
    common = {"logging_dir": str(workspace.folder / "pipeline"), "skip_completed": False}
    if executor == "local":
        at_once = min(workers or os.cpu_count() or 1, num_tasks)
        runner = module.LocalPipelineExecutor(steps, tasks=num_tasks, workers=at_once, **common, **options)
        return runner, None
    if executor == "ray":
        import_extra("ray", "ray", "Preparing on Ray")
        at_once = min(workers or num_tasks, num_tasks)
        runner = module.RayPipelineExecutor(steps, tasks=num_tasks, workers=at_once, **common, **options)
        return runner, None
    array = {"tasks": num_tasks, "workers": workers or -1, "job_name": "rush-tokenise"}
    runner = module.SlurmPipelineExecutor(steps, **{**array, **common, **options})
    last = {"tasks": 1, "job_name": "rush-merge", "depends": runner}
    common["logging_dir"] = str(workspace.folder / "pipeline" / "merge")
    merger = module.SlurmPipelineExecutor([blocks.MergeManifest(workspace)], **{**options, **common, **last})
    return runner, merger


def slurm_script(executor: Any) -> str:
    """The batch script a Slurm executor would submit, to be read before it is trusted."""
    executor_file = executor.logging_dir.resolve_paths("executor.pik")
    array = min(executor.tasks, executor.max_array_size)
    return str(
        executor.get_launch_file_contents(
            executor.get_sbatch_args(array), f"srun -l -n 1 launch_pickled_pipeline {executor_file}"
        )
    )


def _check_executor(executor: str, options: Mapping[str, Any]) -> None:
    if executor not in EXECUTORS:
        raise RecipeError(f"Unknown executor {executor!r}: {nearest(executor, EXECUTORS)}")
    missing = [name for name in ("partition", "time") if executor == "slurm" and name not in options]
    if missing:
        raise RecipeError(f"The slurm executor needs the option(s) {', '.join(missing)}.")


def _run_here(runner: Any, executor: str) -> None:
    if executor != "ray":
        runner.run()
        return
    ray = import_extra("ray", "ray", "Preparing on Ray")
    if ray.is_initialized():
        runner.run()
        return
    # Workers start in folders of their own and must still find this package when it is not installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}, log_to_driver=False)
    try:
        runner.run()
    finally:
        ray.shutdown()
