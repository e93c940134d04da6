"""A ladder as a TOML file: a base recipe and an ordered list of what to add to it.

    recipe = "tiny"                          # the base recipe, by name or file
    rungs = [
      "fused_adamw",                         # a technique
      { name = "compile", scope = "block" }, # a technique with knobs
      { "batch.micro" = 8, claim = { gain = 0.5, regime = "…", source = "…" } },  # a change of the recipe, with a claim
      { name = "pure_bf16", replaces = ["amp_bf16"] },
      { name = "cudnn_attention", replaces = ["flash_attention"], keep = "faster" },  # built upon if it pays here
      { name = "checkpoint_full", keep = false, title = "Checkpointing" },  # measured, not built upon
    ]
    [base]                                   # changes of the recipe before the first rung
    techniques = []
    "batch.total_tokens" = "none"            # "none" removes an optional key
    [claim] ...                              # the claimed gain of the whole ladder over the base
    [measure] ...  [parity] ...  [search] ...

Keys with a dot are recipe keys, the rest of a table are the technique's knobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rush.errors import RecipeError, nearest
from rush.ready import LADDERS
from rush.recipe import Recipe
from rush.recipe_io import apply_override, assign, parse, read_tree, remove

Whole = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AnyConfig = TypeVar("AnyConfig", bound="ConfigTable")
OWN_TABLES = ("measure", "parity", "search")


class ConfigTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MeasureConfig(ConfigTable):
    """How rungs are timed."""

    processes: Whole = 1
    """Fresh processes per rung; every round measures each rung once, so that slow drift affects all alike."""
    clear: Annotated[float, Field(gt=0)] | None = None
    """If set, rungs that differ from the one before by more than this are not measured again; for long trials."""
    windows: Whole = 20
    """Timed samples per process."""
    window_ms: Seconds = 50.0
    warmup_max_steps: Whole = 40
    warmup_max_s: Seconds = 120.0
    timed_max_s: Seconds = 30.0
    """If samples would take longer than this, eight are enough."""
    limit_s: Seconds = 1200.0
    """Time limit of a trial."""
    noise_floor: Annotated[float, Field(ge=0, lt=1)] = 0.003
    """A smaller relative difference is never called real, whatever the samples say."""
    smaller: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """A rung that needs this much less peak memory is called smaller."""


class ParityConfig(ConfigTable):
    """How parity is judged: so many steps, on this batch."""

    steps: Whole = 10
    changes: dict[str, Any] = {}
    """Recipe keys of the parity run; the base's batch without them. A smaller model where fp32 would not fit."""


class ClaimConfig(ConfigTable):
    """The claimed gain of a rung or of the whole ladder; techniques bring their own (`Claim`)."""

    metric: Literal["tokens_per_s", "peak_memory_bytes"] = "tokens_per_s"
    gain: Annotated[float, Field(gt=-1, allow_inf_nan=False)]
    regime: str
    source: str
    relative_to: str | None = None
    """As with `Claim.relative_to`. Without it: the rung before; of the whole climb: the base."""


class SearchConfig(ConfigTable):
    """Searches made at the top of the ladder."""

    batch_from: Whole = 1
    batch_up_to: Whole | None = None
    neighbours: bool = False
    """Also try the sizes halfway between powers of two around the best one."""
    sequence_up_to: Whole | None = None
    sequence_with: list[str] = []
    """Techniques whose effect on the longest sequence is measured, each removed from the top in turn."""


@dataclass(frozen=True)
class Addition:
    """What one rung adds."""

    name: str
    title: str
    technique: str | dict[str, Any] | None
    changes: Mapping[str, Any]
    replaces: tuple[str, ...] = ()
    keep: bool | Literal["faster"] = True
    claim: Mapping[str, Any] | None = None
    """As the record writes it; None: the technique's own."""

    def supersedes(self, earlier: Addition) -> bool:
        """Whether this addition completely replaces an earlier one."""
        if earlier.technique is not None:
            return earlier.technique_name in (*self.replaces, self.technique_name)
        return earlier.changes.keys() <= self.changes.keys()

    @property
    def technique_name(self) -> str | None:
        return self.technique["name"] if isinstance(self.technique, dict) else self.technique

    @property
    def adds(self) -> list[Any] | dict[str, Any]:
        """As the record writes it: a list with the technique, or the changed keys."""
        return [self.technique] if self.technique is not None else dict(self.changes)


@dataclass(frozen=True)
class LadderPlan:
    """A ladder as read: everything but the measurements."""

    name: str
    base: Recipe
    additions: tuple[Addition, ...]
    measure: MeasureConfig
    parity: ParityConfig
    search: SearchConfig
    step_tokens: int | None = None
    """Tokens per optimizer step of the recipe that the ladder varies; None for one micro batch."""
    recipe: str = ""
    """The recipe that the ladder varies, by name or path."""
    claim: Mapping[str, Any] | None = None
    """The claimed gain of the whole ladder."""


