"""The pages of docs/explain: the idea, a picture measured by the tool, and what it reports about those numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rush.explain.records import Explanation


def page(explanation: Explanation, picture: str, topics: str) -> str:
    """The page of one topic; `picture` and `topics` are the paths of its SVG file and of the index, seen from the page."""
    topic = explanation.topic
    seconds = explanation.record["seconds"]
    parts = [
        f"# {topic.title}",
        f"    rush explain {topic.name}",
        *topic.idea,
        f"## On {explanation.where}",
        f"![{topic.title}]({picture})",
        *explanation.words,
        *([explanation.warning] if explanation.warning else []),
        f"This took {seconds:g} seconds there. On your machine the numbers are others, and so are the sentences: the tool "
        "writes them from what it measured.",
        "## How it is measured",
        "\n".join(f"- **{name}**: {text}" for name, text in topic.method),
        f"[All topics]({topics})",
    ]
    return "\n\n".join(_plain(part) for part in parts) + "\n"


def index(explanations: Sequence[Explanation], others: Mapping[str, Sequence[Explanation]]) -> str:
    """The list of topics. `others` are explanations from further machines, by their folders."""
    rows = []
    for e in explanations:
        name = e.topic.name
        there = "".join(
            f", [{where}]({where}/{name}.md)"
            for where in others
            if name in {o.topic.name for o in others[where]}
        )
        rows.append(f"| [{name}]({name}.md){there} | {e.topic.about} |")
    return "\n".join(
        [
            "# Explaining the hardware by measurement",
            "",
            "`rush explain TOPIC` makes a small experiment on your own machine, with a GPU or without, and shows a picture and a few",
            "sentences about what it found, in the terminal and as a page (`report.html`) that works without network. Each topic takes",
            "less than a minute. The numbers and the sentences on the first page of each topic are from a two-core CPU machine; beside it",
            "stands what the same command reports on other machines.",
            "",
            "| topic | what it shows |",
            "| --- | --- |",
            *rows,
            "",
            "Add `--device cpu` to measure the CPU where there is a GPU, `--quick` for a coarse look, `--json` for the raw numbers.",
            "`rush explain --from explain.json` draws an earlier measurement again, also one from another machine.",
            "",
            "A topic is one file in `rush/explain/`: how to measure, how to describe the numbers, how to draw them.",
            "",
        ]
    )


def _plain(text: str) -> str:
    """Spaces that do not break are for the page and the terminal."""
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\u202f", " ")
