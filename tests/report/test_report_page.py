"""The page as text: complete, escaped, under its policy, the same every time, and never failing over a gap."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError
from rush.report import write_report
from rush.report.ladder import read_ladder
from rush.report.page import report_page
from tests.report import made_up


class Reader(HTMLParser):
    """Collects what a browser would see: elements with their attributes, and the text outside of code."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("style", "script"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(ladder: dict[str, Any], folder: Path) -> str:
    html = folder / "report.html"
    write_report(made_up.write(folder, ladder), html)
    return html.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(made_up.made_up_ladder(), tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(made_up.hostile_ladder(), tmp_path_factory.mktemp("hostile"))


def test_every_section_is_there_and_every_link_inside_the_page_leads_somewhere(page: str) -> None:
    read = Reader(page)
    ids = {attributes.get("id") for _, attributes in read.elements}
    wanted = {"ladder", "batch", "learning", "time", "roofline", "claims", "interactions", "numbers", "machine",
              "formulas", "recipes"}  # fmt: skip
    assert wanted <= ids
    for link in read.all("a"):
        assert (link["href"] or "").removeprefix("#") in ids
    for name, attributes in read.elements:
        for pointer in ("aria-labelledby", "data-copy"):
            assert attributes.get(pointer) in ids, f"{name} {pointer}"


def test_ids_are_unique(page: str) -> None:
    ids = [a["id"] for _, a in Reader(page).elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_ladder_comes_first_with_every_verdict_in_words(page: str) -> None:
    text = "".join(Reader(page).text)
    assert text.index("The ladder", text.index("Recipes")) < text.index("Batch size and sequence length")
    for rung in made_up.made_up_ladder()["rungs"]:
        assert rung["verdict"].replace("unsupported", "cannot run here") in text
        assert rung["title"] in text
        assert rung["reason"] is None or rung["reason"] in text


def test_every_raw_sample_is_in_the_page(page: str) -> None:
    text = "".join(Reader(page).text).replace("\u202f", "")
    for rung in made_up.made_up_ladder()["rungs"]:
        for sample in (rung["tokens_per_s"] or {"samples": []})["samples"]:
            assert str(round(sample)) in text


def test_the_recipe_can_be_copied_to_the_letter(page: str) -> None:
    recipes = re.findall(r'<pre id="recipe-\d+"[^>]*>(.*?)</pre>', page, re.DOTALL)
    wanted = [rung["recipe"] for rung in made_up.made_up_ladder()["rungs"]]
    assert ["".join(Reader(recipe).text) for recipe in recipes] == wanted


def test_the_lines_a_rung_adds_are_marked(page: str) -> None:
    third = re.findall(r'<pre id="recipe-3"[^>]*>(.*?)</pre>', page, re.DOTALL)[0]
    assert re.findall(r"<ins>(.*?)</ins>", third) == ["  &#34;amp_bf16&#34;,"]


def test_the_policy_allows_exactly_this_style_and_this_script(page: str) -> None:
    policies = [m["content"] for m in Reader(page).all("meta") if m.get("http-equiv")]
    assert len(policies) == 1
    rules = dict(rule.strip().split(" ", 1) for rule in (policies[0] or "").split(";"))
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{hashed}'"
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in (policies[0] or "")
    assert page.index("Content-Security-Policy") < page.index("<style>")


@pytest.mark.parametrize("which", ["page", "hostile"])
def test_nothing_can_load_and_nothing_acts_from_an_attribute(
    which: str, request: pytest.FixtureRequest
) -> None:
    read = Reader(request.getfixturevalue(which))
    forbidden = {"img", "link", "iframe", "object", "embed", "base", "form", "use", "image", "foreignobject"}
    assert not forbidden & {name for name, _ in read.elements}
    assert len(read.all("script")) == len(read.all("style")) == 1
    for name, attributes in read.elements:
        assert not {a for a in attributes if a.startswith("on") or a in ("style", "src", "srcset")}, name
        assert not {a for a in attributes if a.endswith("href")} or name == "a"


def test_hostile_strings_make_no_element_and_stay_readable(page: str, hostile: str) -> None:
    ours = {name for name, _ in Reader(page).elements} | {"wbr"}  # where a long name may be broken
    assert {name for name, _ in Reader(hostile).elements} <= ours
    text = "".join(Reader(hostile).text)
    assert text.count(made_up.HOSTILE) > 100
    assert "49" not in re.findall(r"onerror=alert\(1\)>[^{]{0,4}(.{2})", text), (
        "a template ran inside a string"
    )
    scripts = re.findall(r"<script>(.*?)</script>", hostile, re.DOTALL)
    assert scripts == re.findall(r"<script>(.*?)</script>", page, re.DOTALL)


def test_the_same_record_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    record = made_up.write(tmp_path, made_up.made_up_ladder())
    write_report(record, tmp_path / "here.html")
    code = (
        "import sys; from pathlib import Path; from rush.report import write_report;"
        "write_report(Path(sys.argv[1]), Path(sys.argv[2])); raise SystemExit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(record), str(tmp_path / "there.html")], check=False
    )
    assert done.returncode == 0, "the report failed or imported torch"
    assert (tmp_path / "here.html").read_bytes() == (tmp_path / "there.html").read_bytes()


def test_a_full_report_is_small(page: str) -> None:
    assert len(page.encode()) < 400_000


def test_a_single_unfinished_rung_on_an_unknown_machine_makes_a_page(tmp_path: Path) -> None:
    text = "".join(Reader(page_of(made_up.one_rung(), tmp_path)).text)
    assert "not finished" in text
    assert "No datasheet is known" in text
    for absent in (
        "How close to the roof",
        "Claims against findings",
        "Where the time goes",
        "Does it still",
    ):
        assert absent not in text


def test_a_ladder_without_rungs_is_reported_as_empty(tmp_path: Path) -> None:
    text = "".join(Reader(page_of({**made_up.one_rung(), "rungs": []}, tmp_path)).text)
    assert "No rung has been measured yet." in text


def test_sixty_rungs_are_all_there(tmp_path: Path) -> None:
    read = Reader(page_of(made_up.sixty_rungs(), tmp_path))
    unable = sum(rung["verdict"] == "unsupported" for rung in made_up.sixty_rungs()["rungs"])
    assert sum(a.get("class") == "rung" for a in read.all("li")) == 60 - unable
    assert f"{unable} rungs cannot run here" in "".join(read.text)


def test_control_characters_do_not_break_the_file_and_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    ladder = made_up.one_rung()
    path = tmp_path / "ladder.json"
    ladder["rungs"][0]["title"] = "bad \ud800"
    path.write_text(json.dumps(ladder))
    with pytest.raises(DataError, match="is not JSON"):
        read_ladder(path)
    ladder["rungs"][0]["title"] = "bad \x00\x1b[31m red"
    path.write_text(json.dumps(ladder))
    page = report_page(read_ladder(path))
    assert "\x00" not in page
    assert "\x1b" not in page
    page.encode()


def _paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(parts)[:30]:
        found += _paths(part, (*here, key))
    return found


_OPTIONAL = {
    "ceilings",
    "peaks",
    "formulas",
    "drift",
    "batch_curve",
    "sequence_limits",
    "interactions",
    "finished",
}
_JUNK = [
    None,
    True,
    "",
    "x",
    -1,
    0,
    1e308,
    -1e308,
    1e-308,
    10**400,
    [],
    {},
    [None],
    {"median": 1},
    [[[]]],
    {"a": [{}]},
]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_part_is_missing_or_nonsense_the_rest_is_drawn(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    ladder = made_up.made_up_ladder()
    ladder["rungs"] = draw.sample(ladder["rungs"], 4)
    for _ in range(12):
        # The first two levels hold what makes it a ladder; deeper, anything may be missing.
        paths = [way for way in _paths(ladder) if len(way) > 2 or way[0] in _OPTIONAL]
        *way, last = draw.choice(paths)
        place: Any = ladder
        for key in way:
            place = place[key]
        if draw.random() < 0.4:
            del place[last]
        else:
            place[last] = copy.deepcopy(draw.choice(_JUNK))
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(ladder))
    try:
        found = read_ladder(path)
    except DataError:
        return  # Not a ladder any more, and said so.
    assert "</html>" in report_page(found)


def test_what_is_no_ladder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    with pytest.raises(DataError):
        write_report(path, tmp_path / "report.html")
    for content in ("{", "[]", '{"format": 99, "rungs": []}', '{"format": 1}'):
        path.write_text(content)
        with pytest.raises(DataError):
            write_report(path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
