"""From C++ and CUDA source to operators of torch: built once, kept in the user's cache, loaded from there.

C++ needs a compiler and nothing else; with CUDA source among it torch's own builder is used, which needs nvcc and ninja.
A build happens in a folder of its own and its result is moved to a name made of everything it depends on, so a build
that was killed leaves nothing that a later one could trip over, and two at once do no harm.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rush.errors import MachineError

FLAGS = ("-O2",)


def cannot_build() -> str | None:
    """Why no extension can be built here; None if one can."""
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler ({_compiler()})"
    return None


def cannot_build_cuda() -> str | None:
    """Why the CUDA part of an extension cannot be built here; None if it can."""
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device to build for"
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").is_file():
        return "there is no CUDA compiler (nvcc); set CUDA_HOME to where it is"
    if not is_ninja_available():
        return "ninja is not installed"
    return cannot_build()


def build(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = FLAGS
) -> Path:
    """Load the operators that the sources register, building them if the cache does not hold them: the library.

    `flags` are the C++ compiler's.
    """
    library = library_of(name, sources, headers, flags)
    if library.is_file():
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    else:
        _build_and_load(name, sources, flags, library)
    return library


def library_of(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = FLAGS
) -> Path:
    """Where the library of these sources is kept, once it is built."""
    return cache_folder() / "extensions" / f"{name}-{_identity([*sources, *headers], flags)}.so"


def _build_and_load(name: str, sources: Sequence[Path], flags: Sequence[str], library: Path) -> None:
    has_cuda = any(source.suffix == ".cu" for source in sources)
    if reason := cannot_build_cuda() if has_cuda else cannot_build():
        raise MachineError(f"The extension {name} cannot be built here: {reason}.")
    # Or nobody would know what takes so long.
    print(f"rush: building {name} (once, half a minute or so)", file=sys.stderr, flush=True)  # noqa: T201
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=library.parent) as workshop:
            make = _make_with_cuda if has_cuda else _make
            os.replace(make(name, sources, flags, Path(workshop)), library)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise MachineError(f"The extension {name} could not be built: {error}") from error
    if not has_cuda:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def _make(name: str, sources: Sequence[Path], flags: Sequence[str], workshop: Path) -> Path:
    """The library of C++ sources, made by the commands that torch's builder would give to ninja.

    The linker is not given the flags: with -fopenmp it would take the system's OpenMP, and torch has its own loaded.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [word for folder in include_paths() for word in ("-isystem", folder)]
    _compile(
        [*includes, "-fPIC", "-std=c++20", *flags, "-c", *(str(source.resolve()) for source in sources)],
        workshop,
    )
    objects = [f"{source.stem}.o" for source in sources]
    folders = [f"-L{folder}" for folder in library_paths()]
    library = workshop / f"{name}.so"
    _compile([*objects, "-shared", *folders, "-lc10", "-ltorch_cpu", "-ltorch", "-o", library.name], workshop)
    return library


def _compile(words: Sequence[str], folder: Path) -> None:
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [_compiler(), *words], cwd=folder, env=english, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = done.stderr.splitlines()
        wrong = [line for line in said if "error" in line] or said or [f"exit status {done.returncode}"]
        raise RuntimeError("; ".join(wrong[:2]))


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _make_with_cuda(name: str, sources: Sequence[Path], flags: Sequence[str], workshop: Path) -> Path:
    """The library, which torch's builder also loads: it is mapped already, and stays so under its new name."""
    from torch.utils.cpp_extension import load

    load(
        name,
        [str(source) for source in sources],
        extra_cflags=list(flags),
        extra_cuda_cflags=["-O3"],
        extra_ldflags=[f"-L{folder}" for folder in _cuda_libraries()],
        build_directory=str(workshop),
        is_python_module=False,
    )
    return workshop / f"{name}.so"


def _cuda_libraries() -> list[Path]:
    """Where the CUDA runtime may lie: nvcc on the path can be a link or a script far from its libraries."""
    from torch.utils.cpp_extension import CUDA_HOME

    homes = [
        Path(CUDA_HOME or "/usr/local/cuda"),
        Path("/usr/local/cuda"),
        *Path("/usr/local").glob("cuda-*"),
    ]
    return [home / "lib64" for home in homes if (home / "lib64" / "libcudart.so").is_file()]


def _identity(files: Sequence[Path], flags: Sequence[str] = FLAGS) -> str:
    """Of everything a library depends on: sources and flags, torch, Python's platform, the GPU it is built for."""
    said = [torch.__version__, torch.version.cuda, platform.machine(), *flags]
    digest = hashlib.sha256(" ".join(map(str, said)).encode())
    if torch.cuda.is_available():
        digest.update(str(torch.cuda.get_device_capability()).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """`$RUSH_CACHE`, else `$XDG_CACHE_HOME/rush`, else `~/.cache/rush`: where the measured ceilings are kept too."""
    if chosen := os.environ.get("RUSH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rush"
