"""Every test of a technique starts with a compiler that has seen nothing: graphs of others would count against its limits."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