def load_ladder(name_or_path: str, overrides: Iterable[str] = ()) -> LadderPlan:
    """A ladder by name or path. Overrides change the base recipe, or `measure.`, `parity.`, `search.` keys."""
    path = LADDERS.find(name_or_path)
    tree = LADDERS.read(path)
    allowed = ("about", "recipe", "rungs", "base", "claim", *OWN_TABLES)
    for key in tree:
        if key not in allowed:
            raise RecipeError(f"{path}: {key} is not a key of a ladder; {nearest(key, allowed)}")
    if not isinstance(tree.get("recipe"), str) or not isinstance(tree.get("rungs"), list):
        raise RecipeError(f"{path}: a ladder needs recipe = NAME and a list of rungs.")
    recipe = _recipe_beside(path, tree["recipe"])
    base_tree = read_tree(recipe)
    step_tokens = parse(base_tree).batch.total_tokens
    change(base_tree, tree.get("base", {}))
    for override in overrides:
        own = override.split(".", 1)[0] in OWN_TABLES
        apply_override(tree if own else base_tree, override)
    additions = tuple(_addition(entry, path) for entry in tree["rungs"])
    names = [addition.name for addition in additions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(
            f"{path}: the rung {twice[0]} is there twice; give each its own knobs or take one out."
        )
    return LadderPlan(
        path.stem,
        parse(base_tree),
        additions,
        read_table(MeasureConfig, tree, "measure", path),
        read_table(ParityConfig, tree, "parity", path),
        read_table(SearchConfig, tree, "search", path),
        step_tokens,
        recipe,
        _claim(tree, path, "the base"),
    )


def compose(base: Recipe, additions: Sequence[Addition]) -> Recipe:
    """The base with these additions, in order."""
    tree = base.model_dump(exclude_none=True)
    for addition in additions:
        entries = tree["techniques"]
        gone = {*addition.replaces, addition.technique_name}
        entries = [e for e in entries if (e["name"] if isinstance(e, dict) else e) not in gone]
        tree["techniques"] = entries + ([addition.technique] if addition.technique is not None else [])
        change(tree, addition.changes)
    return parse(tree)


def _recipe_beside(path: Path, name: str) -> str:
    """A recipe's path is relative to the ladder's folder; a name stays unchanged."""
    return str(path.parent / name) if name.endswith(".toml") else name


def change(tree: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set dotted keys of a recipe's tree; the value "none" removes a key."""
    for key, value in values.items():
        if value == "none":
            remove(tree, key)
        else:
            assign(tree, key, value)


def _addition(entry: Any, path: Path) -> Addition:
    if isinstance(entry, str):
        return Addition(entry, entry, entry, {})
    if not isinstance(entry, dict):
        raise RecipeError(f"{path}: a rung is {entry!r}; allowed: a technique's name, or a table.")
    table = dict(entry)
    title, keep, replaces = table.pop("title", None), table.pop("keep", True), table.pop("replaces", [])
    claim = _claim({"claim": table.pop("claim")}, path, "the rung before") if "claim" in table else None
    if not (isinstance(keep, bool) or keep == "faster") or not isinstance(replaces, list):
        raise RecipeError(
            f'{path}: in {entry!r}, keep is true, false or "faster", and replaces is a list of names.'
        )
    if "name" in table and not isinstance(table["name"], str):
        raise RecipeError(f"{path}: in {entry!r}, name must be a technique's name.")
    changes = {key: table.pop(key) for key in list(table) if "." in key}
    if table and "name" not in table:
        raise RecipeError(
            f"{path}: the rung {entry!r} names no technique; write name = NAME, or recipe keys with their dots."
        )
    technique: str | dict[str, Any] | None = None
    if table:
        technique = table if len(table) > 1 else table["name"]
    words = [f"{key}={value}" for key, value in changes.items()]
    if technique is not None:
        knobs = ", ".join(f"{key}={value}" for key, value in table.items() if key != "name")
        words.insert(0, f"{table['name']}({knobs})" if knobs else str(table["name"]))
    name = ", ".join(words)
    if not name:
        raise RecipeError(f"{path}: a rung adds nothing: {entry!r}.")
    return Addition(name, title or name, technique, changes, tuple(replaces), keep, claim)


def _claim(tree: Mapping[str, Any], path: Path, relative_to: str) -> Mapping[str, Any] | None:
    """The claim of a rung or of the whole ladder, as the record writes it."""
    if "claim" not in tree:
        return None
    read = read_table(ClaimConfig, tree, "claim", path).model_dump()
    return {**read, "relative_to": read["relative_to"] or relative_to}


def read_table(kind: type[AnyConfig], tree: Mapping[str, Any], key: str, path: Path | str) -> AnyConfig:
    """One of the tables that say how to measure; `path` is where it was found."""
    try:
        return kind.model_validate(tree.get(key, {}))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join([key, *map(str, problem["loc"])])
        if problem["type"] == "extra_forbidden":
            allowed = [f"{key}.{name}" for name in kind.model_fields]
            raise RecipeError(
                f"{path}: {where} is not a key of a ladder; {nearest(where, allowed)}"
            ) from None
        raise RecipeError(f"{path}: {where} is {problem['input']!r}: {problem['msg']}.") from None
