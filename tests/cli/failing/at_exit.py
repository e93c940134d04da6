"""A technique that raises when the process ends, in a callback; and would abort it, in a destructor."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Mapping

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique


def fail() -> None:
    raise OSError("planted at exit")


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    atexit.register(fail)
    # As a destructor of C++ that throws: the process dies of SIGABRT once the interpreter is gone.
    library = ctypes.CDLL(None)
    library.__cxa_atexit(library.abort, None, None)


technique = Technique(
    name="at_exit",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
