"""scripts/several_devices_page.py as a module, for tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load() -> Any:
    path = Path(__file__).parents[1] / "scripts" / "several_devices_page.py"
    spec = importlib.util.spec_from_file_location("several_devices_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
