"""What a topic is: a way to measure, words that follow from the numbers, and pictures of them.

`measure` returns plain data (JSON values only). Everything shown is made from that data alone, so a record
can be drawn again on another machine, and a test can pass made-up numbers and see the sentences change.
The words about *this* machine come from `words`; `idea` teaches what is true on any machine and states no
result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rush.hardware.machine import Machine
from rush.report.panels import Panel

Data = dict[str, Any]
"""What a measurement came to: dicts, lists, numbers, strings, None."""

INTERVALS = (
    "intervals",
    "95 %, from resampling the samples of this one process; below 5 % no difference is believed",
)
"""The last line of a topic's method."""


@dataclass(frozen=True)
class ExplainSettings:
    """How to measure."""

    machine: Machine
    device: Literal["cpu", "cuda"]
    quick: bool = False
    """A coarse look in a few seconds, for tests and the impatient."""
    options: Mapping[str, str | int] = field(default_factory=dict)
    """What the topic's own options were set to."""
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    """Called with what is being measured, how many parts are done, and of how many."""


@dataclass(frozen=True)
class TopicTable:
    """All numbers, for those who want them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Topic:
    name: str
    title: str
    """The heading of its page."""
    about: str
    """One line in the list of topics."""
    idea: Sequence[str]
    """Paragraphs that teach what is behind it."""
    method: Sequence[tuple[str, str]]
    """How each figure came about: its name and the formula or the way it was measured."""
    measure: Callable[[ExplainSettings], Data]
    words: Callable[[Data], list[str]]
    """Three to six sentences about what was measured, the most important first."""
    picture: Callable[[Data], list[Panel]]
    table: Callable[[Data], TopicTable]
    options: Sequence[str] = ()
    """Which of the command's options (`model`, `batch`, `sequence`) this topic takes."""
