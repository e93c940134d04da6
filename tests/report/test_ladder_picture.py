"""The picture for a README: well-formed, to scale, harmless, readable alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rush.report import ladder_picture, write_picture
from tests.report import made_up

SVG = "{http://www.w3.org/2000/svg}"


def _drawn(ladder: dict[str, object], folder: Path) -> ET.Element:
    write_picture(made_up.write(folder, ladder), folder / "ladder.svg")
    return ET.fromstring((folder / "ladder.svg").read_text(encoding="utf-8"))


def test_bars_and_whiskers_are_to_scale(tmp_path: Path) -> None:
    root = _drawn(made_up.made_up_ladder(), tmp_path)
    measured = [r["tokens_per_s"] for r in made_up.made_up_ladder()["rungs"] if r["tokens_per_s"]]
    top = max(m["ci95"][1] for m in measured)
    length = ladder_picture.SPEED_END - ladder_picture.SPEED_X
    bars = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "speed"]
    whiskers = [e for e in root.iter(f"{SVG}line") if e.get("class") == "whisker"][::3]
    for bar, whisker, m in zip(bars, whiskers, measured, strict=True):
        assert float(bar.get("width", "nan")) == pytest.approx(m["median"] / top * length, abs=0.02)
        ends = [(float(whisker.get(x, "nan")) - ladder_picture.SPEED_X) / length * top for x in ("x1", "x2")]
        assert ends == pytest.approx(m["ci95"], abs=top * 1e-4)


def test_every_rung_and_verdict_is_there_and_nothing_leaves_the_picture(tmp_path: Path) -> None:
    root = _drawn(made_up.made_up_ladder(), tmp_path)
    texts = ["".join(e.itertext()) for e in root.iter(f"{SVG}text")]
    for rung in made_up.made_up_ladder()["rungs"]:
        able = rung["verdict"] != "unsupported"
        assert (rung["title"] in texts) == able
        assert (rung["verdict"] in texts) == able
    height = float(root.get("height", "nan"))
    assert all(0 < float(e.get("y", "nan")) < height for e in root.iter(f"{SVG}text"))
    assert "×13.9" in root.get("aria-label", "")


def test_what_was_only_tried_is_pale(tmp_path: Path) -> None:
    ladder = made_up.made_up_ladder()
    ladder["rungs"][2]["kept"] = False
    bars = [e for e in _drawn(ladder, tmp_path).iter(f"{SVG}rect") if "speed" in (e.get("class") or "")]
    assert [e.get("class") for e in bars[:4]] == ["speed", "speed", "speed tried", "speed"]


@pytest.mark.parametrize("ladder", [made_up.hostile_ladder(), made_up.odd_ladder(), made_up.one_rung()])
def test_whatever_the_strings_say_it_stays_a_picture(ladder: dict[str, object], tmp_path: Path) -> None:
    root = _drawn(ladder, tmp_path)
    allowed = {f"{SVG}{name}" for name in ("svg", "style", "rect", "text", "tspan", "line", "g", "path")}
    assert {e.tag for e in root.iter()} <= allowed
    for e in root.iter():
        assert not [name for name in e.attrib if name.startswith("on") or name.endswith("href")]
        assert all(len(line) <= 90 for line in e.itertext() if e.tag == f"{SVG}text")
