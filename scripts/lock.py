"""Resolve every dependency of every extra once and write constraints.txt.

torch is pinned by hand here: the rest is whatever pip resolves around it today.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = ["torch==2.13.0"]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += [entry for entry in extra if not entry.startswith("optimization-rush")]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run(
            [*command, "--report", report.name, *PINNED, "editables", *wanted],
            check=True,
            env={**os.environ, "PIP_CONSTRAINT": ""},
        )
        resolved = json.loads(Path(report.name).read_text())["install"]
    versions = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"].split("+")[0]
        for item in resolved
    }
    lines = [
        "# Every dependency of every extra, pinned. Written by `make lock`; every install goes through it.",
        *(f"{name}=={version}" for name, version in sorted(versions.items())),
    ]
    (ROOT / "constraints.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
