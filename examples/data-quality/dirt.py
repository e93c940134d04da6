"""A corpus with planted dirt of known share: prose of the Python standard library, and four kinds of what a crawl brings along.

python examples/data-quality/dirt.py FOLDER writes raw.jsonl (everything, shuffled), clean.jsonl (the same without the dirt) and
held_out.jsonl (clean prose of modules that neither has). A row is {"text", "kind"}: only the count of what a stage removed reads
the kind. The dirt is made here from a seed: copies and near copies of few documents, advertisements, text whose encoding broke,
and sentences in other languages.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

SHARES = {
    "copy": 0.20,
    "near copy": 0.08,
    "boilerplate": 0.10,
    "broken encoding": 0.10,
    "other language": 0.12,
}
"""Fractions of the documents of raw.jsonl."""
HELD_OUT = 0.1
PROSE_WORDS = 25


def prose() -> Iterator[tuple[str, str]]:
    """Docstrings of the standard library with the module they stand in, once each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if {"site-packages", "test", "tests", "lib2to3", "idlelib"} & set(place.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "").strip()
                if len(text.split()) >= PROSE_WORDS and text.isascii() and text not in seen:
                    seen.add(text)
                    yield str(place), text


def boilerplate(chance: random.Random) -> str:
    site = f"{chance.choice(('best', 'top', 'my', 'super'))}-{chance.choice(('deals', 'tips', 'news', 'shop'))}{chance.randint(1, 999)}.com"
    lines = [
        f"We use cookies to improve your visit to {site}. By continuing you accept our cookie policy.",
        f"Subscribe to our newsletter and get {chance.randint(5, 70)} % off your next order!",
        f"Click here to read the {chance.randint(2, 99)} best offers of {chance.choice(('today', 'this week', 'the month'))}.",
        f"Share this on Facebook, Twitter, Pinterest. {chance.randint(1, 9999)} people like this.",
        f"Copyright {chance.randint(1999, 2025)} {site}. All rights reserved. Terms of service. Privacy policy.",
        f"Home | Products | About us | Contact | Log in | Cart ({chance.randint(0, 9)})",
    ]
    chance.shuffle(lines)
    return "\n".join(lines[: chance.randint(3, 6)])


def broken(text: str, chance: random.Random) -> str:
    """UTF-8 read as Windows-1252, once or twice, or characters lost: typographic signs become rows of others."""
    typed = text.replace("'", "’").replace(" - ", " – ").replace("...", "…").replace('"', "“")
    typed = "".join(
        chance.choice("éüñ") if letter in "eun" and chance.random() < 0.15 else letter for letter in typed
    )
    if chance.random() < 0.3:
        return typed.encode("ascii", "replace").decode().replace("?", "\ufffd")
    for _ in range(chance.choice((1, 2))):
        typed = typed.encode("utf-8").decode("cp1252", "replace")
    return typed


LANGUAGES = {
    "de": (("Der Hund", "Die Lehrerin", "Unser Nachbar", "Das kleine Kind", "Der alte Mann"),
           ("kauft", "findet", "vergisst", "sucht", "verkauft", "liest"),
           ("jeden Morgen", "am Abend", "im Winter", "nach der Arbeit", "schon wieder"),
           ("ein neues Buch", "den Schlüssel", "das rote Fahrrad", "eine lange Geschichte", "frisches Brot")),
    "fr": (("Le chien", "La voisine", "Notre professeur", "Le vieux monsieur", "Ma sœur"),
           ("achète", "cherche", "oublie", "trouve", "vend", "regarde"),
           ("tous les matins", "le soir", "en hiver", "après le travail", "encore une fois"),
           ("un nouveau livre", "la clé", "le vélo rouge", "une longue histoire", "du pain frais")),
    "es": (("El perro", "La vecina", "Nuestro profesor", "El viejo señor", "Mi hermana"),
           ("compra", "busca", "olvida", "encuentra", "vende", "mira"),
           ("todas las mañanas", "por la noche", "en invierno", "después del trabajo", "otra vez"),
           ("un libro nuevo", "la llave", "la bicicleta roja", "una larga historia", "pan fresco")),
    "ru": (("Собака", "Соседка", "Наш учитель", "Старый дедушка", "Моя сестра"),
           ("покупает", "ищет", "забывает", "находит", "продаёт", "смотрит на"),
           ("каждое утро", "вечером", "зимой", "после работы", "снова"),
           ("новую книгу", "этот ключ", "красный велосипед", "длинную историю", "свежий хлеб")),
}  # fmt: skip


def foreign(chance: random.Random) -> str:
    parts = LANGUAGES[chance.choice(sorted(LANGUAGES))]
    order = (0, 1, 2, 3)
    return " ".join(
        " ".join(chance.choice(parts[place]) for place in order) + "." for _ in range(chance.randint(5, 14))
    )


def near_copy(text: str, chance: random.Random) -> str:
    """Nine words of ten as they were, and a line of one's own."""
    words = [word if chance.random() > 0.01 else word.upper() for word in text.split(" ")]
    return " ".join(words) + f"\nSeen {chance.randint(2, 900)} times."


def pieces(text: str, words: int = 60) -> Iterator[str]:
    """Cut at ends of lines into pieces that a short context holds whole."""
    held: list[str] = []
    for line in text.splitlines():
        if held and len(" ".join([*held, line]).split()) > words:
            yield "\n".join(held)
            held = []
        held.append(line)
    yield "\n".join(held)


def make(folder: Path, seed: int = 1) -> None:
    chance = random.Random(seed)
    found = list(prose())
    modules = sorted({module for module, _ in found})
    held = {module for module in modules if zlib.crc32(module.encode()) % 1000 < 1000 * HELD_OUT}
    clean = [{"text": text, "kind": "clean"} for module, text in found if module not in held]
    total = round(len(clean) / (1 - sum(SHARES.values())))
    counts = {kind: round(total * share) for kind, share in SHARES.items()}
    # A mirror copies whole sites: few documents, many times.
    copied = chance.sample(clean, max(1, counts["copy"] // 12))
    dirt = [{"text": chance.choice(copied)["text"], "kind": "copy"} for _ in range(counts["copy"])]
    dirt += [
        {"text": near_copy(chance.choice(copied)["text"], chance), "kind": "near copy"}
        for _ in range(counts["near copy"])
    ]
    dirt += [{"text": boilerplate(chance), "kind": "boilerplate"} for _ in range(counts["boilerplate"])]
    dirt += [{"text": broken(chance.choice(clean)["text"], chance), "kind": "broken encoding"}
             for _ in range(counts["broken encoding"])]  # fmt: skip
    dirt += [{"text": foreign(chance), "kind": "other language"} for _ in range(counts["other language"])]
    raw = [*clean, *dirt]
    chance.shuffle(raw)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [
        {"text": piece, "kind": "clean"} for module, text in found if module in held for piece in pieces(text)
    ]
    for name, rows in (("raw", raw), ("clean", clean), ("held_out", held_out)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
