"""Write docs/techniques/: one page for each technique, from its own file, and an index.

python scripts/technique_pages.py           write the pages
python scripts/technique_pages.py --check   exit 1 if a page is missing, old or left over
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rush.records.loss_curves import CLOSE, STATISTICAL_END, STATISTICAL_LEARNED
from rush.techniques import Technique, conflict_reason, registry
from rush.techniques.api.contract import Claim, KnobRange, MemoryEffect, Parity, Setting
from rush.tune.moves import named

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "techniques"
NOTE = "<!-- Written by scripts/technique_pages.py from the technique's file. Change that file, not this page. -->"


def pages(names: Collection[str] | None = None) -> dict[str, str]:
    """Every page by file name; with `names`, as if only these techniques existed."""
    known = {
        name: replace(
            technique, conflicts=tuple(one for one in technique.conflicts if names is None or one in names)
        )
        for name, technique in registry().ours().items()
        if names is None or name in names
    }
    return {"README.md": index(known), **{f"{name}.md": page(technique) for name, technique in known.items()}}


def page(technique: Technique) -> str:
    text = (import_module(technique.apply.__module__).__doc__ or "").strip()
    title, _, lesson = text.partition("\n\n")
    claim = technique.claim
    parts = [
        NOTE,
        f"# {technique.name}",
        f"**{title}**",
        lesson,
        "## Use",
        f"```toml\ntechniques = [{_example(technique)}]\n```",
        f"Stage of the build: {technique.stage.name}"
        + (f", after {', '.join(f'`{name}`' for name in technique.after)}." if technique.after else "."),
    ]
    if technique.knobs:
        rows = [
            f"| `{name}` | {', '.join(f'`{_toml(value)}`' for value in knob.values)} | {knob.meaning} | "
            f"{_knob_evidence(technique, knob)} |"
            for name, knob in technique.knobs.items()
        ]
        parts.append(
            "\n".join(
                [
                    "| knob | values (the first is the default) | meaning | how its effect is seen |",
                    "| --- | --- | --- | --- |",
                    *rows,
                ]
            )
        )
    if technique.settings:
        tried = "; ".join(f"`{_words(technique.name, setting)}`" for setting in technique.settings)
        parts.append(f"Tried by `rush tune`, where its class is allowed: {tried}.")
    parts += [
        "## Requirements and conflicts",
        "\n".join(f"- {requirement.message}." for requirement in technique.requires)
        or "It runs on every machine.",
        "Conflicts with: " + (", ".join(f"[{n}]({n}.md)" for n in technique.conflicts) or "nothing") + ".",
        "\n".join(
            f"- `{name}`: {reason}."
            for name in technique.conflicts
            if (reason := conflict_reason(technique, registry()[name]))
        ),
        "## Claim",
        f"{claim.metric}: {claim.gain:+.0%}{_over(claim)} ({claim.regime}). Source: {claim.source}. A claim is the authors'; "
        "`rush ladder` measures the gain on a machine.",
        "## Parity",
        f"{technique.parity.name}: {technique.parity.value}. {_tolerance(technique.parity)}",
        "## Evidence",
        _evidence(technique),
    ]
    if technique.memory:
        rows = [f"| {effect.term} | {_effect(effect)} | {effect.note} |" for effect in technique.memory]
        parts += ["## Memory", "\n".join(["| term | effect | note |", "| --- | --- | --- |", *rows])]
    if technique.work:
        rows = [f"| {effect.term} | {effect.value} | {effect.note} |" for effect in technique.work]
        parts += ["## Work", "\n".join(["| term | value | note |", "| --- | --- | --- |", *rows])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _over(claim: Claim) -> str:
    """What the claim is relative to, where it is not the recipe without the technique."""
    if claim.relative_to == "the rung before":
        return ""
    return f" over {claim.relative_to if ' ' in claim.relative_to else f'`{claim.relative_to}`'}"


def _effect(effect: MemoryEffect) -> str:
    """The effect on a term, in a few words."""
    if effect.size is not None:
        return f"{effect.size:g} bytes per element"
    if effect.keeps is not None:
        return "only: " + (", ".join(effect.keeps) or "nothing")
    return f"× {effect.factor:g}"


def index(known: Mapping[str, Technique]) -> str:
    parts = [
        NOTE,
        "# Techniques",
        "One page each, from the file that defines it. `rush probe` reports which of them can run on a machine and "
        "why the others cannot; `rush ladder` measures what they gain there.",
    ]
    groups: dict[str, list[str]] = {}
    for name, technique in known.items():
        module = import_module(technique.apply.__module__)
        title = (module.__doc__ or "").strip().splitlines()[0]
        row = f"| [{name}]({name}.md) | {title} | {technique.stage.name} | {technique.parity.name} |"
        groups.setdefault(module.__name__.rpartition(".")[0], []).append(row)
    for group, rows in sorted(groups.items()):
        parts += [
            f"## {group.rpartition('.')[2].capitalize()}",
            (import_module(group).__doc__ or "").strip(),
            "\n".join(["| name | idea | stage | parity |", "| --- | --- | --- | --- |", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _words(name: str, setting: Setting) -> str:
    """A setting as the tuner's tables name it."""
    return " with ".join(
        named(one, knobs) for one, knobs in {name: setting.knobs, **setting.together_with}.items()
    )


def _example(technique: Technique) -> str:
    if not technique.knobs:
        return f'"{technique.name}"'
    knobs = ", ".join(f"{name} = {_toml(knob.default)}" for name, knob in technique.knobs.items())
    return f'{{name = "{technique.name}", {knobs}}}'


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _tolerance(parity: Parity) -> str:
    if parity is Parity.EXACT:
        return "Losses, gradient norms and gradients are equal bit for bit."
    if parity is Parity.CLOSE:
        listed = "; ".join(
            f"{dtype} {t.loss:g} / {t.grad_norm:g} / {t.gradient:g}" for dtype, t in CLOSE.items()
        )
        return (
            "Largest relative difference of loss / gradient norm / a tensor's gradient at step one, by the dtype "
            f"of the matmuls: {listed}."
        )
    if parity is Parity.STATISTICAL:
        return (
            f"The mean loss of each quarter of the steps may differ by {STATISTICAL_LEARNED:.0%} of the decrease of plain fp32's loss, "
            f"and that of the last by no more than {STATISTICAL_END:.0%} of the loss."
        )
    return "It is not compared with the plain run."


def _evidence(technique: Technique) -> str:
    text = inspect.getdoc(technique.evidence)
    assert text, f"the evidence of {technique.name} has no docstring"
    return " ".join(text.split())


def _knob_evidence(technique: Technique, knob: KnobRange) -> str:
    if knob.evidence is technique.evidence:
        return "see Evidence"
    text = inspect.getdoc(knob.evidence)
    assert text, f"the evidence of a knob of {technique.name} has no docstring"
    return " ".join(text.split())


def main() -> int:
    wanted = pages()
    there = {path.name for path in FOLDER.glob("*.md")} if FOLDER.is_dir() else set()
    if "--check" in sys.argv[1:]:
        stale = [
            name for name, text in wanted.items() if name not in there or (FOLDER / name).read_text() != text
        ]
        for name in sorted({*stale, *(there - wanted.keys())}):
            sys.stderr.write(
                f"docs/techniques/{name} is not current; run python scripts/technique_pages.py\n"
            )
        return int(bool(stale or there - wanted.keys()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in there - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
