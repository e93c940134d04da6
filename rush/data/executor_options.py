"""Options of datatrove's executors from the command line, validated and converted to their types."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from rush.errors import RecipeError, nearest

# Set by rush, or options that would run only a part of the work.
_OURS = frozenset(
    {"self", "pipeline", "tasks", "logging_dir", "skip_completed", "depends", "local_tasks", "local_rank_offset"}
)  # fmt: skip
_START_METHODS = ("fork", "forkserver", "spawn")


def executor_options(kind: type[Any], executor: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their types; RecipeError for one that the executor class `kind` does not have."""
    known = {
        name: parameter
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name not in _OURS
    }
    for name in options:
        if name not in known:
            raise RecipeError(f"The {executor} executor has no option {name!r}; {nearest(name, known)}")
    return {name: _typed(known[name], value) for name, value in options.items()}


def _typed(parameter: inspect.Parameter, value: Any) -> Any:
    """A string converted to the parameter's type; other values unchanged."""
    if not isinstance(value, str):
        return value
    name = parameter.name
    wanted = getattr(parameter.annotation, "__name__", str(parameter.annotation)).split(" |")[0]
    if wanted in ("int", "float"):
        number = _number(value, wanted)
        lowest = 1 if name == "workers" else 0
        if number is None or (number < lowest and number != parameter.default):
            kind = "a whole number" if wanted == "int" else "a number"
            raise RecipeError(f"The option {name} is {value!r}; allowed is {kind} of at least {lowest}.")
        return number
    if wanted == "bool":
        if value.lower() not in ("true", "false"):
            raise RecipeError(f"The option {name} is {value!r}; allowed: true, false.")
        return value.lower() == "true"
    if wanted == "dict":
        return _table(name, value)
    if wanted != "str":
        raise RecipeError(f"The option {name} cannot be given as a string: it takes {parameter.annotation}.")
    if name == "start_method" and value not in _START_METHODS:
        raise RecipeError(f"The option {name} is {value!r}; {nearest(value, _START_METHODS)}")
    return value


def _number(value: str, wanted: str) -> float | None:
    try:
        return int(value) if wanted == "int" else float(value)
    except ValueError:
        return None


def _table(name: str, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RecipeError(f"The option {name} is {value!r}; write it as a JSON object.")
    return found
