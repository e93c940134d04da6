"""The harness finds what it is there to find."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rush.errors import DataError, OwnFault
from tests.fuzz import harness
from tests.fuzz.harness import corpus, fuzz, problem
from tests.fuzz.mutations import mutate


class Loud(DataError):
    """An error whose message is passed on as it is."""

    def __str__(self) -> str:
        return str(self.args[0])


def bomb() -> None:
    bytearray(64 << 30)


def forever() -> None:
    while True:
        pass


def traceback_in_a_thread() -> None:
    sys.stderr.write("Traceback (most recent call last):\n  …")


def fail(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (fail(ValueError("odd")), "ValueError"),
        (fail(OwnFault("ours")), "exit code 1"),
        (fail(Loud("x" * 2001)), "2,001 characters"),
        (fail(Loud("\x1b[2J")), "control characters"),
        (fail(Loud("\ud800")), "control characters"),
        (forever, "more than 0.2 seconds"),
        (bomb, "MemoryError"),
        (traceback_in_a_thread, "Traceback"),
    ],
)
def test_what_must_not_happen_is_a_failure(
    call: Callable[[], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "LONGEST_S", 0.2)
    failure = problem(call)
    assert failure is not None
    assert words in failure.what


def test_a_result_and_a_message_are_allowed() -> None:
    assert problem(lambda: 1) is None
    assert problem(fail(DataError(f"\x1b[2J {'x' * 100_000} \ud800"))) is None


def test_a_failure_is_shrunk_kept_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CORPUS", tmp_path)

    def read(content: bytes) -> None:
        assert b"7" not in content

    with pytest.raises(AssertionError, match="input: "):
        fuzz("sevens", read, [b"123456"], 300)
    assert corpus("sevens") == [b"7"]
    with pytest.raises(AssertionError, match="input: "):
        fuzz("sevens", read, [b"123456"], 0)


def test_mutations_are_the_same_in_every_run() -> None:
    once, again = ([mutate(Random(n), b'{"a": [1, {"b": null}]}') for n in range(200)] for _ in range(2))
    assert once == again
    assert len(set(once)) > 100
