"""Reading and writing recipes: TOML files, names, dotted overrides, error messages.

A recipe is found by name (the ready ones in `recipes/`) or by path. An override is `key=value` with a dotted key;
the value is parsed as TOML, or else taken as a string. A list also takes `techniques+=compile` and
`techniques-=compile`; an optional key takes `none`, which gives it its default again.

A recipe file may have a table `published`: the published data and tokenizer, which must be downloaded, while
the recipe itself reads text that every machine has. `data=published` switches to it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rush.errors import RecipeError, nearest
from rush.models import SIZES
from rush.ready import RECIPES
from rush.recipe import AUTO, FORMER_NAMES, IN_SCHEDULE, LARGEST_PASS, DataSection, Recipe, with_former_keys

PUBLISHED = "published"
_OVERRIDE = re.compile(r"^([A-Za-z_][\w.-]*?)\s*(\+=|-=|=)(.*)$", re.DOTALL)


def load_recipe(name_or_path: str, overrides: Iterable[str] = (), *, auto: bool = False) -> Recipe:
    """A recipe by name or path, with overrides applied and checked without a machine. With `auto`, batch.micro may be "auto"."""
    tree = read_tree(name_or_path)
    before = _micro(tree)
    for override in overrides:
        apply_override(tree, override)
    if auto and _micro(tree) == AUTO and "total_tokens" not in tree["batch"] and before != AUTO:
        # An override to `auto` keeps the tokens per step.
        tree["batch"]["total_tokens"] = parse(
            {**tree, "batch": {**tree["batch"], "micro": before}}
        ).step_tokens
    return parse(tree, auto=auto)


def _micro(tree: Mapping[str, Any]) -> Any:
    batch = tree.get("batch")
    return batch.get("micro") if isinstance(batch, dict) else None


def read_tree(name_or_path: str) -> dict[str, Any]:
    if name_or_path in SIZES and name_or_path not in RECIPES.names():
        alike = get_close_matches(name_or_path, RECIPES.names(), n=1, cutoff=0.0)[0]
        raise RecipeError(
            f"{name_or_path} is a model without its own recipe; use another model's, "
            f"as in {alike} model.name={name_or_path}."
        )
    return RECIPES.read(RECIPES.find(name_or_path))


def parse(tree: Mapping[str, Any], *, auto: bool = False) -> Recipe:
    """A validated recipe from a tree of plain values."""
    if isinstance(tree, dict) and PUBLISHED in tree:
        _published(tree)
        tree = {key: value for key, value in tree.items() if key != PUBLISHED}
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(_explain(error)) from None
    recipe.shape()
    if auto and recipe.auto:
        _check_step(recipe)
    else:
        recipe.accumulations  # noqa: B018  (computing it is the check)
        _check_pass(recipe)
    if recipe.batch.sequence > recipe.shape().context:
        raise RecipeError(
            f"batch.sequence is {recipe.batch.sequence} but {recipe.model.name} reads at most "
            f"{recipe.shape().context} tokens; lower batch.sequence or raise model.shape.context."
        )
    return recipe


def _check_pass(recipe: Recipe) -> None:
    """Refuse an absurdly large forward pass: gathering a billion tokens takes minutes before memory runs out."""
    if (tokens := recipe.micro * recipe.batch.sequence) > LARGEST_PASS:
        raise RecipeError(
            f"batch.micro × batch.sequence is {recipe.micro:,} × {recipe.batch.sequence:,} = {tokens:,} tokens in one forward pass; "
            f"allowed: at most {LARGEST_PASS:,}. Lower batch.micro; batch.total_tokens sets the tokens per step."
        )


def _check_step(recipe: Recipe) -> None:
    """With batch.micro = auto a step needs total_tokens, a multiple of the data ranks' sequences."""
    row = recipe.batch.sequence * recipe.data_ranks
    if recipe.batch.total_tokens is None:
        raise RecipeError(
            f'batch.micro is "{AUTO}", so batch.total_tokens must set the tokens per step; give a multiple of '
            f"batch.sequence × data ranks = {row:,}."
        )
    for total in recipe.step_sizes:
        if total % row:
            what, unit = ("batch.total_tokens is", "") if total == recipe.step_tokens else IN_SCHEDULE
            raise RecipeError(
                f"{what} {total:,}{unit}, which is not a multiple of batch.sequence × data ranks = {recipe.batch.sequence} × "
                f"{recipe.data_ranks} = {row:,}; the nearest allowed: {max(total // row, 1) * row:,}."
            )


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Change `tree` by one `key=value`, `key+=value` or `key-=value`."""
    match = _OVERRIDE.match(override)
    if not match:
        raise RecipeError(f"the override {override!r} is not valid; write key=value, as in batch.micro=32.")
    key, operator, text = match.groups()
    value = _read_value(text.strip())
    if (key, operator, value) == ("data", "=", PUBLISHED):
        _take_published(tree)
        return
    if key == "run.trackers" and isinstance(run := tree.get("run"), dict):
        tree["run"] = _current_keys(run)
    if operator == "=" and value == "none" and '"' not in text and _optional(key):
        remove(tree, key)
        return
    if operator == "=":
        assign(tree, key, value)
        return
    node = value_at(tree, key)
    node = _default_of(key) if node is None else node
    if not isinstance(node, list):
        raise RecipeError(
            f"{key}{operator} works on lists only, such as techniques; {key} is not one. Use {key}=."
        )
    added = value if isinstance(value, list) else [value]
    if operator == "+=":
        assign(tree, key, [*node, *added])
        return
    for name in added:
        kept = [entry for entry in node if _name(entry) != _name(name)]
        if len(kept) == len(node):
            raise RecipeError(f"{override!r}: {name!r} is not in {key}, which is {node}.")
        node = kept
    assign(tree, key, node)


def _current_keys(run: dict[str, Any]) -> dict[str, Any]:
    """The table without the keys that `run.trackers` replaced, which would change what an override says."""
    try:
        return with_former_keys(run)
    except ValueError as error:
        raise RecipeError(f"{error}.") from None


def _published(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The table of published data in a recipe's tree; empty without one."""
    values = tree.get(PUBLISHED, {})
    known = [f"data.{name}" for name in DataSection.model_fields]
    if not isinstance(values, dict):
        raise RecipeError(f"{PUBLISHED} is {_short(values)}; allowed: a table of data. keys.")
    for key in values:
        if key not in known:
            raise RecipeError(
                f"{PUBLISHED}.{_short(key)} is not a key of a recipe's data; {nearest(key, known)}"
            )
    return values


