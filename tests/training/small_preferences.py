"""A preference run small enough for a test: pairs in a file, and its recipe."""

from __future__ import annotations

import json
from pathlib import Path

from tests.training.small_runs import small_recipe

COLOURS = ("red", "green", "blue", "white", "black", "brown", "grey", "pink")


def write_pairs(path: Path, count: int = 48) -> Path:
    """Questions about colours; the chosen answer says the colour, the rejected one another."""
    rows = []
    for index in range(count):
        colour, other = COLOURS[index % 8], COLOURS[(index * 3 + 1) % 8]
        wrong = other if other != colour else COLOURS[(index + 1) % 8]
        rows.append(
            {
                "prompt": f"What is the colour of thing {index}?",
                "chosen": f"Thing {index} is {colour}.",
                "rejected": f"It is {wrong}, I think.",
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preference_recipe(pairs: Path, **sections: dict[str, object]) -> str:
    """TOML of a DPO run on that file."""
    data = {
        "source": "files",
        "files": [str(pairs)],
        "validation": 0.25,
        "template": "plain",
        "too_long": "drop",
    }
    given = {
        "objective": {"kind": "dpo"},
        "batch": {"micro": 2, "sequence": 48, "total_tokens": 192},
        "schedule": {"steps": 6, "warmup": 1},
    }
    for name, changes in sections.items():
        given[name] = {**given.get(name, {}), **changes}
    text = small_recipe(Path("unused"), **given)
    lines = text.splitlines()
    start = lines.index("[data]")
    stop = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("["))
    lines[start + 1 : stop] = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    return "\n".join(lines) + "\n"
