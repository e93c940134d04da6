"""The hardware explained by measurement: small experiments made here and now, a picture, a page of plain words.

A topic is one file in this folder that defines `topic`: how to measure, how to describe the numbers, how
to draw them. Adding a topic is adding a file; this page finds it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from rush.errors import RecipeError, nearest
from rush.explain.topic import Data, ExplainSettings, Topic, TopicTable

__all__ = ["Data", "ExplainSettings", "Topic", "TopicTable", "find", "topics"]


@cache
def topics() -> Mapping[str, Topic]:
    """Every topic by name. Needs no torch: a topic imports it when it measures."""
    found: dict[str, Topic] = {}
    for module in pkgutil.iter_modules(__path__):
        topic = getattr(import_module(f"{__name__}.{module.name}"), "topic", None)
        if isinstance(topic, Topic):
            assert topic.name == module.name.replace("_", "-"), f"{module.name}.py defines {topic.name}"
            found[topic.name] = topic
    return found


def find(name: str) -> Topic:
    """The topic of that name, or one sentence that names the nearest."""
    if name not in topics():
        raise RecipeError(f"there is no topic {name!r}; {nearest(name, topics())}")
    return topics()[name]
