"""The page of prepared documents (`rush data inspect --html`): counts, lengths, what was left out, examples with marked targets."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from rush.data.conversations.inspect_documents import control_tokens, left_out, unused_columns
from rush.report.page import render
from rush.report.svg import tag

BAR_WIDTH, BAR_HEIGHT = 120, 12


def documents_page(found: dict[str, Any], examples: list[dict[str, Any]]) -> str:
    """The page of `document_statistics` and `document_examples`."""
    splits = found["splits"]
    lengths = {name: _bars(counts["histogram"]) for name, counts in splits.items() if counts["documents"]}
    return render(
        "documents.html",
        title=f"Fine-tuning data: {found['source']}",
        found=found,
        counts=[
            (
                name,
                *(f"{c[kind]:,}" for kind in ("rows", "documents", "tokens", "trained")),
                f"{c['trained_share']:.1%}",
            )
            for name, c in splits.items()
        ],
        lengths=lengths,
        lost=left_out(splits),
        unused=unused_columns(splits),
        controls=control_tokens(splits),
        examples=examples,
    )


def _bars(histogram: list[dict[str, int]]) -> list[tuple[str, int, Markup]]:
    """Each bin's range, its documents, and a bar."""
    most = max(bin["documents"] for bin in histogram)
    return [
        (f"{bin['from']:,}–{bin['below'] - 1:,}", bin["documents"], _bar(bin["documents"] / most))
        for bin in histogram
    ]


def _bar(share: float) -> Markup:
    rect = tag("rect", width=f"{BAR_WIDTH * share:.1f}", height=BAR_HEIGHT, class_="bar speed")
    return tag("svg", rect, viewBox=f"0 0 {BAR_WIDTH} {BAR_HEIGHT}", width=BAR_WIDTH, aria_hidden="true")
