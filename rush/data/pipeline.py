"""Preparation of large corpora on datatrove's executors.

Units, code and files are those of `prepare`; a unit runs in a local process (`local`), a Slurm array job (`slurm`) or a Ray
worker (`ray`), on a shared file system. The result is byte-identical, and one executor can resume what another began.

With Slurm, datatrove passes its jobs as a pickle in the preparation's `pipeline` folder; nothing that users share is pickled.
For a few gigabytes `prepare` is simpler and no slower.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rush.data.executor_options import executor_options
from rush.data.prepare import Preparation, Workspace, fingerprint, finish, open_workspace
from rush.data.readers import import_extra
from rush.data.shards import verify_shards
from rush.data.storage import prepared_folder, preparing
from rush.errors import DataError, MachineError, RecipeError, nearest

EXECUTORS = ("local", "slurm", "ray")
PRELOADED = ("datatrove.executor.local", "rush.data.datatrove_blocks", "rush.data.clean.run")


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

    `tasks` is the number of tasks, `workers` of concurrent ones; `options` go to datatrove's executor (for Slurm at least
    `partition` and `time`). With Slurm the jobs are only submitted: the folder is ready when the last one has written the
    manifest.
    """
    check_executor(executor, options or {})
    key, tokenizer = fingerprint(preparation)
    folder = prepared_folder(preparation.source, cache, key)
    with preparing(folder, force=force, wait=wait) as missing:
        if not missing:
            verify_shards(folder)
            return folder
        workspace = open_workspace(preparation, folder, key, tokenizer)
        runner, merger = build_executors(workspace, executor, tasks=tasks, workers=workers, options=options)
        if merger is None:
            with engine_running(executor):
                runner.run()
            _finish(workspace)
    if merger is not None:
        submit(merger)  # the array and, depending on it, the merge, which takes the lock
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
    """datatrove's executors of the units and, on Slurm, of the merge after them (else None)."""
    blocks = import_extra("rush.data.datatrove_blocks", "corpus", "Preparing with datatrove")
    num_tasks = min(tasks or 4 * (os.cpu_count() or 1), len(workspace.jobs))
    steps = [
        blocks.ReadUnits(workspace.jobs),
        blocks.TokenizeDocuments(str(workspace.folder / "tokenizer")),
        blocks.WriteShards(workspace.jobs, workspace.tokenizer.eos_id),
    ]
    logs = workspace.folder / "pipeline"
    runner = make_executor(
        executor,
        steps,
        tasks=num_tasks,
        workers=workers,
        options=options,
        logging_dir=str(logs),
        job_name="rush-tokenize",
    )
    if executor != "slurm":
        return runner, None
    merger = make_executor(
        executor,
        [blocks.MergeManifest(workspace)],
        tasks=1,
        options=options,
        logging_dir=str(logs / "merge"),
        job_name="rush-merge",
        depends=runner,
    )
    return runner, merger


def make_executor(
    executor: str,
    steps: list[Any],
    *,
    tasks: int,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    logging_dir: str,
    job_name: str,
    depends: Any = None,
    skip_completed: bool = False,
    purpose: str = "Preparing with datatrove",
) -> Any:
    """A datatrove executor. `job_name` and `depends` (the executor to wait for) are Slurm's.

    `skip_completed` skips tasks that datatrove marked as finished; without it the blocks skip finished units.
    """
    typed = _check_options(executor, options or {}, purpose)
    kind = _executor_kind(executor, purpose)
    fixed = {"tasks": tasks, "logging_dir": logging_dir, "skip_completed": skip_completed}
    if executor == "local":
        at_once = min(workers or os.cpu_count() or 1, tasks)
        return kind(steps, **{"workers": at_once, **typed, **fixed})
    if executor == "ray":
        import_extra("ray", "ray", f"{purpose} on Ray")
        at_once = min(workers or tasks, tasks)
        return kind(steps, **{"workers": at_once, **typed, **fixed})
    named = {"workers": workers or -1, "job_name": job_name}
    return kind(steps, **{**named, **typed, **fixed, "depends": depends})


def _executor_kind(executor: str, purpose: str) -> Any:
    module = import_extra(f"datatrove.executor.{executor}", "corpus", purpose)
    return getattr(module, f"{executor.capitalize()}PipelineExecutor")


def check_executor(executor: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown executor, missing or unknown options, or Slurm without sbatch."""
    _check_options(executor, options)
    if executor == "slurm" and shutil.which("sbatch") is None:
        raise MachineError("There is no sbatch here: submit from a node of a Slurm cluster.")


def submit(executor: Any, said: str = "above") -> None:
    """Submit a job and all it depends on. What sbatch says goes to standard error as it says it: `said` names the place."""
    try:
        executor.run()
    except subprocess.CalledProcessError as error:
        raise MachineError(
            f"Slurm did not take the job {executor.job_name}: sbatch ended with exit code {error.returncode}; "
            f"its reason is {said}. Check the options, and that Slurm answers (sinfo)."
        ) from error


def _check_options(
    executor: str, options: Mapping[str, Any], purpose: str = "Running datatrove"
) -> dict[str, Any]:
    """The options, each with its type."""
    if executor not in EXECUTORS:
        raise RecipeError(f"Unknown executor {executor!r}: {nearest(executor, EXECUTORS)}")
    missing = [name for name in ("partition", "time") if executor == "slurm" and name not in options]
    if missing:
        raise RecipeError(f"The slurm executor needs the option(s) {', '.join(missing)}.")
    return executor_options(_executor_kind(executor, purpose), executor, options) if options else {}


def exit_with_parent() -> None:
    """End this process when its parent dies. datatrove's workers and their manager would outlive a killed run, hold its lock and
    write into the next run's files."""
    connection = import_extra("multiprocess.connection", "corpus", "Running datatrove")
    parent = import_extra("multiprocess", "corpus", "Running datatrove").parent_process()
    if parent is None or any(thread.name == "exit-with-parent" for thread in threading.enumerate()):
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()


@contextlib.contextmanager
def engine_running(executor: str) -> Iterator[None]:
    """While an executor runs: its processes end with this one, and Ray is started if it is not running."""
    hook = threading.Event()  # lives as long as this frame; the hook is registered on it
    util = import_extra("multiprocess.util", "corpus", "Running datatrove")
    util.register_after_fork(hook, lambda _: exit_with_parent())
    if executor == "local":
        # The executor starts new workers for every step: forks of a process that has imported what they need.
        multiprocess = import_extra("multiprocess", "corpus", "Running datatrove")
        multiprocess.get_context("forkserver").set_forkserver_preload(["__main__", *PRELOADED])
    ray = import_extra("ray", "ray", "Running on Ray") if executor == "ray" else None
    if ray is None or ray.is_initialized():
        yield
        return
    # Workers start in other folders and must find this package where it is not installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