def _take_published(tree: dict[str, Any]) -> None:
    """Use the published data of a recipe, instead of text that every machine has."""
    values = _published(tree)
    if not values:
        raise RecipeError(
            f"data={PUBLISHED} needs a recipe file with a table [{PUBLISHED}], as the ready recipes of published models have; here "
            "set data.source, data.tokenizer and data.template."
        )
    remove(tree, "data.vocab_size")
    for key, value in values.items():
        assign(tree, key, value)


def _optional(key: str) -> bool:
    """Whether a key's default is none (a key without a value, as batch.total_tokens)."""
    field = _field(key)
    return field is not None and not field.is_required() and field.default is None


def _default_of(key: str) -> Any:
    """The default of a list; an empty one for an unknown key, which is refused later."""
    field = _field(key)
    return [] if field is None or field.is_required() or field.default is None else field.default


def _field(key: str) -> FieldInfo | None:
    """The definition of a dotted key."""
    *parents, last = key.split(".")
    part: type[BaseModel] = Recipe
    for name in parents:
        inner = part.model_fields[name].annotation if name in part.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        part = inner
    return part.model_fields.get(last)


def value_at(tree: Any, key: str) -> Any:
    """The value of a dotted key in a tree of dicts; None where there is none, the tree itself for no key."""
    for part in key.split(".") if key else ():
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def remove(tree: dict[str, Any], key: str) -> None:
    """Take a dotted key out of a tree of dicts, where it is."""
    parents, _, last = key.rpartition(".")
    node = value_at(tree, parents)
    if isinstance(node, dict):
        node.pop(last, None)


