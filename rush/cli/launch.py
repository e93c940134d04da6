"""`rush launch`: the batch script, the Kubernetes manifest or the SkyPilot task of a run on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.options import ExtraTechniques, Overrides, RecipeName
from rush.errors import RecipeError
from rush.files import write_atomic

if TYPE_CHECKING:
    from rush.clusters import Sky


def launch(
    recipe: RecipeName,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs, and so ranks, per node.")] = 8,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for sbatch.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="Write a manifest with a Kubeflow TrainJob.")] = False,
    sky: Annotated[bool, typer.Option("--sky", help="Write a task file for SkyPilot.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Output file, or - for stdout. Default: NAME.sbatch, NAME.yaml or NAME.sky.yaml."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Run folder on storage that all nodes share. Default: runs/NAME; /shared/runs/NAME with --k8s, and with "
            "--sky and a volume or a bucket."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Job name. Default: the recipe's name.")] = None,
    time: Annotated[str, typer.Option(help="Slurm: time limit, as in 24:00:00 or 2-00:00:00.")] = "24:00:00",
    grace: Annotated[
        int,
        typer.Option(
            help="Seconds before the time limit at which the run is signaled to stop and save.", min=60
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
    image: Annotated[
        str | None,
        typer.Option(help="Container image. Kubernetes: rush:latest by default. SkyPilot: none by default."),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes: the namespace.")] = None,
    storage: Annotated[str, typer.Option(help="Kubernetes: size of the shared volume.")] = "500Gi",
    storage_class: Annotated[
        str | None, typer.Option(help="Kubernetes: storage class of the shared volume.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(help="CPU cores per node. Default: the whole node.", min=1)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory per node: 500G for Slurm and SkyPilot, 500Gi for Kubernetes.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Environment variable for every rank, NAME=VALUE. May be repeated."),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="SkyPilot: the GPUs' name, such as H100 or A100-80GB.")
    ] = None,
    infra: Annotated[
        str | None,
        typer.Option(
            help="SkyPilot: cloud and region, such as aws/us-east-1 or kubernetes. Default: the cheapest."
        ),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="SkyPilot: spot machines.")] = False,
    autostop: Annotated[
        int, typer.Option(help="SkyPilot: minutes after which an idle cluster is stopped; 0: never.", min=0)
    ] = 10,
    volume: Annotated[
        str | None, typer.Option(help="SkyPilot: volume that all nodes mount at /shared, for the run folder.")
    ] = None,
    bucket: Annotated[
        str | None, typer.Option(help="SkyPilot, one node: bucket for the run folder, such as s3://NAME.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            help="SkyPilot: file, folder or bucket to copy to the nodes, PLACE=SOURCE. May be repeated."
        ),
    ] = None,
    package: Annotated[
        str | None,
        typer.Option(
            help="SkyPilot: package to install on a node with pip, a wheel or a requirement. Default: the image has rush."
        ),
    ] = None,
    technique: ExtraTechniques = None,
) -> None:
    """Write a Slurm script, a Kubernetes manifest or a SkyPilot task that trains a recipe, with requeue and resume.

    The product of the layout's sizes must be nodes × GPUs. Before its time limit a Slurm job is signaled,
    saves a checkpoint and is requeued; on every cluster the same command resumes from the last checkpoint.

    Examples:

      rush launch llama-3.1-8b layout.ddp=2 layout.fsdp=8 --nodes 2 --slurm --partition gpu --venv /shared/rush/.venv

      rush launch llama-3.1-8b layout.fsdp=16 --nodes 2 --k8s --image registry/rush:1 --storage 1Ti

      rush launch llama-3.1-8b layout.fsdp=8 --sky --accelerator H100 --spot --bucket s3://my-runs --image registry/rush:1
    """
    if (slurm, k8s, sky).count(True) != 1:
        raise RecipeError("choose one of --slurm, --k8s and --sky.")
    files = [path.expanduser().resolve() for path in technique or []]
    if files and k8s:
        raise RecipeError(
            f"--technique names a file of this machine ({files[0]}), which the pods do not have; install a package with the entry "
            "point rush.techniques into the image instead (CONTRIBUTING.md)."
        )

    from rush.clusters import Job, check_nodes, manifest, script, task_file
    from rush.clusters.skypilot import HOME, SHARED
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
    label = short_name(recipe) if name is None else name
    settings: dict[str, Any] = {
        "name": label,
        "recipe": chosen,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "time_limit": time,
        "grace_s": grace,
        "max_restarts": max_restarts,
        "environment": _environment(env or []),
        "partition": partition,
        "account": account,
        "container": container,
        "venv": venv,
        "torchrun": torchrun,
        "image": "rush:latest" if image is None else image,
        "namespace": namespace,
        "storage": storage,
        "storage_class": storage_class,
        "cpus_per_node": cpus,
        "memory_per_node": memory,
    }
    local = str(Path("runs").resolve() / label)
    names = {path: str(path) for path in files}
    if recipe.endswith(".toml"):
        names[Path(recipe).resolve()] = str(Path(recipe).resolve())
    place = None
    if sky:
        names = {path: path.name for path in names}
        copied = {f"{HOME}/{name}": str(path) for path, name in names.items()}
        if len(copied) < len(names):
            raise RecipeError(
                f"two of these files have one name on a node: {', '.join(map(str, names))}; rename one."
            )
        place = _place(accelerator, package, image, copied | _mounts(mount or []))
        place = replace(
            place, infra=infra, spot=spot, autostop_minutes=autostop, volume=volume, bucket=bucket
        )
        local = f"{SHARED}/runs/{label}" if place.keeps_runs else f"$HOME/rush/runs/{label}"
    words = [names[Path(recipe).resolve()] if recipe.endswith(".toml") else recipe, *changes]
    words += [word for path in files for word in ("--technique", names[path])]
    default = f"/shared/runs/{label}" if k8s else local
    folder = default if run is None else run
    job = Job(**settings, words=tuple(words), run_folder=folder)
    text = script(job) if slurm else manifest(job) if place is None else task_file(job, place)
    ending, submit = (
        ("sbatch", "sbatch") if slurm else ("yaml", "kubectl apply -f") if k8s else ("sky.yaml", "sky jobs launch")
    )  # fmt: skip
    target = out or Path(f"{job.label}.{ending}")
    if str(target) == "-":
        typer.echo(text, nl=False)
        return
    write_atomic(target, text)
    typer.echo(f"Wrote {target}. Submit it with: {submit} {target}")


def _place(accelerator: str | None, package: str | None, image: str | None, mounts: dict[str, str]) -> Sky:
    """SkyPilot's settings, from the options alone."""
    from rush.clusters import Sky

    if accelerator is None:
        raise RecipeError("--sky needs --accelerator, the GPUs' name: H100, A100-80GB, L4 (`sky gpus list`).")
    if package is None and image is None:
        raise RecipeError(
            "SkyPilot's machines come without rush; give --package dist/optimization_rush-VERSION-py3-none-any.whl "
            "(docs/install.md makes one) or a requirement for pip, or --image with an image that has it."
        )
    wheel = package is not None and package.endswith(".whl")
    if wheel and not Path(str(package)).expanduser().is_file():
        raise RecipeError(f"--package is {package}, but there is no such file.")
    lock = Path(__file__).resolve().parents[2] / "locks" / "cuda.txt"
    return Sky(
        accelerator=accelerator,
        package=str(Path(str(package)).expanduser().resolve()) if wheel else package,
        wheel=wheel,
        image=image,
        mounts=mounts,
        constraints=str(lock) if package is not None and lock.is_file() else None,
    )


def _mounts(given: list[str]) -> dict[str, str]:
    found = {}
    for word in given:
        place, equals, source = word.partition("=")
        if not equals or not place.startswith(("/", "~/")) or not source:
            raise RecipeError(
                f"--mount is {word!r:.200}; write PLACE=SOURCE, with a place that starts with / or ~/."
            )
        if "://" not in source:
            path = Path(source).expanduser().resolve()
            if not path.exists():
                raise RecipeError(f"--mount copies {source!r:.200}, which does not exist.")
            source = str(path)
        found[place] = source
    return found


def _environment(given: list[str]) -> dict[str, str]:
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise RecipeError(f"--env is {word!r}; write NAME=VALUE.")
        found[name] = value
    return found
