"""Prepared documents as one self-contained HTML page, with targets highlighted."""

from __future__ import annotations

from html import escape
from typing import Any

from rush.data.conversations.inspect_documents import left_out, unused_columns

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1b1f24; background: #fff; }
table { border-collapse: collapse; } th, td { padding: .15rem .8rem .15rem 0; text-align: right; } th:first-child, td:first-child { text-align: left; }
.bar { background: #8fa8c8; height: .8rem; } .lengths td { padding: 0 .8rem 0 0; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #d5dae0; border-radius: 4px; padding: .8rem; color: #59636e; background: #f6f8fa; }
mark { background: #bfe8c5; color: #0b3d17; }
@media (prefers-color-scheme: dark) {
  body { color: #dde3ea; background: #14181d; } pre { color: #9aa5b1; background: #1b2027; border-color: #363e48; }
  mark { background: #1e5a2b; color: #d9f5de; } .bar { background: #5a7698; }
}
"""


def document_page(found: dict[str, Any], examples: list[dict[str, Any]]) -> str:
    """The page of `document_statistics` and `document_examples`."""
    title = f"Fine-tuning data: {found['source']}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>Template {escape(found['template'])}, trained on {found['train_on']}, sequence {found['sequence']:,}. "
        f"<code>{escape(found['folder'])}</code></p>",
        _counts(found["splits"]),
        _lost(found["splits"]),
        *(
            _lengths(split, counts["histogram"])
            for split, counts in found["splits"].items()
            if counts["documents"]
        ),
        "<h2>Examples</h2><p>Targets are <mark>marked</mark>; everything else is context.</p>",
        *map(_example, examples),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _table(head: list[str], rows: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _counts(splits: dict[str, Any]) -> str:
    rows = [
        [name, f"{c['rows']:,}", f"{c['documents']:,}", f"{c['tokens']:,}", f"{c['trained']:,}", f"{c['trained_share']:.1%}"]
        for name, c in splits.items()
    ]  # fmt: skip
    return _table(["split", "rows", "documents", "tokens", "trained", "share"], rows)


def _lost(splits: dict[str, Any]) -> str:
    unused = unused_columns(splits)
    note = f"<p>Columns that were not used: {escape(unused)}.</p>" if unused else ""
    rows = left_out(splits)
    if not rows:
        return f"<p>No rows were dropped or truncated.</p>{note}"
    return "<h2>Left out</h2>" + _table(["split", "reason", "rows", "such as"], rows) + note


def _lengths(split: str, histogram: list[dict[str, int]]) -> str:
    most = max(bin["documents"] for bin in histogram)
    rows = "".join(
        f"<tr><td>{bin['from']:,}–{bin['below'] - 1:,}</td><td>{bin['documents']:,}</td>"
        f'<td><div class="bar" style="width: {30 * bin["documents"] / most:.2f}rem"></div></td></tr>'
        for bin in histogram
    )
    return f'<h2>Lengths in tokens: {escape(split)}</h2><table class="lengths">{rows}</table>'


def _example(example: dict[str, Any]) -> str:
    text = "".join(
        f"<mark>{escape(piece['text'])}</mark>" if piece["trained"] else escape(piece["text"])
        for piece in example["pieces"]
    )
    head = f"{example['name']}: {example['tokens']:,} tokens, {example['trained']:,} trained"
    return f"<h3>{escape(head)}</h3><pre>{text}</pre>"
