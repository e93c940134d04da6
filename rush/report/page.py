"""Assembling a page: one file, no network, and a strict content security policy.

The Content-Security-Policy forbids loading anything and allows only this style sheet and this script (by their SHA-256). The
template escapes text from a record; if that ever failed, the policy would still block injected code. For the same reason there
are no style attributes and no inline handlers.

The same record always gives the same bytes: no clock, no random names.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rush.files import write_atomic
from rush.records.ladder import LADDER
from rush.report import bars, claims, curves, formatting, headlines, roofline
from rush.report.batch_view import batch_panels, batch_view, batch_words
from rush.report.ladder import LadderView, RungView, read_ladder
from rush.report.lenient import Json, real, shown, text
from rush.report.panel_svg import pictures
from rush.report.race_words import net_words
from rush.report.svg import tag
from rush.report.symbols import SIGNS

MANY_PANELS = 12


def write_report(ladder_json: Path, html: Path) -> None:
    """Draw the ladder recorded in `ladder_json` into one self-contained file."""
    with LADDER.using(ladder_json):
        write_atomic(html, report_page(read_ladder(ladder_json)))


def report_page(ladder: LadderView) -> str:
    top = bars.top_speed([rung.speed for rung in ladder.rungs])
    memory = bars.top_memory(ladder.rungs)
    slowest = max((bars.ms_per_thousand(rung) or 0.0 for rung in ladder.rungs), default=0.0)
    overlays = [
        (rung, rung.parity, drawing)
        for rung in ladder.rungs
        if rung.parity and (drawing := curves.loss_overlay(rung.parity, rung.title))
    ]
    claim_axis, checked = _claims(ladder)
    batches = batch_view(ladder)
    return render(
        "report.html",
        title=f"{ladder.name} · ladder",
        ladder=ladder,
        machine=headlines.machine_name(ladder.machine),
        machine_rows=flattened(ladder.machine) + flattened(ladder.other_ceilings, "ceilings"),
        rungs=[
            (
                rung,
                bars.speed_bar(
                    rung.speed,
                    top,
                    rung.title,
                    kind="speed" if rung.kept else "speed tried",
                    total=rung.real_total,
                ),
                bars.memory_bar(rung.peak_memory_bytes, memory, rung.title),
            )
            for rung in ladder.able
        ],
        batch=curves.batch_curves(ladder.batch_curve, ladder.batch_stops_paying_at),
        batches=[(panel, *pictures(panel)) for panel in batch_panels(batches)] if batches else [],
        batch_sentences=batch_words(batches) if batches else [],
        sequence_rows=[limit_rows(row) for row in ladder.sequence_limits],
        overlays=overlays,
        unjudged=[rung for rung in ladder.rungs if rung.status == "ok" and rung.parity is None],
        breakdowns=[
            (rung, bars.breakdown_bar(rung, 100), _absolute(rung, slowest))
            for rung in ladder.rungs
            if bars.segments(rung.breakdown)
        ],
        roofline=roofline.rooflines(ladder),
        positions=roofline.positions(ladder),
        claim_axis=claim_axis,
        claims=checked,
        lines=_recipe_lines(ladder),
        net_words=net_words,
        used_verdicts=[name for name in headlines.VERDICTS if any(r.verdict == name for r in ladder.able)],
    )


def _absolute(rung: RungView, slowest: float) -> Markup | None:
    """The same stacked bar, as long as a thousand tokens take."""
    per_thousand = bars.ms_per_thousand(rung)
    if per_thousand is None or slowest <= 0:
        return None
    return bars.breakdown_bar(rung, 100 * per_thousand / slowest)


def _claims(ladder: LadderView) -> tuple[Markup, list[tuple[claims.ClaimCheck, Markup]]]:
    """The common axis, and every claim beside its finding."""
    rows = [claims.climb_claim(ladder), *(claims.compare_claim(ladder, rung) for rung in ladder.able)]
    found = [row for row in rows if row is not None]
    ratios = [
        v for row in found for v in (row.claimed, row.found, row.low, row.high) if v is not None and v > 0
    ]
    scale = bars.claim_scale(ratios)
    return bars.claim_axis(scale), [
        (row, bars.claim_row(row.claimed, row.found, row.low, row.high, scale, row.rung.title))
        for row in found
    ]


def _recipe_lines(ladder: LadderView) -> dict[int, list[tuple[str, bool]]]:
    """Every rung's recipe by line, with a mark on the lines the recipe before it does not have."""
    before = set((ladder.base_recipe or "").splitlines())
    found = {}
    for rung in ladder.rungs:
        lines = (rung.recipe or "").splitlines()
        found[rung.index] = [
            (line, bool(before) and line.strip() != "" and line not in before) for line in lines
        ]
        if ladder.view == "cumulative" and lines:
            before = set(lines)
    return found


