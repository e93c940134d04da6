"""A fresh environment: a virtual environment with the package as a wheel lays it out, and no network."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from tests.documented.pages import ROOT

NOWHERE = "http://127.0.0.1:9"
SCRIPT = """#!{python}
import sys
from rush.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def make_environment(folder: Path) -> dict[str, str]:
    """The variables of a shell in which `rush` is the installed command and HOME is empty.

    The dependencies are those of this Python; the package itself is copied, so that nothing of the checkout is found.
    """
    venv.create(folder / "venv", symlinks=True)
    binaries = folder / "venv" / "bin"
    python = binaries / "python"
    site = folder / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in built["packages"]:
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in built["force-include"].items():
        place = ROOT / source
        (shutil.copytree if place.is_dir() else shutil.copy)(place, site / target)
    # Folders named here are searched, but their own .pth files (an editable install's) are not read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages", "bundle"))]
    (site / "dependencies.pth").write_text("\n".join(others) + "\n")
    (binaries / "rush").write_text(SCRIPT.format(python=python))
    (binaries / "rush").chmod(0o755)
    home = folder / "home"
    home.mkdir()
    kept = ("LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CC", "CXX")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HOME": str(home),
        "COLUMNS": "80",
        "PIP_NO_INDEX": "1",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE),
    }