def _name(entry: Any) -> Any:
    name = entry.get("name") if isinstance(entry, dict) else entry
    return FORMER_NAMES.get(name, name) if isinstance(name, str) else name


INSTEAD = {"schedule.steps": "epochs", "schedule.epochs": "steps"}
"""Two keys for the length of a run: setting one replaces the other."""


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in a tree of dicts."""
    *parents, last = key.split(".")
    for position, part in enumerate(parents):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise RecipeError(
                f"{'.'.join(parents[: position + 1])} is a value, not a section with keys; found {key}."
            )
    tree[last] = value
    if key in INSTEAD:
        tree.pop(INSTEAD[key], None)


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, an integer of thousands of digits, thousands of brackets
        return text


CONSTANT_BATCH = {"batch.schedule": None}
"""Remove the batch-size schedule, which recipes of a few steps replace by one size."""


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A copy with dotted keys changed, validated."""
    tree = recipe.model_dump(exclude_none=True)
    for key, value in values.items():
        assign(tree, key, value)
    return parse(tree, auto=recipe.auto)


def write_toml(recipe: Recipe) -> str:
    """The fully resolved recipe as TOML; reading it back gives an equal recipe."""
    tree = recipe.model_dump(exclude_none=True)
    lines = [f"{key} = {toml_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{name} = {toml_value(item)}" for name, item in value.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    assert isinstance(value, dict), value
    pairs = (f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
    return "{" + ", ".join(pairs) + "}"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_string(key)


def _toml_string(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
    safe = (escapes.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 0x20 or c == "\x7f" else c) for c in text)
    return f'"{"".join(safe)}"'


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The old and the new value of every key on which two recipes differ."""
    flat_old, flat_new = _flat(old.model_dump()), _flat(new.model_dump())
    keys = sorted(flat_old.keys() | flat_new.keys())
    values = {key: (flat_old.get(key), flat_new.get(key)) for key in keys}
    return {key: (before, after) for key, (before, after) in values.items() if before != after}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _explain(error: ValidationError) -> str:
    """The first problem as one sentence; the others counted."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda item: item["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    message = _sentence(first, path)
    rest = len({tuple(item["loc"][:2]) for item in problems}) - 1
    return message + (f" ({rest} more like it in this recipe.)" if rest else "")


def _sentence(problem: Mapping[str, Any], path: list[str]) -> str:
    kind, found = problem["type"], problem.get("input")
    if path and path[0] == "techniques":
        return f'techniques: found {_short(found)}; allowed: names, or tables such as {{name = "compile", mode = "default"}}.'
    where = ".".join(path)
    if path[:2] == ["model", "shape"] and len(path) > 2:
        return (
            f"model.shape.{path[2]} is {_short(found)} ({_kind_of(found)}); allowed: a number, true or false, or for rope_scaling a "
            "table of numbers and a rope_type."
        )
    if kind == "extra_forbidden":
        part = _section_at(path[:-1])
        allowed = [name if len(path) == 1 else ".".join([*path[:-1], name]) for name in part.model_fields]
        return f"{where} is not a key of a recipe; {nearest(where, allowed)}"
    if kind == "missing":
        return f"{where} is missing; add it to the recipe or give it as {where}=VALUE."
    if kind == "value_error":
        return f"{problem['ctx']['error']}."
    if kind == "literal_error":
        return f"{where} is {_short(found)}; allowed: {problem['ctx']['expected']}."
    reason = re.sub(r"^Input should be ", "", problem["msg"])
    if kind in ("model_type", "model_attributes_type"):
        reason = f"a table with the keys {', '.join(_section_at(path).model_fields)}"
    return f"{where} is {_short(found)} ({_kind_of(found)}); allowed: {reason}."


def _short(value: object) -> str:
    """The found value, shortened to fit into a message."""
    whole = repr(value)
    return whole if len(whole) <= 200 else f"{whole[:120]}… ({len(whole):,} characters)"


def _kind_of(value: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a table")


def _section_at(path: list[str]) -> type[BaseModel]:
    part: type[BaseModel] = Recipe
    for name in path:
        annotation = part.model_fields[name].annotation
        candidates = [annotation, *get_args(annotation)]
        part = next(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))
    return part
