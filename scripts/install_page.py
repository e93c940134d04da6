"""Write what an installation downloads, per platform, into docs/install.md and README.md.

The versions are what `scripts/lock.py` resolves; a size is the sum of the wheels that pip would choose, as the
package index states them. PyTorch's index of CPU builds states no sizes that can be read here without loading
it, so torch's own CPU wheel is counted where its size is known (`CPU_WHEEL_BYTES`) and otherwise named apart.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

sys.path.insert(0, str(Path(__file__).resolve().parent))
import lock

# Measured from the file torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, and taken for all Pythons.
CPU_WHEEL_BYTES = {"x86_64-manylinux_2_28": 191_794_682}


def main() -> None:
    if not lock.index_answers():
        sys.exit(f"The package index {lock.index_url()} cannot be reached: no size was measured.")
    found = lock.resolve_all()
    if any(not item.versions for item in found):
        sys.exit("Not every platform has a solution: python scripts/lock.py check says which.")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(files_of, {pin for item in found for pin in item.versions.items()}))
    sizes = {item: size(item) for item in found}
    put(lock.ROOT / "docs" / "install.md", [*table(sizes, short=False)])
    put(lock.ROOT / "README.md", [*table(sizes, short=True)])


def table(sizes: dict[lock.Resolution, int], short: bool) -> list[str]:
    """Short: a line per platform, at the largest of the Pythons. In full: a line per platform and Python."""
    lines = [
        "| machine | torch, Triton | `make ladder` loads | `make test` loads |",
        "| --- | --- | --- | --- |",
    ]
    if not short:
        lines = [
            "| platform | Python | torch | Triton | runtime | dev |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    for platform in lock.PLATFORMS:
        mine = {item: bytes_ for item, bytes_ in sizes.items() if item.platform == platform}
        for python in lock.PYTHONS[-1:] if short else lock.PYTHONS:
            runtime, dev = (
                max(
                    (item for item in mine if item.install == install and (short or item.python == python)),
                    key=mine.__getitem__,
                )
                for install in lock.INSTALLS
            )
            versions = (dev.versions["torch"], triton(runtime, dev))
            cells = [
                said(mine[item], platform) + ("" if short else f", {len(item.versions)} packages")
                for item in (runtime, dev)
            ]
            head = [platform.name, ", ".join(versions)] if short else [platform.name, python, *versions]
            lines.append(f"| {' | '.join([*head, *cells])} |")
    return lines


def triton(runtime: lock.Resolution, dev: lock.Resolution) -> str:
    if "triton" in runtime.versions:
        return runtime.versions["triton"]
    return f"{dev.versions['triton']} (dev)" if "triton" in dev.versions else "none"


def said(num_bytes: int, platform: lock.Platform) -> str:
    text = f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{round(num_bytes / 1e6, -1):.0f} MB"
    return text + (" + torch" if platform.cpu_build and platform.target not in CPU_WHEEL_BYTES else "")


def size(item: lock.Resolution) -> int:
    tags = tags_of(item.platform.target, item.python)
    total = 0
    for name, version in item.versions.items():
        if name == "torch" and item.platform.cpu_build:
            total += CPU_WHEEL_BYTES.get(item.platform.target, 0)
            continue
        ranks = [(tags[tag], num) for wheel, num in files_of((name, version)) for tag in wheel if tag in tags]
        if not ranks:
            sys.exit(f"{name} {version} has no wheel for {item.platform.name}, Python {item.python}.")
        total += min(ranks)[1]
    return total


@functools.cache
def tags_of(target: str, python: str) -> dict[Tag, int]:
    """The wheels that pip would take there, best first."""
    version = tuple(map(int, python.split(".")))
    if "apple" in target:
        platforms = list(mac_platforms((14, 0), "arm64"))
    else:
        machine = target.removesuffix("-manylinux_2_28")
        old = {
            28: [],
            17: [f"manylinux2014_{machine}"],
            12: [f"manylinux2010_{machine}"],
            5: [f"manylinux1_{machine}"],
        }
        platforms = [
            name for n in range(28, 4, -1) for name in (f"manylinux_2_{n}_{machine}", *old.get(n, []))
        ]
        platforms.append(f"linux_{machine}")
    tags = [*cpython_tags(version, platforms=platforms)]
    tags += compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)
    return {tag: rank for rank, tag in reversed([*enumerate(tags)])}


@functools.cache
def files_of(pin: tuple[str, str]) -> tuple[tuple[frozenset[Tag], int], ...]:
    name, version = pin
    base = lock.index_url().removesuffix("/simple")
    with urllib.request.urlopen(f"{base}/pypi/{name}/json", timeout=60) as answer:
        files = json.load(answer)["releases"].get(version, [])
    wheels = []
    for file in files:
        try:
            wheels.append((parse_wheel_filename(file["filename"])[3], int(file["size"])))
        except InvalidWheelFilename:
            continue  # a source archive
    return tuple(wheels)


def put(page: Path, lines: list[str]) -> None:
    begin, end = "<!-- platforms: begin, by scripts/install_page.py -->", "<!-- platforms: end -->"
    text, made = page.read_text(), "\n".join([begin, *lines, end])
    replaced, count = re.subn(
        re.escape(begin) + ".*?" + re.escape(end), lambda _: made, text, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{page.name} has no place for the table: {begin}")
    page.write_text(replaced)


if __name__ == "__main__":
    main()