def limit_rows(row: Mapping[str, Json]) -> list[tuple[str, str]]:
    """One result of the sequence search, as name and value."""
    names = {"techniques": "with", "longest": "longest sequence", "peak_memory_bytes": "peak memory there"}
    rows = []
    for key, value in row.items():
        size = real(value) if key.endswith("_bytes") else None
        if size is not None:
            description = formatting.size(size)
        elif key == "tried":
            description = (
                ", ".join(_tried(point) for point in value) if isinstance(value, list) else formatting.MISSING
            )
        elif isinstance(value, list):
            description = ", ".join(map(shown, value)) or "nothing"
        else:
            description = formatting.MISSING if value is None else shown(value)
        rows.append((names.get(key, (text(key) or "").replace("_", " ")), description))
    return rows


def _tried(point: Json) -> str:
    """A length that was tried, with its status unless it ran."""
    found = point if isinstance(point, dict) else {}
    status = text(found.get("status")) or formatting.MISSING
    became = "" if status == "ok" else f" ({status.replace('_', ' ')})"
    return f"{shown(found.get('sequence'))}{became}"


def flattened(value: Json, name: str = "") -> list[tuple[str, str]]:
    """Nested JSON as rows of dotted name and text."""
    if isinstance(value, dict):
        return [row for key, part in value.items() for row in flattened(part, f"{name}.{text(key)}" if name else text(key) or "")]  # fmt: skip
    if isinstance(value, list):
        if all(not isinstance(part, dict | list) for part in value):
            return [(name, ", ".join(map(shown, value)) or formatting.MISSING)]
        return [row for at, part in enumerate(value) for row in flattened(part, f"{name}.{at}")]
    if value is None:
        return [(name, formatting.MISSING)]
    if name.endswith("_bytes") and isinstance(value, int) and not isinstance(value, bool):
        return [
            (name, f"{formatting.size(float(value))} ({shown(value)})" if abs(value) < 1e30 else shown(value))
        ]
    return [(name, shown(value))]


def badge(word: str, tone: str, sign: str, meaning: str = "") -> Markup:
    """A verdict: a sign, the words, and a color that adds nothing to the words."""
    shape = tag("path", d=SIGNS[sign], fill_rule="evenodd")
    drawing = tag("svg", shape, viewBox="0 0 12 12", class_="sign", aria_hidden="true")
    return tag("span", drawing, word, class_=f"badge {tone}", title=meaning or None)


def render(template: str, styles: Sequence[str] = ("style.css",), **values: Any) -> str:
    """A page from a template, with its style and script inside and their hashes in the policy."""
    style, script = "".join(map(_asset, styles)), _asset("script.js")
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(policy=policy, style=Markup(style), script=Markup(script), **values)
    )


@cache
def _environment() -> jinja2.Environment:
    """The environment with its compiled templates: compiling a template takes longer than rendering it."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        formatting=formatting,
        headlines=headlines,
        effects=claims.effects,
        bars=bars,
        curves=curves,
        badge=badge,
        many=MANY_PANELS,
    )
    return environment


def digest(content: str) -> str:
    """The name of an inline style or script in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _asset(name: str) -> str:
    """A template, style sheet or script of the reports or the explanations."""
    for package in ("rush.report", "rush.explain"):
        path = resources.files(package).joinpath("templates", name)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise jinja2.TemplateNotFound(name)
