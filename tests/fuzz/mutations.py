"""Mutations of real files: what strangers, broken disks and attackers make of them.

`mutate` picks one by the content. All are functions of a random generator and some bytes, so a case is repeatable.
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

DEEP = 10_000
HOSTILE_TOKENS = (
    b"1e309", b"-1e309", b"NaN", b"Infinity", b"-Infinity", b"nan", b"inf", b"-1", b"0", b"-0.0", b"1e-320", b"0.5",
    b"18446744073709551616", b"9223372036854775808", b"-9223372036854775809", b"1000000000001", b"2147483648",
    b"1" + b"0" * 5_000, b'""', b'"' + b"n" * 300 + b'"', b"n" * 300, b"null", b"true", b"false", b"[]", b"{}",
    b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"[" * DEEP, b'"\\u0000"', b'"\\u001b[2J"',
    b'"\\ud800"', b'"\x1b[2J\x07"', b'"\xc2\x9b2J"', b'"\xe2\x80\xae"', b"[1]", b'[[1], "x"]', b'{"a": 1}', b'"1"', b'"../../etc/passwd"',
    b'"/dev/zero"', b'"<script>alert(1)</script>"', b'"$(touch x)"', b"'", b'"', b"`", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf",
)  # fmt: skip
"""Spelled as in JSON or TOML."""
HOSTILE_VALUES: tuple[Any, ...] = (
    float("inf"), float("nan"), -float("inf"), -1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**12 + 1, 10**400, 1e-320, 1.5, True,
    False, None, "", "n" * 300, "\x00", "\x1b[2J", "\ud800", "\u202e", "a\nb", "../../etc/passwd", "/dev/zero", "$(touch x)",
    "<script>alert(1)</script>", [], {}, [[]], [None], {"a": 1}, {"": None}, [1, "x"], "1", "nan", ["x"] * 300,
)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d[\d.eE+-]*|[A-Za-z_][\w.-]*')


def mutate(chance: Random, content: bytes) -> bytes:
    """One to three mutations, of the kinds that fit the content."""
    kinds = [mutate_bytes, mutate_tokens]
    if content[:1] in (b"{", b"["):
        kinds += [mutate_json, mutate_json] if b"\n{" not in content else [mutate_lines, mutate_lines]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = chance.choice(kinds)(chance, content)
    return content


def mutate_bytes(chance: Random, content: bytes) -> bytes:
    """Damage: flipped bits, truncation, a piece twice, a piece gone, foreign bytes."""
    begin, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    match chance.randrange(6):
        case 0 if content:
            place = chance.randrange(len(content))
            return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
        case 1:
            return content[:begin]
        case 2:
            return content[:end] + content[begin:]
        case 3:
            return content[:begin] + content[end:]
        case 4:
            return content[:begin] + chance.randbytes(chance.choice((1, 4, 64))) + content[begin:]
        case _:
            return content[:begin] + chance.choice(HOSTILE_TOKENS) + content[begin:]


def mutate_tokens(chance: Random, content: bytes) -> bytes:
    """A word, number or string of any text format is another one."""
    tokens = list(_TOKEN.finditer(content))
    if not tokens:
        return content + chance.choice(HOSTILE_TOKENS)
    token, other = chance.choice(tokens), chance.choice(tokens).group()
    new = other if chance.random() < 0.2 else chance.choice(HOSTILE_TOKENS)
    return content[: token.start()] + new + content[token.end() :]


def mutate_json(chance: Random, content: bytes) -> bytes:
    """A value of a JSON tree is hostile, gone, wrapped, renamed or another's. Text that is no JSON stays."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return content
    tree = mutate_tree(chance, tree)
    try:
        written = json.dumps(tree, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return content
    return written


def mutate_lines(chance: Random, content: bytes) -> bytes:
    """One line of many is mutated as JSON, or comes twice, or is gone."""
    lines = content.split(b"\n")
    place = chance.randrange(len(lines))
    match chance.randrange(6):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, chance.choice(lines))
        case _:
            lines[place] = mutate_json(chance, lines[place])
    return b"\n".join(lines)


def mutate_tree(chance: Random, tree: Any) -> Any:
    """A copy of a tree of dicts and lists with one place changed."""
    places = list(_places(tree))
    if not places or chance.random() < 0.02:
        return chance.choice(HOSTILE_VALUES)
    path = chance.choice(places)
    match chance.randrange(8):
        case 0:
            return _changed(tree, path, _GONE)
        case 1:
            return _changed(tree, path, [_at(tree, path)])
        case 2:
            return _changed(tree, path, {"value": _at(tree, path)})
        case 3:
            return _changed(tree, path, _at(tree, chance.choice(places)))
        case 4 if isinstance(path[-1], str):
            key = chance.choice(
                (*(str(p[-1]) for p in places), "", "n" * 300, "\x1b[2J", "\ud800", "__class__")
            )
            return _changed(_changed(tree, path, _GONE), (*path[:-1], key), _at(tree, path))
        case _:
            return _changed(tree, path, chance.choice(HOSTILE_VALUES))


_GONE = object()
_Path = tuple[str | int, ...]


def _places(tree: Any, path: _Path = ()) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:20]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _at(tree: Any, path: _Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _changed(tree: Any, path: _Path, value: Any) -> Any:
    if not path:
        return value
    head, *rest = path
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if rest:
        copy[head] = _changed(copy[head], tuple(rest), value)
    elif value is _GONE:
        del copy[head]
    else:
        copy[head] = value
    return copy


def mutate_header(chance: Random, content: bytes) -> bytes:
    """The header of a safetensors file says something else, with its own length right or wrong."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = mutate(chance, content[8:end])
    length = len(header) if chance.random() < 0.9 else chance.choice((0, 1, 2**31, 2**62, 2**64 - 1))
    return length.to_bytes(8, "little") + header + content[end:]
