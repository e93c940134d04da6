"""The long description of the package: the README, with every link and picture absolute.

hatchling calls `CustomMetadataHook` while it builds. PyPI shows the page outside the repository, where a relative link leads
nowhere. Links go to the file on GitHub, pictures to its raw content.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

BRANCH = "main"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        home = metadata["urls"]["Homepage"]
        text = absolute((Path(self.root) / "README.md").read_text("utf-8"), home, Path(self.root))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, home: str, root: Path) -> str:
    """The page with absolute links; one that leads to no file stops the build."""

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not (root / path).exists():
            raise FileNotFoundError(f"README.md links to {path}, which is not there")
        kind = "raw" if picture else "tree" if (root / path).is_dir() else "blob"
        return f"{picture}[{label}]({home}/{kind}/{BRANCH}/{path}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(replace, text)
