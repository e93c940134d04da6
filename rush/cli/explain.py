"""`rush explain`: small measurements on this machine, explained with plots and text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rush.cli.options import Device, Json
from rush.cli.output import measuring_bar, next_step, note, print_json
from rush.errors import RecipeError, nearest

if TYPE_CHECKING:
    from rush.explain import ExplainSettings, Topic
    from rush.records.explain import ExplainRecord

DEVICES = ("auto", "cpu", "cuda")


def complete_topic(incomplete: str) -> list[str]:
    from rush.explain import topics

    return [name for name in topics() if name.startswith(incomplete)]


def explain(
    topic: Annotated[
        str | None,
        typer.Argument(help="The topic. Default: list all topics.", autocompletion=complete_topic),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/explain-TOPIC.")] = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Coarse measurement in a few seconds.")] = False,
    record: Annotated[
        Path | None,
        typer.Option("--from", help="Redraw the explain.json of an earlier measurement."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="roofline: recipe of the model to measure.")] = None,
    batch: Annotated[int | None, typer.Option(help="roofline: batch size, in sequences.", min=1)] = None,
    sequence: Annotated[int | None, typer.Option(help="roofline: tokens per sequence.", min=1)] = None,
    json: Json = False,
) -> None:
    """Explain on your own machine why things are fast or slow, with small measurements.

    Examples:

      rush explain

      rush explain attention

      rush explain roofline --model gpt2-124m --batch 4

      rush explain --from runs/explain-attention/explain.json --out drawn
    """
    from rush.explain import find, topics
    from rush.explain.page import write
    from rush.explain.records import explain as understand
    from rush.explain.records import read
    from rush.records.explain import EXPLAIN

    # Before torch is loaded: its profiler, used by one topic, prints to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    options: dict[str, str | int] = {
        name: value
        for name, value in (("model", model), ("batch", batch), ("sequence", sequence))
        if value is not None
    }
    if record is not None:
        _refuse_measuring(device, quick, options)
        found = read(record)
        if topic is not None and topic != found["topic"]:
            raise RecipeError(f"{record} is about {found['topic']}, not about {topic}; leave the topic out.")
    elif topic is None:
        _list(list(topics().values()), json)
        return
    else:
        found = _measure(find(topic), device, quick, options)
    explanation = understand(found)
    folder = out or Path("runs") / f"explain-{explanation.topic.name}"
    with EXPLAIN.using(record or folder):
        paths = write(explanation, folder)
    if json:
        print_json(
            {
                "record": explanation.record,
                "words": explanation.words,
                "files": {name: str(path) for name, path in paths.items()},
            }
        )
        return
    with EXPLAIN.using(record or folder):
        _show(explanation, paths)


def _list(found: list[Topic], json: bool) -> None:
    if json:
        print_json([{"name": topic.name, "title": topic.title, "about": topic.about} for topic in found])
        return
    width = max(len(topic.name) for topic in found)
    for topic in found:
        typer.echo(f"{typer.style(topic.name.ljust(width), bold=True)}  {topic.about}")
    typer.echo("\nrush explain TOPIC measures on this machine and takes less than a minute.")
    next_step("rush", "explain", found[0].name)


def _refuse_measuring(device: str, quick: bool, options: dict[str, Any]) -> None:
    """Refuse measurement options with --from, which would be ignored."""
    given = [
        *(f"--{name}" for name in options),
        *(["--quick"] if quick else []),
        *(["--device"] if device != "auto" else []),
    ]
    if given:
        raise RecipeError(f"--from measures nothing; leave out {', '.join(given)}.")


def _measure(topic: Topic, device: str, quick: bool, options: dict[str, str | int]) -> ExplainRecord:
    from rush.explain.records import make

    foreign = [name for name in options if name not in topic.options]
    if foreign:
        can = f"it takes --{', --'.join(topic.options)}" if topic.options else "it takes none"
        raise RecipeError(f"--{foreign[0]} is not an option of the topic {topic.name}: {can}.")
    settings_for = _settings(device, quick, options)
    # Two updates a second, so that the bar does not disturb the measurement.
    with measuring_bar(refresh_per_second=2) as show:
        return make(topic, settings_for(show))


def _settings(
    device: str, quick: bool, options: dict[str, str | int]
) -> Callable[[Callable[[str, int, int], None]], ExplainSettings]:
    """Validate the options before anything is measured."""
    from rush.explain import ExplainSettings
    from rush.hardware import probe

    if device not in DEVICES:
        raise RecipeError(f"--device {device!r} is not known here; {nearest(device, DEVICES)}")
    kind: Literal["cpu", "cuda"] = (
        "cuda" if device == "cuda" or (device == "auto" and _cuda_here()) else "cpu"
    )
    machine = probe(kind)
    return lambda show: ExplainSettings(machine, kind, quick, options, show)


def _cuda_here() -> bool:
    import torch

    return torch.cuda.is_available()


def _show(explanation: Any, paths: dict[str, Path]) -> None:
    from rich.console import Console

    from rush.explain.terminal import show

    show(
        Console(),
        explanation.topic.title,
        explanation.where,
        explanation.panels,
        explanation.table,
        explanation.words,
    )
    if explanation.warning:
        note(explanation.warning)
    typer.echo(f"Report: {paths['report']}")
    next_step("rush", "explain", why="the other topics")
