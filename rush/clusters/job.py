"""A job on a cluster: recipe, nodes, run folder, time limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rush.errors import RecipeError, printable
from rush.recipe import Recipe

OPTION_NAMES = {"run_folder": "run", "time_limit": "time", "memory_per_node": "memory"}
"""The options of `rush launch` that are not named after their field."""
MAX_NAME = 63
"""Longest DNS label, which Kubernetes requires of names."""


@dataclass(frozen=True)
class Job:
    """A run on a cluster. None means the cluster's own default."""

    name: str
    recipe: Recipe
    words: tuple[str, ...]
    """The recipe and its overrides, as `rush train` takes them."""
    nodes: int
    gpus_per_node: int
    run_folder: str
    """On storage that every node sees."""
    time_limit: str = "24:00:00"
    grace_s: int = 300
    """Seconds before the time limit at which the run is signaled to stop, for its last step and its checkpoint."""
    max_restarts: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    partition: str | None = None
    account: str | None = None
    container: str | None = None
    venv: str | None = None
    torchrun: bool = True
    """Whether torchrun starts the ranks of a node; without it Slurm starts each rank itself."""
    image: str = "rush:latest"
    namespace: str | None = None
    storage: str = "500Gi"
    storage_class: str | None = None
    cpus_per_node: int | None = None
    memory_per_node: str | None = None

    def __post_init__(self) -> None:
        """Refuse line breaks and other control characters, which would break a script or a manifest, and empty arguments (such
        as the value of an unset variable)."""
        texts = {_option(name): value for name, value in vars(self).items() if isinstance(value, str)}
        check_lines(texts)
        for name, value in texts.items():
            if not value:
                raise RecipeError(f"{name} is empty; give a value, or leave the option out.")
        check_lines({f"the environment variable {name}": value for name, value in self.environment.items()})
        check_lines({f"the word {number}": word for number, word in enumerate(self.words, start=1)})

    @property
    def label(self) -> str:
        """The name as a DNS label, which both clusters take."""
        found = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (found if found[:1].isalpha() else f"rush-{found}")[:MAX_NAME].rstrip("-")


def _option(name: str) -> str:
    """The option of `rush launch` that sets this field."""
    return "--" + OPTION_NAMES.get(name, name).replace("_", "-")


def check_lines(said: Mapping[str, str]) -> None:
    """Refuse texts of more than one line, or with control characters, by their names."""
    for name, value in said.items():
        if printable(value) != value or "\n" in value or "\t" in value:
            raise RecipeError(f"{name} is {value!r:.200}; allowed: one line without control characters.")


def check_nodes(recipe: Recipe, nodes: int, gpus_per_node: int) -> None:
    """Refuse a layout that does not match this number of GPUs, and suggest one that does."""
    for name, count in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if count < 1:
            raise RecipeError(f"{name} is {count}; allowed: whole numbers from 1.")
    total = nodes * gpus_per_node
    if recipe.world == total:
        return
    sizes = {axis: size for axis, size in recipe.layout.model_dump().items() if size != 1}
    said = (
        " and ".join(f"layout.{axis} is {size}" for axis, size in sizes.items())
        or "every size of the layout is 1"
    )
    legal = [f"layout.ddp={recipe.layout.ddp * (total // recipe.world)}"] if total % recipe.world == 0 else []
    if recipe.world % gpus_per_node == 0:
        legal.append(f"--nodes {recipe.world // gpus_per_node}")
    if not legal:
        legal.append(
            f"sizes whose product is {total}, such as layout.ddp={nodes} layout.fsdp={gpus_per_node} alone"
        )
    raise RecipeError(
        f"{said}, which takes {recipe.world} rank{'s' * (recipe.world != 1)}, but {nodes} node{'s' * (nodes != 1)} with "
        f"{gpus_per_node} GPU{'s' * (gpus_per_node != 1)} are {total}; set {' or '.join(legal)}."
    )
