"""Files of Debian packages to plain text: one small reader a kind, standard library only.

A reader takes the folder that a package was unpacked into and the files' patterns, and gives texts, one a document.
Lines that were broken for a terminal are joined again, so that a line end means something to the model.
"""

from __future__ import annotations

import gzip
import html
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

Reader = Callable[[Path, list[str]], Iterator[str]]

BLOCKS = frozenset({
    "p", "div", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "td", "th", "tr", "title", "item", "para", "desc",
    "blockquote", "section", "article", "br", "caption",
})  # fmt: skip
# What is around the text of a page, and what is no text. Mallard's `info` holds credits.
SKIPPED = frozenset({
    "script", "style", "head", "nav", "footer", "header", "info", "svg", "math", "button", "form", "select",
})  # fmt: skip


def opened(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix in (".gz", ".dz") else data


def read(path: Path) -> str:
    data = opened(path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def files(folder: Path, patterns: list[str]) -> list[Path]:
    """The files that match, without links: a page that has two names is read once."""
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return [path for path in found if path.is_file() and not path.is_symlink()]


def unwrapped(text: str) -> str:
    """Paragraphs on one line each. What stands deeper than its paragraph's first line may be code, and stays."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text.expandtabs())):
        # A line of one sign underlines a heading.
        lines = [
            line
            for line in block.rstrip().splitlines()
            if not re.fullmatch(r"\s*([=*~^#+_\"'-])\1{2,}\s*", line)
        ]
        deep = sum(line.startswith("    ") for line in lines)
        if deep > len(lines) / 2 and len(lines) > 1:
            paragraphs.append("\n".join(lines))
        else:
            paragraphs.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph.strip())


def read_text(folder: Path, patterns: list[str]) -> Iterator[str]:
    """Plain text, Markdown, reStructuredText."""
    for path in files(folder, patterns):
        text = re.sub(r":[a-z:]+:`~?([^`<]+?)(?: <[^>]*>)?`", r"\1", read(path))  # roles of reStructuredText
        text = re.sub(
            r"(?m)^( *)\.\. (_|index::|(?:current)?module::|sectionauthor::|highlight::).*\n", "", text
        )
        text = re.sub(r"(?m)^> ?", "", text)
        yield unwrapped(text.replace("``", "`"))


class Page(HTMLParser):
    """The text of a page, a line for each block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = [""]
        self.skipping = 0
        self.literal = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipping += tag in SKIPPED
        self.literal += tag == "pre"
        if tag in BLOCKS and self.lines[-1]:
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self.skipping = max(0, self.skipping - (tag in SKIPPED))
        self.literal = max(0, self.literal - (tag == "pre"))
        if tag in BLOCKS and self.lines[-1]:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if self.skipping:
            return
        if self.literal:
            self.lines[-1] += data
        else:
            self.lines[-1] += re.sub(r"\s+", " ", data.replace("¶", ""))


# What a page's menus and its table of contents say.
MENU = re.compile(
    r"\s*(Prev|Next|Up|Home|Menu|About|Documentation|Download|License|Support|Purchase|Search|Table [Oo]f Contents|"
    r"[►»«]?\s*Table Of Contents|Small\. Fast\. Reliable\.|Choose any three\.|(\d+\.)+\d*\.?\s.{0,80}|\W*)\s*"
)


def page_text(source: str) -> str:
    page = Page()
    page.feed(source)
    page.close()
    return "\n".join(line.strip("\n").rstrip() for line in page.lines if not MENU.fullmatch(line))


def read_html(folder: Path, patterns: list[str]) -> Iterator[str]:
    for path in files(folder, patterns):
        source = read(path)
        # What most generators call the page's own text, without menus.
        body = re.search(
            r'<(?:div|main)[^>]*(?:role="main"|class="(?:body|document|chapter|sect1)").*', source, re.S
        )
        yield page_text(body[0] if body else source)


def read_dictionary(folder: Path, patterns: list[str]) -> Iterator[str]:
    """dictd's databases: an index of base-64 offsets and lengths beside the compressed text."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = {digit: place for place, digit in enumerate(digits)}

    def number(text: str) -> int:
        total = 0
        for digit in text:
            total = total * 64 + value[digit]
        return total

    for path in files(folder, patterns):
        data = opened(path)
        index = read(path.with_name(path.name.replace(".dict.dz", ".index")))
        places = {}
        for line in index.splitlines():
            word, offset, length = line.split("\t")[:3]
            if not word.startswith("00"):  # what dictd says about itself
                places[number(offset)] = number(length)
        for offset, length in sorted(places.items()):
            yield entry(data[offset : offset + length].decode("utf-8", "replace"))


def entry(text: str) -> str:
    """An entry without pronunciations, marks of editors and braces around cross references."""
    text = re.sub(r"\\[^\\\n]{1,60}\\ ?,? ?", " ", text)
    text = re.sub(
        r"\[(?:1913 Webster|WordNet 1\.5|PJC|Century Dict\.[^\]]*|Webster \d+[^\]]*)(?: \+PJC)?\]", "", text
    )
    text = re.sub(r"\(\d{4}-\d\d-\d\d\)", "", text)
    text = re.sub(r"(?m)^[ \t]+", "", re.sub(r"[{}]", "", text))
    return re.sub(r"[ ]{2,}", " ", unwrapped(text)).strip()


def read_fortunes(folder: Path, patterns: list[str]) -> Iterator[str]:
    for path in files(folder, patterns):
        yield from read(path).split("\n%\n")


def read_manual(folder: Path, patterns: list[str]) -> Iterator[str]:
    """Manual pages: roff's macros to plain lines. Tables and pictures are left out."""
    for path in files(folder, patterns):
        text = read(path)
        if not text.startswith(".so "):
            yield manual_text(text)


def manual_text(source: str) -> str:
    source = re.sub(r"(?ms)^\.(TS|EQ|PS)\b.*?^\.(TE|EN|PE)\b.*?$", "", source)
    lines: list[str] = []
    for written in source.splitlines():
        line = written
        if line.startswith(("'", ".\\")):
            continue
        macro, _, rest = line.partition(" ")
        if macro in (".SH", ".SS", ".PP", ".P", ".LP", ".TP", ".IP", ".sp", ".HP"):
            lines += ["", rest.strip('"').split('" ')[0], ""] if macro in (".SH", ".SS") else [""]
            if macro == ".IP":
                lines.append(rest.strip('"').split('"')[0])
            continue
        if macro in (".B", ".I", ".SM"):
            line = rest.replace('"', "")
        elif macro in (".BR", ".BI", ".IR", ".RB", ".RI", ".IB", ".SB"):
            line = re.sub(r'"([^"]*)"|(\S+)\s*', lambda found: found[1] or found[2] or "", rest)
        elif line.startswith("."):
            continue
        lines.append(line)
    text = re.sub(r"\\f[BIRP]|\\f\(..|\\&|\\/|\\,|\\[|^]|\\s[-+]?\d", "", "\n".join(lines))
    for mark, letter in (
        ("\\-", "-"),
        ("\\(aq", "'"),
        ("\\(bu", "*"),
        ("\\(em", "—"),
        ("\\e", "\\"),
        ("\\ ", " "),
    ):
        text = text.replace(mark, letter)
    return unwrapped(re.sub(r"\\\(..|\\\[[^]]*\]|\\\*\([a-z]{2}", "", text))


def read_sword(folder: Path, patterns: list[str]) -> Iterator[str]:
    """SWORD's modules: zlib blocks, a book each; a file beside them (.bzs) says where they begin."""
    for path in files(folder, patterns):
        data, index = path.read_bytes(), path.with_suffix(".bzs").read_bytes()
        for start in sorted(
            {int.from_bytes(index[at : at + 4], "little") for at in range(0, len(index), 12)}
        ):
            text = zlib.decompressobj().decompress(data[start:]).decode("utf-8", "replace")
            text = re.sub(r"<(note|title)\b.*?</\1>", " ", text, flags=re.S)
            text = html.unescape(re.sub(r"<[^>]*>", " ", text))
            text = re.sub(r"\s+([,.;:!?”’])", r"\1", re.sub(r"([“‘])\s+", r"\1", text))
            yield re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()


def read_novels(folder: Path, patterns: list[str]) -> Iterator[str]:
    """R's lazy-loaded data: zlib blocks of serialized objects, of which only the strings are wanted."""
    for path in files(folder, patterns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            block = zlib.decompressobj()
            raw = block.decompress(data[at + 4 :])
            at = len(data) - len(block.unused_data)
            lines = []
            for found in re.finditer(rb"\x00[\x04\x00-\x09][\x00-\xff]\x09([\x00-\xff]{4})", raw):
                length = int.from_bytes(found[1], "big")
                if length < 200:
                    lines.append(raw[found.end() : found.end() + length].decode("utf-8", "replace"))
            novel = "\n".join(lines)
            yield from re.split(r"(?m)^(?=(?:CHAPTER|Chapter|VOLUME)\b)", unwrapped(novel))


def read_speeches(folder: Path, patterns: list[str]) -> Iterator[str]:
    """What people say in games: texts in back quotes, or marked for translation."""
    for path in files(folder, patterns):
        said = re.findall(r'`([^`]+)`|_ *"((?:[^"]|"")*)"', read(path))
        texts = [re.sub(r"<[^>]*>", "", (one or other).replace('""', '"')) for one, other in said]
        yield "\n".join(dict.fromkeys(unwrapped(text) for text in texts if len(text.split()) > 5))


def read_sections(folder: Path, patterns: list[str]) -> Iterator[str]:
    """Descriptions that stand between lines of percent signs."""
    for path in files(folder, patterns):
        for part in read(path).split("%%%%"):
            lines = [
                line for line in part.splitlines() if not re.match(r"[#:{}]|\s*(end|return|if|local) ", line)
            ]
            yield unwrapped("\n".join(lines))


READERS: dict[str, Reader] = {
    "text": read_text,
    "html": read_html,
    "dictionary": read_dictionary,
    "fortunes": read_fortunes,
    "manual": read_manual,
    "sword": read_sword,
    "novels": read_novels,
    "speeches": read_speeches,
    "sections": read_sections,
}
