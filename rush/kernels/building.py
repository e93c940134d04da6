"""Build C++ and CUDA sources into torch operators, once, cached on disk.

C++ needs a compiler only; CUDA sources use torch's own builder, which needs nvcc and ninja. A build runs in a temporary
folder and its result is renamed to a digest of everything it depends on, so killed and concurrent builds do no harm.
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
from functools import cache
from pathlib import Path

import torch

from rush.errors import MachineError
from rush.files import cache_folder

FLAGS = ("-O2",)
_found: set[tuple[str, str | None]] = set()
"""Compilers that were found, each with the PATH it was on."""


def cannot_build() -> str | None:
    """Why no extension can be built here; None if one can."""
    compiler, path = _compiler(), os.environ.get("PATH")
    if (compiler, path) not in _found:
        if shutil.which(compiler) is None:
            return f"there is no C++ compiler ({compiler})"
        _found.add((compiler, path))  # a search asks thousands of times
    return None


def cannot_build_cuda() -> str | None:
    """Why the CUDA sources of an extension cannot be built here; None if they can."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device to build for"
    # Without a device, this import warns of one that is missing.
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").is_file():
        return "there is no CUDA compiler (nvcc); set CUDA_HOME to where it is"
    if not is_ninja_available():
        return "ninja is not installed"
    return cannot_build()


def build(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = FLAGS
) -> Path:
    """Load the operators that the sources register, building them if they are not cached. Returns the library's path."""
    library = library_of(name, sources, headers, flags)
    if library.is_file():
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    else:
        _build_and_load(name, sources, flags, library)
    return library


def library_of(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = FLAGS
) -> Path:
    """The cache path of these sources' library."""
    return cache_folder() / "extensions" / f"{name}-{_identity([*sources, *headers], flags)}.so"


def _build_and_load(name: str, sources: Sequence[Path], flags: Sequence[str], library: Path) -> None:
    has_cuda = any(source.suffix == ".cu" for source in sources)
    if reason := cannot_build_cuda() if has_cuda else cannot_build():
        raise MachineError(f"The extension {name} cannot be built here: {reason}.")
    print(f"rush: building {name} (once, half a minute or so)", file=sys.stderr, flush=True)  # noqa: T201
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=library.parent) as folder:
            make = _build_with_cuda if has_cuda else _build_cpp
            os.replace(make(name, sources, flags, Path(folder)), library)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise MachineError(f"The extension {name} could not be built: {error}") from error
    if not has_cuda:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def _build_cpp(name: str, sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    """Compile and link C++ sources as torch's builder would by ninja.

    The linker does not get the flags: -fopenmp would link the system's OpenMP beside torch's.
    """
    installed = Path(torch.__file__).parent
    headers = (installed / "include", installed / "include" / "torch" / "csrc" / "api" / "include")
    includes = [flag for path in headers for flag in ("-isystem", str(path))]
    _compile(
        [*includes, "-fPIC", "-std=c++20", *flags, "-c", *(str(source.resolve()) for source in sources)],
        folder,
    )
    objects = [f"{source.stem}.o" for source in sources]
    library = folder / f"{name}.so"
    _compile(
        [
            *objects,
            "-shared",
            f"-L{installed / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
            "-ltorch",
            "-o",
            library.name,
        ],
        folder,
    )
    return library


def _compile(arguments: Sequence[str], folder: Path) -> None:
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [_compiler(), *arguments], cwd=folder, env=english, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        wrong = [line for line in lines if "error" in line] or lines or [f"exit status {done.returncode}"]
        raise RuntimeError("; ".join(wrong[:2]))


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _build_with_cuda(name: str, sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    """Build by torch's builder, which also loads the library; it stays mapped when the file is renamed."""
    from torch.utils.cpp_extension import load

    load(
        name,
        [str(source) for source in sources],
        extra_cflags=list(flags),
        extra_cuda_cflags=["-O3"],
        extra_ldflags=[f"-L{folder}" for folder in _cuda_libraries()],
        build_directory=str(folder),
        is_python_module=False,
    )
    return folder / f"{name}.so"


def _cuda_libraries() -> list[Path]:
    """Folders with the CUDA runtime: nvcc on the path can be a link or a script far from its libraries."""
    from torch.utils.cpp_extension import CUDA_HOME

    homes = [
        Path(CUDA_HOME or "/usr/local/cuda"),
        Path("/usr/local/cuda"),
        *Path("/usr/local").glob("cuda-*"),
    ]
    return [home / "lib64" for home in homes if (home / "lib64" / "libcudart.so").is_file()]


def _identity(files: Sequence[Path], flags: Sequence[str] = FLAGS) -> str:
    """A digest of sources, flags, torch version, platform and GPU."""
    found = (file.stat() for file in files)
    return _digest(tuple(files), tuple((one.st_mtime_ns, one.st_size) for one in found), tuple(flags))


@cache
def _digest(files: tuple[Path, ...], as_found: tuple[tuple[int, int], ...], flags: tuple[str, ...]) -> str:
    """For files whose times and sizes are unchanged."""
    parts = [torch.__version__, torch.version.cuda, platform.machine(), *flags]
    digest = hashlib.sha256(" ".join(map(str, parts)).encode())
    if torch.cuda.is_available():
        digest.update(str(torch.cuda.get_device_capability()).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
