"""Write the table of docs/scale.md that says what stands beside what: `python scripts/beside_table.py`.

Nothing is typed by hand: every technique is checked beside every axis of the layout, as `rush train` would check it, on a
machine on which each can run. Where its defaults are refused, the values of a knob that are not are found by trying.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.errors import RecipeError  # noqa: E402
from rush.parallel import AXES  # noqa: E402
from rush.plan.planning import unmet  # noqa: E402
from rush.plan.target import target_of  # noqa: E402
from rush.recipe import Knob, Recipe  # noqa: E402
from rush.recipe_io import load_recipe  # noqa: E402
from rush.techniques import Technique, conflict_reason, registry, resolve_uses  # noqa: E402

PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- beside: begin, by scripts/beside_table.py -->", "<!-- beside: end -->"
ORDER = tuple(axis for axis in ("ddp", "fsdp", "tp", "pp", "cp") if axis in AXES)
MODELS, OBJECTIVES = ("llama-3.2-1b", "gpt2-124m"), ("lm", "sft")
ON_CPU = ("cpu_attention", "fp16_matmul")
"""This table is of GPUs. (What they say themselves: the first does not stand beside cp, the second not beside tp.)"""
BLOCKS: Mapping[str, Knob] = {"name": "compile", "scope": "block"}
COMPANIONS: tuple[tuple[Any, ...], ...] = (
    (),
    ("amp_bf16",),
    ("pure_bf16",),
    ("amp_bf16", "flash_attention"),
    ("amp_bf16", BLOCKS),
)


def table(names: Collection[str] | None = None) -> str:
    """The text between the marks: techniques that do not stand beside every axis just as they are."""
    rows, fine, reasons = [], [], {}
    for name, technique in registry().ours().items():
        if name in (*AXES, *ON_CPU) or (names is not None and name not in names):
            continue
        cells = [beside(technique, axis) for axis in ORDER]
        if set(cells) == {"yes"}:
            fine.append(f"`{name}`")
            continue
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
        for axis in ORDER:
            if axis in technique.conflicts:
                sentence = conflict_reason(technique, registry()[axis])
                reasons.setdefault((name, sentence), []).append(f"`{axis}`")
    said = [f"- `{name}` beside {_listed(axes)}: {sentence}." for (name, sentence), axes in reasons.items()]
    head = ["technique", *(f"`{axis}`" for axis in ORDER)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *rows]
    return "\n\n".join(
        ["\n".join(lines), "\n".join(said), f"Just as they are beside every axis: {', '.join(fine)}."]
    )


def beside(technique: Technique, axis: str) -> str:
    """`yes`, `no`, or the knob that must be set for it."""
    if axis in technique.conflicts:
        return "no"
    base = _base(technique.name)
    if _stands(technique.name, {}, axis, {}, base):
        return "yes"
    found: dict[str, list[str]] = {}
    for owner, knob, value in _settings(technique, registry()[axis]):
        own, its = ({knob: value}, {}) if owner == technique.name else ({}, {knob: value})
        if _stands(technique.name, own, axis, its, base):
            said = knob if owner == technique.name else f"{owner}: {knob}"
            found.setdefault(said, []).append(str(value).lower() if isinstance(value, bool) else str(value))
    assert found, (
        f"{technique.name} is refused beside {axis} by a requirement, and no knob helps: make it a conflict"
    )
    return " or ".join(f"`{knob} = {', '.join(values)}`" for knob, values in found.items())


def _settings(*techniques: Technique) -> Iterator[tuple[str, str, Knob]]:
    for technique in techniques:
        for knob, known in technique.knobs.items():
            yield from ((technique.name, knob, value) for value in known.values[1:])


@cache
def _base(name: str) -> tuple[Any, ...]:
    """A recipe in which the technique stands on one rank: model, objective, and what it needs beside it."""
    for model, kind, more in product(MODELS, OBJECTIVES, COMPANIONS):
        if name not in more and _stands(name, {}, "", {}, found := (model, kind, *more)):
            return found
    raise AssertionError(f"no recipe in which {name} stands alone; tell this script of one")


def _stands(
    name: str, knobs: dict[str, Knob], axis: str, its: dict[str, Knob], base: tuple[Any, ...]
) -> bool:
    model, kind, *more = base
    entries = [*more, {"name": name, **knobs}, *([{"name": axis, **its}] if its else [])]
    size = {axis: 2} if axis else {}
    plain = load_recipe(model)
    data = plain.model_dump() | {"techniques": entries}
    data["layout"] |= size
    data["objective"] |= {"kind": kind}
    data["batch"] |= {"micro": 2, "sequence": 1024, "total_tokens": 32768}
    return not refused(Recipe.model_validate(data))


def refused(recipe: Recipe) -> list[str]:
    """Why this recipe would not run on an H200, libraries apart."""
    try:
        for use in resolve_uses(recipe):
            if use.technique.check_sizes is not None:
                use.technique.check_sizes(recipe, use.knobs)
    except RecipeError as error:
        return [str(error)]
    return list(unmet(recipe, target_of("h200-sxm", 2)))


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def written(page: str, names: Collection[str] | None = None) -> str:
    """The page with the table between its marks, of all techniques or of these."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(names)}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
