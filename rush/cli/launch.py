"""`rush launch`: the batch script or the Kubernetes manifest of a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rush.cli.options import ExtraTechniques, Overrides, RecipeName
from rush.errors import RecipeError
from rush.files import write_atomic


def launch(
    recipe: RecipeName,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs, and so ranks, per node.")] = 8,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for sbatch.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="Write a manifest with a Kubeflow TrainJob.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Output file, or - for stdout. Default: NAME.sbatch or NAME.yaml."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Run folder on storage that all nodes share. Default: runs/NAME, or /shared/runs/NAME with --k8s."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Job name. Default: the recipe's name.")] = None,
    time: Annotated[str, typer.Option(help="Slurm: time limit, as in 24:00:00 or 2-00:00:00.")] = "24:00:00",
    grace: Annotated[
        int,
        typer.Option(
            help="Seconds before the time limit at which the run is asked to stop and save.", min=60
        ),
    ] = 300,
    max_restarts: Annotated[int, typer.Option(help="Restarts of failed ranks.", min=0)] = 3,
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: the account.")] = None,
    container: Annotated[str | None, typer.Option(help="Slurm: container image, run by pyxis.")] = None,
    venv: Annotated[str | None, typer.Option(help="Slurm: virtual environment to activate.")] = None,
    torchrun: Annotated[
        bool,
        typer.Option(help="Slurm: start the ranks of a node with torchrun; otherwise srun starts each rank."),
    ] = True,
    image: Annotated[str, typer.Option(help="Kubernetes: the container image.")] = "rush:latest",
    namespace: Annotated[str | None, typer.Option(help="Kubernetes: the namespace.")] = None,
    storage: Annotated[str, typer.Option(help="Kubernetes: size of the shared volume.")] = "500Gi",
    storage_class: Annotated[
        str | None, typer.Option(help="Kubernetes: storage class of the shared volume.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(help="CPU cores per node. Default: the whole node.", min=1)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory per node: 500G for Slurm, 500Gi for Kubernetes.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Environment variable for every rank, NAME=VALUE. May be repeated."),
    ] = None,
    technique: ExtraTechniques = None,
) -> None:
    """Write a Slurm batch script or a Kubernetes manifest that trains a recipe, with requeue and resume.

    The layout's sizes must multiply to nodes × GPUs. Before its time limit the job is asked to stop, saves a checkpoint and
    is requeued; the same command resumes from the last checkpoint.

    Examples:

      rush launch llama-3.1-8b layout.ddp=2 layout.fsdp=8 --nodes 2 --slurm --partition gpu --venv /shared/rush/.venv

      rush launch llama-3.1-8b layout.fsdp=16 --nodes 2 --k8s --image registry/rush:1 --storage 1Ti
    """
    if slurm == k8s:
        raise RecipeError("choose one of --slurm and --k8s.")
    files = [path.expanduser().resolve() for path in technique or []]
    if files and k8s:
        raise RecipeError(
            f"--technique names a file of this machine ({files[0]}), which the pods do not have; install a package with the entry "
            "point rush.techniques into the image instead (CONTRIBUTING.md)."
        )

    from rush.clusters import Job, check_nodes, manifest, script
    from rush.ready import short_name
    from rush.recipe_io import load_recipe
    from rush.techniques import check_recipe
    from rush.techniques.api.own_files import added

    changes = list(overrides or [])
    with added(files):
        chosen = load_recipe(recipe, changes, auto=True)
        check_nodes(chosen, nodes, gpus_per_node)
        if not chosen.auto:  # otherwise the ranks choose the micro batch first
            check_recipe(chosen)
    label = name or short_name(recipe)
    file = recipe.endswith(".toml")
    folder = run or (f"/shared/runs/{label}" if k8s else str(Path("runs").resolve() / label))
    job = Job(
        name=label,
        recipe=chosen,
        words=(
            str(Path(recipe).resolve()) if file else recipe,
            *changes,
            *(word for path in files for word in ("--technique", str(path))),
        ),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        run_folder=folder,
        time_limit=time,
        grace_s=grace,
        max_restarts=max_restarts,
        environment=_environment(env or []),
        partition=partition,
        account=account,
        container=container,
        venv=venv,
        torchrun=torchrun,
        image=image,
        namespace=namespace,
        storage=storage,
        storage_class=storage_class,
        cpus_per_node=cpus,
        memory_per_node=memory,
    )
    text = script(job) if slurm else manifest(job)
    target = out or Path(f"{job.label}.{'sbatch' if slurm else 'yaml'}")
    if str(target) == "-":
        typer.echo(text, nl=False)
        return
    write_atomic(target, text)
    typer.echo(f"Wrote {target}. Submit it with: {'sbatch' if slurm else 'kubectl apply -f'} {target}")


def _environment(given: list[str]) -> dict[str, str]:
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise RecipeError(f"--env is {word!r}; write NAME=VALUE.")
        found[name] = value
    return found
