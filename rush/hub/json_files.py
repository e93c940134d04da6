"""JSON files of Hugging Face folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rush.errors import DataError
from rush.files import parse_json, read_file, replacing


def read_json(file: Path, advice: str = "fix it, or remove it") -> dict[str, Any]:
    """The JSON object in a file; DataError with `advice` where there is none."""
    if not os.path.exists(file):
        raise DataError(f"{file.parent} lacks {file.name}; {advice}.")
    try:
        content = parse_json(read_file(file))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); {advice}.") from None
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}); {advice}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} must hold one JSON object: found {type(content).__name__}; {advice}.")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
