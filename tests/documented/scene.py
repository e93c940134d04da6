"""The files that the pages take for granted: a model, chats, notes, two runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.documented.pages import ROOT, Command

PAIRS = {"prompt": "What is {0}?", "chosen": "{0} is a part of Python's library.", "rejected": "No idea."}
WORDS = (
    "abc",
    "ast",
    "bisect",
    "calendar",
    "cmath",
    "copy",
    "csv",
    "dis",
    "enum",
    "fractions",
    "glob",
    "heapq",
)


def make_models(folder: Path, variables: Mapping[str, str]) -> None:
    """A small Llama as a Hugging Face folder and two short runs, made by the command itself; and the rates of this machine."""
    short = "schedule.steps=4 schedule.warmup=1 run.validate_every=2 run.save_every=2 run.sample_every=4"
    for line in (
        f"rush train llama-tiny {short} --out runs/a",
        f"rush train llama-tiny {short} optimizer.lr=1e-3 --out runs/b",
        "rush export runs/a --to model",
        "rush probe",
    ):
        subprocess.run(line, shell=True, cwd=folder, env=dict(variables), check=True, capture_output=True)


def set_scene(folder: Path, made: Path, commands: Sequence[Command]) -> None:
    """What these commands name, and none of them makes."""
    for name in ("path/to/model", "path/to/Llama-3.2-1B", "path/to/Llama-3.2-3B", "path/to/Llama-3.1-8B",
                 "models/llama", "models/llama-3.2-1b", "models/llama-3.1-8b"):  # fmt: skip
        shutil.copytree(made / "model", folder / name)
    shutil.copytree(made / "runs", folder / "runs")
    for name in ("ladder-tiny-x86", "tune-tiny-n1"):
        shutil.copytree(ROOT / "results" / name, folder / "results" / name)
    records = dict.fromkeys(
        ("runs/ladder-tiny", "runs/climb", "runs/other"), ROOT / "results/ladder-tiny-x86"
    )
    records |= {"runs/gpt2": folder / "runs/a", "runs/mine": folder / "runs/a"}
    if not any("rush race" in command.line for command in commands):
        records["runs/race-tiny"] = ROOT / "results/race-tiny-x86"
    for name, record in records.items():
        if not any(f"--out {name}" in one.line and "--resume" not in one.line for one in commands):
            shutil.copytree(record, folder / name)
    notes = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    parts = [" ".join(part.split()) for part in notes.split("\n\n") if 200 < len(part) < 800][:400]
    questions = [(f"What is said of {' '.join(part.split()[:4])}?", part) for part in parts]
    talks = [{"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]} for ask, answer in questions]  # fmt: skip
    texts = [{"text": f"{ask} {answer} " * 40} for ask, answer in questions]
    library = [{"text": path.read_text("utf-8", "replace")} for path in Path(sysconfig.get_path("stdlib")).glob("*/*.py")]  # fmt: skip
    for name, rows in {"chats": talks, "talks": talks, "text/one": texts, "corpus/one": library}.items():
        _write(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    pairs = [
        {key: text.format(f"{word} {n}") for key, text in PAIRS.items()} for n in range(8) for word in WORDS
    ]
    _write(folder / "pairs/one.jsonl", "".join(json.dumps(row) + "\n" for row in pairs))
    for name in ("notes.txt", "notes/one.txt", "notes/two.txt"):
        _write(folder / name, notes)
    technique = re.search(r'```python\n(""".*?)```', (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert technique is not None
    for name in ("foreach_adamw.py", "my_idea.py"):
        _write(folder / name, technique[1])
    ladder = (
        'recipe = "tiny"\nrungs = ["foreach_adamw"]\n[base]\ntechniques = []\n"batch.total_tokens" = "none"\n'
    )
    for name in ("my.toml", "my-ladder.toml"):
        _write(folder / name, f"{ladder}[measure]\nprocesses = 1\nwindows = 6\nwarmup_max_s = 2.0\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
