"""Text for a language model from a package registry: Debian's archive.

    python examples/from-nothing/gather.py --to build/from-nothing

fetches the packages of packages.toml (`apt-get download`: any user, nothing is installed), unpacks them
(`dpkg-deb -x`) and writes raw/PACKAGE.jsonl, a document a row: `text` and `source`. It resumes where it was
interrupted. Needs Debian or Ubuntu; a package that the release does not have is named and left out.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from readers import READERS, unwrapped
from words import describe, read_words

HERE = Path(__file__).parent
ARCHIVE = "http://deb.debian.org/debian"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--only", nargs="*", help="these packages and no others")
    options = parser.parse_args()
    wanted = tomllib.loads((HERE / "packages.toml").read_text())
    (options.to / "raw").mkdir(parents=True, exist_ok=True)
    counted: dict[str, dict[str, int]] = {}
    for name, entry in wanted.items():
        if options.only and name not in options.only:
            continue
        folder = fetch(entry.get("package", name), entry, options.to)
        if folder is None:
            sys.stderr.write(f"{name}: this release does not have it; left out\n")
            continue
        written = write_rows(options.to / "raw" / f"{name}.jsonl", name, texts(entry, folder))
        counted[name] = {"documents": written[0], "bytes": written[1]}
        sys.stdout.write(f"{name}: {written[0]:,} documents, {written[1] / 1e6:.1f} MB\n")
    (options.to / "raw" / "counted.json").write_text(json.dumps(counted, indent=1) + "\n")


def fetch(package: str, entry: dict[str, Any], to: Path) -> Path | None:
    """The folder that holds the package's files; None where there is no such package."""
    folder = to / "packages" / package
    if folder.is_dir():
        return folder
    downloads = to / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    unpacking = folder.with_name(f".{package}")
    unpacking.mkdir(parents=True, exist_ok=True)
    if entry["kind"] == "descriptions":
        for file in entry["files"]:
            urllib.request.urlretrieve(f"{ARCHIVE}/{file}", unpacking / Path(file).name)
    else:
        got = subprocess.run(
            ["apt-get", "download", "-q", package], cwd=downloads, capture_output=True, check=False
        )
        found = sorted(downloads.glob(f"{package}_*.deb"))
        if got.returncode != 0 or not found:
            return None
        subprocess.run(["dpkg-deb", "-x", found[-1], unpacking], check=True)
    unpacking.rename(folder)
    return folder


def texts(entry: dict[str, Any], folder: Path) -> Iterator[str]:
    if entry["kind"] == "wordnet":
        words = read_words(folder / entry["files"][0])
        yield from (describe(word, senses) for word, senses in words.items())
    elif entry["kind"] == "descriptions":
        yield from descriptions(folder / Path(entry["files"][0]).name)
    else:
        yield from READERS[entry["kind"]](folder, entry["files"])


def descriptions(path: Path) -> Iterator[str]:
    """What each package is, in its maintainer's words."""
    for part in lzma.decompress(path.read_bytes()).decode().split("\n\n"):
        found = re.match(r"Package: (\S+)\n.*?Description-en: (.*?)(?:\n(.*))?$", part, re.S)
        if found:
            name, short, long = found[1], found[2], found[3] or ""
            paragraphs = unwrapped("\n".join("" if line == " ." else line[1:] for line in long.splitlines()))
            yield f"{name}: {short}\n{paragraphs}".strip()


def write_rows(path: Path, source: str, documents: Iterator[str]) -> tuple[int, int]:
    """The documents that hold something, each once in this file; how many, and how many bytes."""
    count = size = 0
    half = path.with_suffix(".half")
    with half.open("w", encoding="utf-8") as file:
        for document in documents:
            # A lone surrogate or a control character is nothing to learn from.
            text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "", document).strip()
            if text:
                file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(text.encode())
    half.rename(path)
    return count, size


if __name__ == "__main__":
    main()
