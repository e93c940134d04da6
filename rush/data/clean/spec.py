"""Load a cleaning pipeline from TOML, with one message for a mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rush.data.clean.stages import KINDS, CleaningPipeline
from rush.errors import RecipeError, nearest
from rush.ready import PIPELINES


def load_pipeline(name_or_path: str) -> CleaningPipeline:
    """A ready pipeline by name, or one by path."""
    return parse_pipeline(PIPELINES.read(PIPELINES.find(name_or_path)))


def parse_pipeline(tree: Mapping[str, Any]) -> CleaningPipeline:
    """The pipeline of a parsed TOML table, validated."""
    if not tree.get("stage") and not set(tree) - set(CleaningPipeline.model_fields):
        raise RecipeError(
            "the pipeline has no [[stage]], so nothing would be removed; add one, such as "
            'kind = "words" with min = 5.'
        )
    try:
        return CleaningPipeline.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = min(problems, key=lambda item: item["type"] != "extra_forbidden")
        raise RecipeError(_sentence(first, tree)) from None


def _sentence(problem: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    kind, found, path = problem["type"], problem.get("input"), list(problem["loc"])
    fields, where = CleaningPipeline.model_fields, "the pipeline"
    if len(path) > 1 and path[0] == "stage":
        table = tree["stage"][path[1]]
        named = table.get("name") or table.get("kind") if isinstance(table, dict) else None
        where = f"stage {int(path[1]) + 1}" + (f" ({named})" if named else "")
        path = path[2:]
        if path and path[0] in KINDS:
            fields = KINDS[str(path.pop(0))].model_fields
    key = ".".join(str(part) for part in path)
    if kind == "extra_forbidden":
        return f"{where}: {key} is not a key here; {nearest(key, fields)}"
    if kind == "missing":
        return f"{where}: {key} is missing; add it."
    if kind == "union_tag_not_found":
        return f"{where}: kind is missing; {nearest('', KINDS)}"
    if kind == "union_tag_invalid":
        tag = problem["ctx"]["tag"]
        return f"{where}: there is no stage of kind {tag!r}; {nearest(str(tag), KINDS)}"
    if kind == "value_error":
        return f"{where}: {problem['ctx']['error']}."
    if kind == "literal_error":
        return f"{where}: {key} is {found!r}; allowed: {problem['ctx']['expected']}."
    if not key and kind in ("model_attributes_type", "model_type"):
        return f"{where} is {found!r}; allowed: a table, written as [[stage]]."
    reason = re.sub(r"^(Input|List|String) should (be|have) ", "", problem["msg"])
    return f"{where}: {key} is {found!r}; allowed: {reason}."
