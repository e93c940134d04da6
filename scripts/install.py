"""Set up a virtual environment through the lock, with the torch that this machine can use.

    python scripts/install.py .venv --torch KIND [--extras dev]

| kind      | torch                                                              | lock           |
| ---       | ---                                                                | ---            |
| cuda      | PyPI's build with CUDA, the version proven on a GPU                | locks/cuda.txt |
| cpu       | a CPU build (PyPI's on macOS): no CUDA libraries are loaded        | locks/cpu.txt  |
| installed | the one that the Python at hand has; it is not touched             | the nearer one |
| proven    | the version proven on a GPU, as a CPU build where there is one     | locks/cuda.txt |
| auto      | as the environment was made; a new one: cuda where an NVIDIA driver is, otherwise cpu    |

The environment remembers its kind in `.torch`, whose time changes only when the kind does: make goes by it.
Only the standard library, and syntax that an old Python understands, so that it gets as far as the message.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("auto", "cuda", "cpu", "installed", "proven")
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 10)
MACHINE = 4  # the exit code for "this machine cannot"
CPU_INDEX = os.environ.get("TORCH_INDEX") or "https://download.pytorch.org/whl/cpu"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="auto", help=" | ".join(KINDS))
    parser.add_argument("--extras", default=None, help="also install the project: '' or 'dev'")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        refuse(f"rush needs Python 3.11 or newer; found {found}. Try: make PYTHON=python3.12 ...")
    if arguments.torch not in KINDS:
        refuse(f"TORCH={arguments.torch} is unknown. It can be {', '.join(KINDS)}.", code=2)
    kind = prepare(arguments.folder, arguments.torch)
    if arguments.extras is not None:
        install(arguments.folder, kind, arguments.extras)


def prepare(folder: Path, wanted: str) -> str:
    """Make the environment where there is none of this kind."""
    mark = folder / ".torch"
    had = mark.read_text().strip() if mark.exists() else None
    kind = wanted if wanted != "auto" else had or kind_here()
    if kind == "cuda" and sys.platform != "linux":
        refuse("TORCH=cuda is for Linux: PyPI has no CUDA builds of torch for other systems. Use TORCH=cpu.")
    if kind == had and (folder / "bin" / "python").exists():
        return kind
    if kind == "installed":
        installed_torch()  # or refuse, before anything is removed
    if had is not None and (folder / "pyvenv.cfg").exists():
        print(f"{folder} was made with TORCH={had}; it is made anew with TORCH={kind}.", flush=True)
        shutil.rmtree(folder)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, symlinks=True, system_site_packages=kind == "installed")
    if kind == "installed":
        show_torch(folder)
    mark.write_text(kind + "\n")
    return kind


def install(folder: Path, kind: str, extras: str) -> None:
    constraints = folder / "constraints.txt"
    constraints.write_text(constraints_for(kind))
    torch = re.search(r"^torch==(\S+)", constraints.read_text(), re.MULTILINE)
    assert torch is not None
    print(
        f"Setting up {folder}, once: TORCH={kind}, torch {torch[1]} (docs/install.md says how large) ...",
        flush=True,
    )
    ensurepip = [str(folder / "bin" / "python"), "-Im", "ensurepip", "--default-pip"]
    if subprocess.run(ensurepip, capture_output=True, check=False).returncode != 0:
        refuse(
            f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"
        )
    if sys.platform == "linux" and kind in ("cpu", "proven"):
        install_cpu_build(folder, torch[1], or_cuda=kind == "proven")
    project = f"{ROOT}[{extras}]" if extras else str(ROOT)
    if pip(folder, "-e", project).returncode != 0:
        refuse("pip could not install the project; its message is above.")


def install_cpu_build(folder: Path, version: str, or_cuda: bool) -> None:
    """PyPI's Linux builds of torch bring gigabytes of CUDA. `+cpu` is a version that only CPU builds have.

    First where pip looks anyway (a folder or index of your own), then in PyTorch's index of CPU builds.
    """
    build = f"torch=={version}+cpu"
    for index in ([], ["--index-url", CPU_INDEX, "--timeout", "20", "--retries", "1"]):
        if pip(folder, "--no-deps", *index, build, quiet=True).returncode == 0:
            return
    if not or_cuda:
        refuse(
            f"{build} was found neither where pip looks nor at {CPU_INDEX}. Name another index of CPU builds with"
            " TORCH_INDEX=URL, use the torch you have with TORCH=installed, or take PyPI's build and its gigabytes"
            " of CUDA with TORCH=cuda."
        )
    print(f"No {build} was found: PyPI's build is taken, with gigabytes of CUDA.", flush=True)


def constraints_for(kind: str) -> str:
    """The lock; for an installed torch without what torch itself decides: its own pins and its requirements."""
    if kind != "installed":
        return (ROOT / "locks" / ("cpu.txt" if kind == "cpu" else "cuda.txt")).read_text()
    torch = installed_torch()
    lines = (ROOT / "locks" / ("cuda.txt" if torch["cuda"] else "cpu.txt")).read_text().splitlines()
    own = {"torch", "triton", *torch["requires"]}
    kept = [line for line in lines if re.split("[=; ]", line)[0] not in own]
    pins = [f"{name}=={version}" for name, version in torch["versions"].items()]
    return "\n".join([*kept, *pins]) + "\n"


def installed_torch() -> dict:  # type: ignore[type-arg]
    """What the Python at hand knows of torch; one sentence where it cannot serve."""
    # Without importing it: that takes seconds, and make asks every time.
    ask = """
import importlib.metadata as m, importlib.util as u, json, pathlib, re, runpy
folder = pathlib.Path(u.find_spec("torch").origin).parent
names = {item.name for item in m.distributions()} & {"torch", "triton"}
print(json.dumps({
    "cuda": runpy.run_path(str(folder / "version.py"))["cuda"],
    "requires": [re.match("[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-") for line in m.requires("torch") or []],
    "versions": {name: m.version(name) for name in sorted(names)},
    "site": str(folder.parent),
}))
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        refuse(f"TORCH=installed: {sys.executable} has no torch. Use TORCH=cuda or TORCH=cpu.")
    torch = json.loads(done.stdout.splitlines()[-1])
    version = torch["versions"]["torch"]
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        refuse(f"TORCH=installed: rush needs torch 2.10 or newer; {sys.executable} has {version}.")
    return torch  # type: ignore[no-any-return]


def show_torch(folder: Path) -> None:
    """An environment sees the packages of the system's Python, but not those of another environment: add the path."""
    sees = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([str(folder / "bin" / "python"), "-c", sees], check=False).returncode == 0:
        return
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "installed-torch.pth").write_text(installed_torch()["site"] + "\n")


def kind_here() -> str:
    driver = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    return "cuda" if sys.platform == "linux" and driver else "cpu"


def pip(folder: Path, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[bytes]:
    constraints = str((folder / "constraints.txt").resolve())
    return subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments],
        # The build of the project runs in an environment of its own, which newer pips constrain apart.
        env={**os.environ, "PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints},
        capture_output=quiet,
        check=False,
    )


def refuse(sentence: str, code: int = MACHINE) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
