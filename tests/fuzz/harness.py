"""Fuzzing: hostile input against the code that reads it, with one rule for what may happen.

A case is some bytes and a call that reads them. The call may return, or raise an error of rush/errors.py with a message that
a person can read: at most 2,000 characters, no raw control characters. Everything else is a failure: another exception, more
than 2 seconds, a traceback on standard error, memory without bound. A failure is shrunk, written to `tests/fuzz/corpus/NAME/`
and tried again by every later run before anything else, so a mended bug stays mended.

    @cases(0.05)  # 5 % of all cases: 100 of 2,000 in `make test`, 5,000 of 100,000 in `make test-all`
    def test_any_config_ends_in_a_message(count: int, folder: Path) -> None:
        def read(content: bytes) -> object:
            (folder / "config.json").write_bytes(content)
            return shape_from_config(read_json(folder / "config.json"))

        fuzz("config", read, [seed], count)

Runs are the same every time. RUSH_FUZZ_SEED=7 gives others, RUSH_FUZZ_CASES=30000 more of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from rush.errors import RushError
from tests.fuzz.mutations import mutate

CORPUS = Path(__file__).parent / "corpus"
QUICK, MANY = 2_000, 100_000
LONGEST_S, LONGEST_MESSAGE, ROOM_BYTES = 2.0, 2_000, 4 << 30
EXIT_CODES = {0, 2, 3, 4, 5}
Read = Callable[[bytes], object]
Mutate = Callable[[random.Random, bytes], bytes]


def cases(share: float) -> pytest.MarkDecorator:
    """The `count` of a fuzzer that runs this share of all cases."""
    if total := os.environ.get("RUSH_FUZZ_CASES"):
        return pytest.mark.parametrize("count", [max(1, round(int(total) * share))])
    quick, many = (max(1, round(total * share)) for total in (QUICK, MANY))
    slow = [pytest.mark.slow, pytest.mark.timeout(3600)]
    return pytest.mark.parametrize("count", [quick, pytest.param(many, marks=slow)])


@dataclass(frozen=True)
class Failure:
    """What a call did that it must not do; `place` is equal for cases of one bug."""

    place: str
    what: str


class TooLong(BaseException):
    """Raised inside a call after 2 seconds. No `except Exception` may swallow it."""


def check(call: Callable[[], object]) -> None:
    """Run a call; an AssertionError says what it did that it must not do."""
    if failure := problem(call):
        raise AssertionError(failure.what)


def check_command(words: Sequence[str]) -> None:
    """Run `rush WORDS` in this process: one of the documented exit codes, one message."""
    check(lambda: run_command(words))


def run_command(words: Sequence[str]) -> None:
    """`rush WORDS`, which raises instead of printing an error; an exit code that is not documented is an AssertionError."""
    from rush.cli import main

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main([*words, "--debug"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        assert code in EXIT_CODES, f"exit code {code}: {said.getvalue()[-2000:]}"
    if complaint := unreadable(said.getvalue(), LONGEST_MESSAGE + 500):  # typer's usage text comes on top
        raise AssertionError(complaint)


def problem(call: Callable[[], object]) -> Failure | None:
    """What a call does that it must not do; None if nothing."""
    said = io.StringIO()
    try:
        with limits(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            call()
    except RushError as error:
        if error.exit_code not in EXIT_CODES:
            return Failure(f"{type(error).__name__} {_place(error)}", f"exit code {error.exit_code}: {error}")
        if complaint := unreadable(str(error), LONGEST_MESSAGE):
            return Failure(f"message {type(error).__name__} {_place(error)}", complaint)
    except (KeyboardInterrupt, pytest.skip.Exception):
        raise
    except BaseException as error:  # also the panics of extensions
        if type(error).__module__.startswith("hypothesis"):
            raise
        return Failure(f"{type(error).__name__} {_place(error)}", _shown(error))
    if "Traceback (most recent" in said.getvalue():
        return Failure("traceback on stderr", said.getvalue()[-2000:])
    return None


def unreadable(message: str, longest: int) -> str | None:
    """Why a person cannot read this message; None if they can."""
    if len(message) > longest:
        return f"a message of {len(message):,} characters: {message[:200]!a}…"
    raw = [c for c in message if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    return f"raw control characters {raw[:3]!a} in a message: {message[:300]!a}" if raw else None


def fuzz(
    name: str, read: Read, seeds: Sequence[bytes], count: int, mutators: Sequence[Mutate] = (mutate,)
) -> None:
    """Run the corpus of `name`, the seeds, and `count` mutations of the seeds; report every distinct failure once."""
    found: dict[str, str] = {}
    for seed in seeds:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            read(seed)  # must pass, or every mutation of it would be refused for the same reason
    for content in corpus(name):
        _try(name, read, content, found)
    for number in range(count):
        chance = random.Random(f"{os.environ.get('RUSH_FUZZ_SEED', '0')} {name} {number}")
        content = chance.choice(mutators)(chance, chance.choice(seeds))
        _try(name, read, content, found)
        if len(found) >= 20:
            break
    if found:
        raise AssertionError("\n\n".join(f"{place}\n  {what}" for place, what in found.items()))


def explore(name: str, strategy: SearchStrategy[bytes], read: Read, count: int) -> None:
    """Run the corpus of `name` and `count` examples of a hypothesis strategy of bytes."""
    found: dict[str, str] = {}
    for content in corpus(name):
        _try(name, read, content, found)

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize="RUSH_FUZZ_SEED" not in os.environ,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(content: bytes) -> None:
        if len(found) < 20:
            _try(name, read, content, found)

    each()
    if found:
        raise AssertionError("\n\n".join(f"{place}\n  {what}" for place, what in found.items()))


def corpus(name: str) -> list[bytes]:
    """Inputs that broke something once."""
    return [file.read_bytes() for file in sorted((CORPUS / name).glob("*"))]


def _try(name: str, read: Read, content: bytes, found: dict[str, str]) -> None:
    with _left_behind(name, content):
        failure = problem(lambda: read(content))
    if failure is None or failure.place in found:
        return
    least = _shrunk(read, content, failure)
    file = CORPUS / name / hashlib.sha256(least).hexdigest()[:12]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(least)
    found[failure.place] = f"{failure.what}\n  input: {file} ({len(least)} bytes) {least[:300]!r}"


def _shrunk(read: Read, content: bytes, failure: Failure, budget_s: float = 10.0) -> bytes:
    """The same failure with fewer bytes: pieces are taken out as long as it stays, large ones first."""
    until, size = time.monotonic() + budget_s, len(content)
    while (size := size // 2) and time.monotonic() < until:
        begin = 0
        while begin < len(content) and time.monotonic() < until:
            shorter = content[:begin] + content[begin + size :]
            again = problem(lambda shorter=shorter: read(shorter))  # type: ignore[misc]
            if again is not None and again.place == failure.place:
                content = shorter
            else:
                begin += size
    return content


@contextlib.contextmanager
def _left_behind(name: str, content: bytes) -> Iterator[None]:
    """The input as a file while it is tried: what aborts the process is found there."""
    file = Path(tempfile.gettempdir()) / f"rush-fuzz-{name.replace('/', '-')}-{os.getpid()}"
    file.write_bytes(content)
    yield
    file.unlink()


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """2 seconds of processor time (whatever else the machine does) and 4 GiB of further memory."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {LONGEST_S} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _place(error: BaseException) -> str:
    """The innermost line of rush (or else of anything) on the stack of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if re.search(r"/rush/(?!.*site-packages)", frame.filename)]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _shown(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    deepest = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-12:]))
    return f"{type(error).__name__}: {str(error)[:300]!a} at {deepest}"
