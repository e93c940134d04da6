"""Whose code stands on the stack of an error: which of a recipe's techniques to look at first.

A technique's code is its own file, the helpers beside it and the kernels it imports (also from inside a function, which is
how kernels are imported), and the third-party packages it imports; all of that is read from the source, nothing is listed
here. Compiled code and the compiler belong to the techniques that compile. A compiler that fails while it traces has no
frame of what it traced: it prints the place in its message, so messages are searched for places as well.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rush.techniques.api.contract import Technique, Use

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("torch", "numpy", "psutil", "triton", "pydantic", *sys.stdlib_module_names)
COMPILER = tuple(
    Path(torch.__file__).resolve().parent / name for name in ("_dynamo", "_inductor", "_functorch")
)
_PLACE = re.compile(r'File "([^"\n]+)", line (\d+)(?:, in (\S+))?')


@dataclass(frozen=True)
class CodeLine:
    """A line of code that an error went through."""

    file: Path
    line: int
    function: str

    def __str__(self) -> str:
        shown = self.file.relative_to(ROOT.parent) if self.file.is_relative_to(ROOT) else self.file
        return f"{shown}:{self.line}, in {self.function}"


@dataclass(frozen=True)
class Suspect:
    """A technique whose code stands on the stack, and where, the innermost line."""

    technique: Technique
    place: CodeLine
    compiles: bool
    """Whether it stands there only because it compiles the code that the error came through."""

    @property
    def file(self) -> Path | None:
        """The user's own file that it came from, if it is none of this package."""
        home = home_of(self.technique)
        return None if home is None or home.is_relative_to(ROOT) else home


def chain(error: BaseException) -> list[BaseException]:
    """The error and what it came from, the root last."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return found


def suspects(error: BaseException, uses: Sequence[Use]) -> list[Suspect]:
    """Of these techniques those whose code stands on the stack, the innermost first; those that compile it come last."""
    owned = [(place, owners) for place in places(error) if (owners := _owners(place.file, uses))]
    # Helpers serve several techniques; another line may tell whose call it was.
    sure = {owners[0].name for _, owners in owned if len(owners) == 1}
    found: dict[str, Suspect] = {}
    for place, owners in owned:
        for technique in [one for one in owners if one.name in sure] or owners:
            found.setdefault(technique.name, Suspect(technique, place, _of_compiler(place.file)))
    return sorted(found.values(), key=lambda suspect: suspect.compiles)


def places(error: BaseException) -> list[CodeLine]:
    """Every line the error and its causes went through, the innermost first."""
    found: list[CodeLine] = []
    for one in reversed(chain(error)):
        found += reversed(list(_named_in(str(one))))
        frames = traceback.walk_tb(one.__traceback__)
        found += [
            CodeLine(Path(frame.f_code.co_filename), line, frame.f_code.co_name)
            for frame, line in reversed(list(frames))
            # What switches the compiler off for a call is no compiled code.
            if "DisableContext" not in frame.f_code.co_qualname
        ]
    return found


def compiler_failed(error: BaseException) -> bool:
    """Whether the compiler itself gave up, rather than what it compiled."""
    return any(type(one).__module__.startswith(("torch._dynamo", "torch._inductor")) for one in chain(error))


def _named_in(message: str) -> Iterator[CodeLine]:
    for file, line, function in _PLACE.findall(message):
        yield CodeLine(Path(file), int(line), function or "a module")


def _owners(file: Path, uses: Sequence[Use]) -> list[Technique]:
    if _of_compiler(file):
        return [use.technique for use in uses if use.technique.compiles(use.knobs)]
    homes = {use.technique.name: home_of(use.technique) for use in uses}
    if own := [use.technique for use in uses if homes[use.technique.name] == file]:
        return own
    return [
        use.technique
        for use in uses
        if (home := homes[use.technique.name]) is not None
        and any(file.is_relative_to(root) for root in _code_of(home))
    ]


def _of_compiler(file: Path) -> bool:
    """Whether this is the compiler's own file, or one that it wrote."""
    generated = any(part.startswith("torchinductor") for part in file.parts)
    return generated or any(file.is_relative_to(root) for root in COMPILER)


def home_of(technique: Technique) -> Path | None:
    """The file that defines a technique."""
    module = sys.modules.get(getattr(technique.apply, "__module__", ""))
    return Path(module.__file__) if module is not None and module.__file__ else None


@cache
def _code_of(file: Path) -> frozenset[Path]:
    """The files and folders of helpers, kernels and packages that a technique's file imports, and they in turn."""
    found: set[Path] = set()
    open_files = [file]
    seen: set[Path] = set()
    while open_files:
        one = open_files.pop()
        if one in seen:
            continue
        seen.add(one)
        for name in _imported(one):
            root = _root_of(name)
            if root is None or root in found:
                continue
            found.add(root)
            if root.is_relative_to(ROOT):
                open_files += sorted(root.glob("*.py")) if root.is_dir() else [root]
    return frozenset(found)


def _imported(file: Path) -> list[str]:
    """The modules that a file imports, anywhere in it and also by `import_module` or `load_library` with a name."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("import_module", "load_library")
        ):
            names += [str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)]
    return names


def _root_of(name: str) -> Path | None:
    """Where the code of an imported name lies: a technique's helper, a kernel's folder, or a third-party package."""
    parts = name.split(".")
    if parts[0] == "rush":
        # A kernel is a folder of its room; a helper is a file of a group of techniques.
        depth = {"kernels": 3, "techniques": 4}.get(parts[1], 0)
        if not depth or len(parts) < depth or parts[2:4] == ["api", "contract"] or parts[2] == "support":
            return None
        home = ROOT.joinpath(*parts[1:depth])
        return (
            home if home.is_dir() else home.with_suffix(".py") if home.with_suffix(".py").is_file() else None
        )
    if parts[0] in SHARED:
        return None
    spec = importlib.util.find_spec(parts[0])
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin
