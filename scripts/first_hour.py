"""The first hour: from installing rush to a verified faster recipe of one's own model, with what was typed and what came back.

    python scripts/first_hour.py --wheel dist/*.whl --out results/first-hour-n1        # a laptop, without network
    PYTHONPATH=bundle python scripts/first_hour.py --model gpt2-124m --out results/first-hour-h200

What a reader brings is made first, and is not one of the commands: a Hugging Face folder (a model of rush's own sizes, trained
for a few steps on the standard library) and conversations (questions about the standard library, answered by its docstrings).
Then every command runs in an empty folder, as typed; the first that fails ends it. With --wheel the wheel is installed into
a new virtual environment that sees only the dependencies of this Python (there may be no network), and its `rush` is what runs.

Writes `transcript.txt` and `first_hour.json` to --out, and with --page the page docs/first-hour.md from the records in results/.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "first-hour.md"
QUESTION = "What does textwrap.dedent do?"
MOST_COMMANDS = 10


@dataclass(frozen=True)
class Typed:
    command: str
    seconds: float
    code: int
    output: str


class FirstHour:
    """Types commands in a folder of its own, and keeps what came back."""

    def __init__(self, folder: Path, rush: list[str]) -> None:
        self.folder, self.rush = folder, rush
        self.typed: list[Typed] = []
        self.environment = {
            **os.environ,
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "HF_HUB_OFFLINE": "1",
        }
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")] if rush[0] == sys.executable else []
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))

    def bring(self, words: str) -> None:
        """What the reader has already; not part of the hour."""
        done = self._run(words, "")
        if done.code != 0:
            raise SystemExit(f"cannot make what a reader brings: {words}\n{done.output}")

    def type(self, words: str, said: str = "") -> str:
        done = self._run(words, said)
        self.typed.append(done)
        print(f"\n$ {done.command}\n{done.output}[{done.seconds:.1f} s]", flush=True)
        if done.code != 0:
            raise SystemExit(f"`{words}` failed with exit code {done.code}.")
        return done.output

    def _run(self, words: str, said: str) -> Typed:
        line = shlex.split(words)
        command = [*self.rush, *line[1:]] if line[0] == "rush" else line
        began = time.monotonic()
        done = subprocess.run(command, cwd=self.folder, env=self.environment, input=said, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        output = (
            re.sub(r"[^\n]*\r", "", done.stdout).replace(f"{self.folder}/", "").replace(str(Path.home()), "~")
        )
        shown = f"echo {shlex.quote(said.strip())} | {words}" if said else words
        return Typed(shown, time.monotonic() - began, done.returncode, output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="the size of the reader's model, as in rush recipes")
    parser.add_argument("--chats", type=int, default=500, help="conversations that the reader has")
    parser.add_argument(
        "--changes", default="", help="KEY=VALUE for rush start, as in batch.micro=2 on two slow cores"
    )
    parser.add_argument(
        "--base", default="", help="KEY=VALUE for the reader's model, as in model.shape.num_layers=2"
    )
    parser.add_argument("--note", default="", help="what a reader of the times should know, for the record")
    parser.add_argument("--budget", default="90s", help="of rush tune")
    parser.add_argument(
        "--wheel", type=Path, help="install this wheel first; otherwise the rush of this checkout runs"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record, under results/")
    parser.add_argument("--page", action="store_true", help="only write docs/first-hour.md")
    chosen = parser.parse_args()
    if not chosen.page:
        with tempfile.TemporaryDirectory() as folder:
            record = spend(Path(folder).resolve(), chosen)
        if chosen.out is not None:
            chosen.out.mkdir(parents=True, exist_ok=True)
            (chosen.out / "first_hour.json").write_text(
                json.dumps(record, indent=1, ensure_ascii=False) + "\n"
            )
            (chosen.out / "transcript.txt").write_text(transcript(record))
    if chosen.page:
        PAGE.write_text(page(), encoding="utf-8")


def spend(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """The hour itself, in `folder`."""
    here = FirstHour(folder, [sys.executable, "-m", "rush"])
    chats = write_chats(folder / "chats.jsonl", chosen.chats)
    small = (
        "batch.micro=4 batch.total_tokens=512"
        if chosen.model.endswith("tiny")
        else "batch.micro=16 batch.total_tokens=65536"
    )
    techniques = "[]" if chosen.model.endswith("tiny") else "['amp_bf16','flash_attention']"
    here.bring(
        f'rush train {chosen.model} schedule.steps=40 schedule.warmup=4 {small} {chosen.base} "techniques={techniques}" run.sample_tokens=0 '
        "run.validate_sequences=16 --out base --json"
    )
    here.bring("rush export base --to my-model")
    began = time.monotonic()
    if chosen.wheel is not None:
        wheel = chosen.wheel.resolve()
        empty_environment(folder / "venv")
        (folder / wheel.name).symlink_to(wheel)
        # As `pip install optimization-rush` does from an index; the dependencies are there already.
        here.type(f"venv/bin/python -m pip install --no-index --no-deps --quiet {wheel.name}")
        installed = FirstHour(folder, [str(folder / "venv" / "bin" / "rush")])
        installed.typed, here = here.typed, installed
    here.type(f"rush start my-model --data chats.jsonl {chosen.changes}".rstrip())
    here.type("rush overfit recipe.toml")
    here.type(f"rush tune recipe.toml --budget {chosen.budget} --out tuned")
    here.type("rush train tuned/recipe.toml --out runs/mine")
    here.type("rush chat runs/mine --temperature 0 --max-tokens 40", QUESTION + "\n")
    here.type("rush evaluate runs/mine --against my-model --answers 1 --limit 50")
    here.type("rush export runs/mine --to exported")
    seconds = time.monotonic() - began
    if len(here.typed) > MOST_COMMANDS:
        raise SystemExit(f"{len(here.typed)} commands: the promise is {MOST_COMMANDS}")
    tuned = json.loads((folder / "tuned" / "tune.json").read_text())
    machine = json.loads((folder / "runs" / "mine" / "machine.json").read_text())
    if not (folder / "exported" / "model.safetensors").is_file():
        raise SystemExit("nothing was exported")
    return {
        "started": time.strftime("%Y-%m-%d"),
        "machine": machine_line(machine),
        "installed": "a wheel" if chosen.wheel is not None else "a checkout",
        "model": chosen.model,
        "chats": chats,
        "seconds": seconds,
        "note": chosen.note,
        "winner": verified(tuned),
        "commands": [asdict(one) for one in here.typed],
    }


def verified(tuned: dict[str, Any]) -> dict[str, Any]:
    """What the search proved; an hour without a proved recipe has failed."""
    winner = tuned["winner"]
    if winner is None or winner["parity"]["verdict"] != "equal":
        raise SystemExit(f"rush tune proved no recipe: {winner}")
    kept = {key: winner[key] for key in ("what", "tokens_per_s")}
    gain = winner.get("gain") or {}
    return {
        **kept,
        "ratio": gain.get("ratio"),
        "ci95": gain.get("ci95"),
        "parity": winner["parity"]["verdict"],
    }


def machine_line(machine: dict[str, Any]) -> str:
    cuda = [one.get("name") for one in machine.get("devices", []) if isinstance(one, dict)]
    cpu = machine.get("cpu")
    named = cpu.get("name") if isinstance(cpu, dict) else cpu
    return f"{', '.join(filter(None, cuda)) or named}, torch {machine.get('torch')}, Python {machine.get('python')}"


def write_chats(path: Path, most: int) -> int:
    """Questions about the standard library with the first sentence of each docstring."""
    rows = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8", "replace"))):
            told = isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
            if told:
                turns = {
                    "user": f"What does {file.stem}.{node.name} do?",
                    "assistant": " ".join(told.split("\n\n")[0].split()),
                }
                rows.append({"messages": [{"role": role, "content": text} for role, text in turns.items()]})
    chosen = rows[:: max(1, len(rows) // most)][:most]
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return len(chosen)


def empty_environment(folder: Path) -> None:
    """A virtual environment with pip, and this Python's dependencies in sight, but not its rush."""
    venv.create(folder, symlinks=True, with_pip=True)
    inside = next((folder / "lib").glob("python3*/site-packages"))
    beside = folder / "dependencies"
    beside.mkdir()
    for place in map(Path, site.getsitepackages()):
        for path in place.iterdir() if place.is_dir() else ():
            ours = path.name.startswith(("optimization_rush", "_editable_impl", "pip", "rush"))
            if not ours and path.suffix != ".pth" and not (beside / path.name).exists():
                (beside / path.name).symlink_to(path)
    (inside / "dependencies.pth").write_text(f"{beside}\n")


def transcript(record: dict[str, Any]) -> str:
    return "\n".join(
        f"$ {one['command']}\n{one['output']}# {one['seconds']:.1f} s\n" for one in record["commands"]
    )


HEAD = """# The first hour

From installing rush to a verified faster recipe of your own model: what was typed, what came back, and how long it took.
Nothing was downloaded. `scripts/first_hour.py` typed it; a command that fails ends the script, and so does a search that proves
nothing. (This page is written by it, from `results/first-hour-*`.)

What you bring is a Hugging Face folder (here `my-model`: one of rush's own sizes after a few steps on the standard library)
and conversations (here `chats.jsonl`: questions about the standard library, answered by its docstrings).
"""


def page() -> str:
    parts = [HEAD]
    for path in sorted((ROOT / "results").glob("first-hour-*/first_hour.json")):
        record = json.loads(path.read_text("utf-8"))
        won = record["winner"]
        gain = f"×{won['ratio']:.2f}" + (
            f" (95 % interval {won['ci95'][0]:.2f} to {won['ci95'][1]:.2f})" if won["ci95"] else ""
        )
        parts.append(f"\n## {record['machine'].split(',')[0]}, model {record['model']}\n")
        parts.append(
            f"{record['machine']}; rush from {record['installed']}; {record['started']}. {len(record['commands'])} commands, "
            f"{record['seconds'] / 60:.1f} minutes. The recipe that was found: {won['what']}, {gain} of the speed of the recipe "
            f"that `rush start` wrote, parity {won['parity']}. {record['note']}".rstrip()
            + "\n"
        )
        for one in record["commands"]:
            output = one["output"].rstrip()
            parts.append(f"```console\n$ {one['command']}\n{output}\n```\n\n{one['seconds']:.1f} seconds.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
