"""Chat data from the standard library's docstrings, available on every machine.

Source files are parsed, not imported. Questions about public modules, classes and functions vary in wording; answers are first
paragraphs, whole docstrings, signatures and lists of methods; classes have conversations of several turns. Wording and kind
depend on a hash of the name alone.

For preferences the rejected answer is one of four kinds: another object's docstring, the right answer without its last word,
with two neighboring words swapped, or its beginning repeated. A small model prefers it often enough to learn something.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rush.errors import DataError

VERSION = 2
"""Part of the fingerprint of prepared data: increase it when the rows change."""

_T = TypeVar("_T")
# Programs that come with Python, and packages that newer versions removed.
_SKIPPED = frozenset({"idlelib", "lib2to3", "distutils", "turtledemo", "ensurepip"})
_ANSWER_LETTERS = 600
_WHAT = {
    "module": (
        "What is the module {name} for?",
        "What does the Python module {name} do?",
        "Tell me about the module {name}.",
        "I found `import {name}` in a program. What is it?",
        "When would I use {name}?",
    ),
    "class": (
        "What is {name}?",
        "What is the class {name} for?",
        "Describe the class {name}.",
        "Can you explain {name} to me?",
        "What does an object of {name} do?",
    ),
    "function": (
        "What does {name} do?",
        "What is {name} for?",
        "Explain the function {name}.",
        "Can you tell me what {name}() does?",
        "I saw a call of {name}. What happens there?",
        "In one sentence: what is the purpose of {name}?",
    ),
}
_DETAIL = (
    "Explain {name} in detail.",
    "What is the full documentation of {name}?",
    "Tell me all about {name}.",
)
_CALL = ("How do I call {name}?", "What is the signature of {name}?", "Which arguments does {name} take?")
_METHODS = ("Which methods does it have?", "What can I call on it?", "What are its methods?")
_METHOD = ("And what does {name} do?", "What is {name} for?", "Explain its method {name}.")


@dataclass
class _Thing:
    """A module, class or function that has a docstring."""

    kind: str
    name: str
    docstring: str
    line: int
    call: str = ""
    methods: list[_Thing] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """The first paragraph as one line."""
        return " ".join(re.split(r"\n\s*\n", self.docstring, maxsplit=1)[0].split())

    @property
    def short_name(self) -> str:
        return self.name.rsplit(".", 1)[-1]


Rows = Iterator[tuple[str, dict[str, Any], str]]


def docstring_questions(path: str) -> Rows:
    """Chat rows of a source file: name, fields, group."""
    for thing in _things(path):
        for number, messages in enumerate(_conversations(thing)):
            yield f"{path}:{thing.line} {thing.name}#{number}", {"messages": messages}, thing.name


def docstring_pairs(path: str) -> Rows:
    """Preference rows of a source file: name, fields, group."""
    things = _things(path)
    everything = [*things, *(method for thing in things for method in thing.methods)]
    answers = sorted({thing.summary for thing in everything})
    for thing in things:
        for one in (thing, *thing.methods):
            wrong = _wrong_answer(one, answers)
            if wrong is None or not _is_answer(one.summary):
                continue
            prompt = _pick(_WHAT[one.kind], one.name, "question").format(name=one.name)
            row = {"prompt": prompt, "chosen": one.summary, "rejected": wrong}
            yield f"{path}:{one.line} {one.name}", row, thing.name


def _conversations(thing: _Thing) -> Iterator[list[dict[str, str]]]:
    name = thing.name
    if _is_answer(thing.summary):
        yield _talk(_pick(_WHAT[thing.kind], name, "first").format(name=name), thing.summary)
        yield _talk(_pick(_WHAT[thing.kind], name, "second", other="first").format(name=name), thing.summary)
    if thing.docstring != thing.summary and _is_answer(thing.docstring):
        yield _talk(_pick(_DETAIL, name, "detail").format(name=name), thing.docstring)
    if thing.call:
        yield _talk(_pick(_CALL, name, "call").format(name=name), thing.call)
    if thing.methods and _is_answer(thing.summary):
        method = _pick(thing.methods, name, "method")
        known = ", ".join(one.short_name for one in thing.methods)
        talk = _talk(_pick(_WHAT[thing.kind], name, "talk").format(name=name), thing.summary)
        talk += _talk(_pick(_METHODS, name, "methods"), f"It has these methods: {known}.")
        if _is_answer(method.summary):
            talk += _talk(_pick(_METHOD, name, "of").format(name=method.short_name), method.summary)
        if len(known) <= _ANSWER_LETTERS:
            yield talk
    for method in thing.methods:
        if _is_answer(method.summary):
            yield _talk(
                _pick(_WHAT["function"], method.name, "first").format(name=method.name), method.summary
            )


def _talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _is_answer(answer: str) -> bool:
    """Whether a text has the length of an answer."""
    return 12 <= len(answer) <= _ANSWER_LETTERS


def _wrong_answer(thing: _Thing, answers: Sequence[str]) -> str | None:
    """A wrong answer about `thing`; None where there is none."""
    right, words = thing.summary, thing.summary.split()
    kind = _number(thing.name, "wrong") % 4
    if kind == 1 and len(words) >= 4:
        return " ".join(words[:-1])
    if kind == 2 and len(words) >= 4:
        place = _number(thing.name, "place") % (len(words) - 1)
        words[place : place + 2] = reversed(words[place : place + 2])
        return " ".join(words) if words != right.split() else None
    if kind == 3 and len(words) >= 4:
        return " ".join([*words[:3]] * max(2, len(words) // 3))
    others = [answer for answer in answers if answer != right and _is_answer(answer)]
    return _pick(others, thing.name, "other") if others else None


def _pick(choices: Sequence[_T], *key: str, other: str | None = None) -> _T:
    """One of the choices, by a hash of `key`; with `other`, not the one picked for that key."""
    number = _number(*key)
    if other is None or len(choices) == 1:
        return choices[number % len(choices)]
    taken = _number(*key[:-1], other) % len(choices)
    return choices[(taken + 1 + number % (len(choices) - 1)) % len(choices)]


def _number(*key: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(key).encode(), digest_size=8).digest(), "little")


def _things(path: str) -> list[_Thing]:
    """The public objects of a source file that have docstrings; methods within their class."""
    module = _module_name(Path(path))
    parts = module.split(".")
    if parts[0] in _SKIPPED or any(part.startswith("_") for part in parts):
        return []
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Python source ({error}).") from error
    found = [_thing("module", module, tree, 1)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            thing = _thing("class", f"{module}.{node.name}", node, node.lineno)
            methods = [
                inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            made = [_function(f"{thing.name}.{inner.name}", inner) for inner in methods]
            thing.methods = _distinct([one for one in made if _public(one)])
            found.append(thing)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(_function(f"{module}.{node.name}", node))
    return _distinct([thing for thing in found if _public(thing)])


def _function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> _Thing:
    thing = _thing("function", name, node, node.lineno)
    thing.call = f"{name}({ast.unparse(node.args)})"
    return thing


def _thing(
    kind: str, name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, line: int
) -> _Thing:
    return _Thing(kind, name, inspect.cleandoc(ast.get_docstring(node) or ""), line)


def _public(thing: _Thing) -> bool:
    return bool(thing.summary) and not thing.short_name.startswith("_")


def _distinct(things: list[_Thing]) -> list[_Thing]:
    """The last of each name: a function may be redefined for another platform."""
    return list({thing.name: thing for thing in things}.values())


def _module_name(path: Path) -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    parts = [*relative.parent.parts, relative.stem]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
