"""Does a run give the same bits again on this machine, killed or not? And what does that cost?

python scripts/same_bits.py RECIPE... [KEY=VALUE]... [--layers N] [--jobs N] [--plain] [--cost] [--out FOLDER]
python scripts/same_bits.py --diagnose [RECIPE...] [KEY=VALUE]... [--layers N] [--jobs N] [--out FOLDER]

For each recipe, with `run.deterministic`: two runs in processes of their own, and a third that gets a SIGKILL after steps
that no checkpoint holds and is resumed. Rows of metrics and samples must be equal, and the SHA-256 of every file of
the checkpoints. `--plain` does the same without the key and says how far the resumed run goes astray. `--cost` times
steps with and without the key, one recipe at a time and alone on the device.

The runs are short, but the recipe's own: its techniques and width, real text (the Python standard library; for
fine-tuning its docstrings), two micro batches a step, validations, samples and saves. `--layers` makes the model shallow,
which leaves every kernel as it is. The compiler keeps what it found to be fastest on disk. Two processes that share that
folder agree because one copies the other, so the first two runs have a folder each, new and empty; the killed run begins
with the one and is resumed with the other, so it is quick, and still meets both.

`--diagnose` pins down what differs: operator by operator in one process (`same_bits_ops.py`), then for each recipe two
processes that print digests of every gradient and weight of the first steps, and the tiles the compiler chose
(`same_bits_trace.py`). Recipes run side by side with `--jobs`; times are taken alone. The last thing printed is a table;
all of it is in FOLDER/same_bits.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from tests.training.small_runs import ROOT, environment, rows

STEPS, SAVE_EVERY = 8, 3
LIMIT_S = 540.0
SMALL = 1 << 20
POINTWISE = "triton_poi"
"""Kernels that the compiler names so compute each element by itself: their tiles are chosen by timing, and change no bit."""
KILLED = "killed"
NAMES = ("metrics.jsonl", "samples.jsonl")


@dataclass(frozen=True)
class Short:
    """A recipe cut short, with text that is on every machine."""

    name: str
    overrides: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.name, self.overrides)


def short(name: str, overrides: Sequence[str], layers: int | None, *, deterministic: bool = True) -> Short:
    recipe = load_recipe(name, overrides)
    kind, micro, sequence = recipe.objective.kind, recipe.micro, recipe.batch.sequence
    data = {
        "lm": ["data.source=python-stdlib"],
        "sft": ["data.source=python-docstrings", "data.template=plain", "data.too_long=drop"],
        "dpo": ["data.source=python-docstring-pairs", "data.template=plain", "data.too_long=drop"],
    }[kind]
    changes = [
        *data,
        "data.files=[]",
        "data.tokenizer=train",
        "data.vocab_size=2048",
        "data.validation=0.05",
        f"batch.total_tokens={2 * micro * sequence}",
        f"schedule.steps={STEPS}",
        "schedule.warmup=2",
        f"run.save_every={SAVE_EVERY}",
        "run.keep=1",
        "run.validate_every=4",
        f"run.validate_sequences={2 * micro}",
        "run.sample_every=4",
        "run.sample_tokens=8",
        "run.tensorboard=false",
        f"run.deterministic={str(deterministic).lower()}",
    ]
    if layers is not None:
        changes.append(f"model.shape.num_layers={layers}")
    return Short(name, (*changes, *overrides))


def prepared(one: Short) -> None:
    """The text made ready once, so that no two processes do it at the same time."""
    from rush.training.corpus import open_corpus

    open_corpus(one.recipe, None, lambda text: None)


@dataclass(frozen=True)
class Place:
    """Where a study writes: everything under one folder."""

    folder: Path

    def start(self, words: Iterable[str | Path], cache: str, log: Path) -> subprocess.Popen[bytes]:
        """A process with a folder of its own for what the compiler finds."""
        log.parent.mkdir(parents=True, exist_ok=True)
        shared = Path(os.environ.get("RUSH_CACHE", self.folder / "rush-cache"))
        env = environment(shared) | {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled" / cache),
            # A compiled kernel is the same for the same source and tiles: only their choice is kept apart.
            "TRITON_CACHE_DIR": str(self.folder / "compiled" / "triton"),
        }
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, *map(str, words)], cwd=ROOT, env=env, stdout=out, stderr=out
            )

    def train(self, one: Short, run: str, cache: str, *more: str) -> subprocess.Popen[bytes]:
        words = ("-m", "rush", "train", one.name, *one.overrides, "--out", self.run(one, run), *more)
        return self.start(words, f"{one.name}-{cache}", self.folder / "logs" / f"{one.name}-{run}.log")

    def run(self, one: Short, run: str) -> Path:
        return self.folder / "runs" / f"{one.name}-{run}"

    def log(self, one: Short, run: str) -> str:
        """The last line that says something."""
        path = self.folder / "logs" / f"{one.name}-{run}.log"
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "nothing was printed"


def finish(process: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> int:
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def whole(place: Place, one: Short, run: str, cache: str) -> dict[str, Any]:
    """A run left alone: what it wrote, or why it ended."""
    code = finish(place.train(one, run, cache))
    return written(place, one, run) if code == 0 else {"failed": f"exit {code}: {place.log(one, run)}"}


def killed(place: Place, one: Short, run: str, caches: tuple[str, str]) -> dict[str, Any]:
    """A run that is killed when it has made steps since its newest checkpoint, and then resumed."""
    folder, process = place.run(one, run), place.train(one, run, caches[0])
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and not 0 < newest(folder) < len(rows(folder)) < STEPS:
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.002)
    if process.poll() is not None:
        return {"failed": f"it ended with {process.poll()} before it could be killed: {place.log(one, run)}"}
    process.send_signal(signal.SIGKILL)
    process.wait()
    where = {"saved": newest(folder), "made": len(rows(folder))}
    code = finish(place.train(one, run, caches[1], "--resume"))
    if code != 0:
        return {"failed": f"resumed, it ended with {code}: {place.log(one, run)}"}
    return {**written(place, one, run), "killed": where}


def newest(folder: Path) -> int:
    """The step of the newest checkpoint that is complete; 0 without one."""
    steps = [int(path.parent.name[5:]) for path in folder.glob("checkpoints/step-*/manifest.json")]
    return max(steps, default=0)


def written(place: Place, one: Short, run: str) -> dict[str, Any]:
    """Rows and digests; the checkpoints themselves go, for they are large."""
    folder = place.run(one, run)
    files = {}
    for path in sorted((folder / "checkpoints").glob("step-*/*")):
        with path.open("rb") as file:
            files[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
        if path.suffix == ".safetensors" and path.stat().st_size < SMALL:
            files |= {f"{path.relative_to(folder)}: {name}": digest for name, digest in inside(path)}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {"rows": {name: rows(folder, name) for name in NAMES}, "files": files}


def inside(path: Path) -> Iterator[tuple[str, str]]:
    """The tensors of a small file one by one, so that a difference has a name."""
    import torch
    from safetensors.torch import load_file

    for name, values in load_file(path).items():
        yield name, hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    """The first difference of two runs in words, or nothing."""
    for one in (left, right):
        if "failed" in one:
            return str(one["failed"])
    for name in NAMES:
        for mine, theirs in zip(left["rows"][name], right["rows"][name], strict=False):
            if mine != theirs:
                keys = [key for key in mine if mine.get(key) != theirs.get(key)]
                return f"{name}, step {mine.get('step')}: {keys[0]} {mine[keys[0]]!r} and {theirs.get(keys[0])!r}"
        if len(left["rows"][name]) != len(right["rows"][name]):
            return f"{name} has {len(left['rows'][name])} and {len(right['rows'][name])} rows"
    other = sorted(set(left["files"].items()) ^ set(right["files"].items()))
    return f"files: {', '.join(dict.fromkeys(name for name, _ in other))}"[:400] if other else ""


def astray(left: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """How far two runs are apart: the largest relative difference of a step's loss, and of its gradient norm."""
    pairs = list(zip(left["rows"][NAMES[0]], right["rows"][NAMES[0]], strict=False))
    return {
        key: max((abs(a[key] - b[key]) / abs(a[key]) for a, b in pairs if a.get(key)), default=0.0)
        for key in ("loss", "grad_norm")
    }


def compare(place: Place, shorts: Sequence[Short], jobs: int, label: str = "") -> dict[str, Any]:
    """For each recipe two runs and a killed one, and the first difference of each pair."""
    with ThreadPoolExecutor(jobs) as pool:
        pairs = [(one, run) for one in shorts for run in ("one", "two")]
        done = dict(
            zip(
                pairs,
                pool.map(lambda pair: whole(place, pair[0], label + pair[1], label + pair[1]), pairs),
                strict=True,
            )
        )
        third = list(
            pool.map(lambda one: killed(place, one, label + KILLED, (f"{label}one", f"{label}two")), shorts)
        )
    found = {}
    for one, resumed in zip(shorts, third, strict=True):
        first, second = done[one, "one"], done[one, "two"]
        found[one.name] = {
            "overrides": one.overrides,
            "two processes": difference(first, second) or "equal",
            "killed and resumed": difference(first, resumed) or "equal",
            "killed": resumed.get("killed"),
            "runs": {"one": first, "two": second, KILLED: resumed},
        }
        if not any("failed" in run for run in (first, second, resumed)):
            found[one.name] |= {"astray": {"two": astray(first, second), KILLED: astray(first, resumed)}}
        say(f"{label}{one.name}: two processes {found[one.name]['two processes']}; killed and resumed "
            f"{found[one.name]['killed and resumed']} {resumed.get('killed')}")  # fmt: skip
    return found


def measured(place: Place, one: Short) -> dict[str, Any]:
    """Tokens per second without the key and with it."""
    path = place.folder / f"{one.name}-cost.json"
    words = (ROOT / "scripts" / "same_bits_trace.py", "cost", path, one.name, *one.overrides)
    log = place.folder / "logs" / f"{one.name}-cost.log"
    code = finish(place.start(words, f"{one.name}-cost", log))
    found = (
        json.loads(path.read_text()) if code == 0 else {"failed": f"exit {code}: {place.log(one, 'cost')}"}
    )
    say(f"{one.name}: {said_cost(found)}")
    return found


def said_cost(found: dict[str, Any]) -> str:
    if "plain" not in found:
        return str(found.get("failed", "-"))
    plain, exact = (found[key]["tokens_per_s"] for key in ("plain", "deterministic"))
    return f"{plain:,.0f} tokens/s, {exact:,.0f} with the key ({exact / plain - 1:+.1%})"


def diagnosed(place: Place, shorts: Sequence[Short], jobs: int) -> dict[str, Any]:
    """Two processes of each recipe: what of their first steps differs, and what the compiler chose otherwise."""

    def one_trace(pair: tuple[Short, str]) -> dict[str, Any]:
        one, run = pair
        path = place.folder / f"{one.name}-trace-{run}.json"
        words = (ROOT / "scripts" / "same_bits_trace.py", "trace", path, one.name, *one.overrides)
        code = finish(
            place.start(
                words, f"{one.name}-trace-{run}", place.folder / "logs" / f"{one.name}-trace-{run}.log"
            )
        )
        return (
            json.loads(path.read_text())
            if code == 0
            else {"failed": f"exit {code}: {place.log(one, f'trace-{run}')}"}
        )

    pairs = [(one, run) for one in shorts for run in ("one", "two")]
    with ThreadPoolExecutor(jobs) as pool:
        traces = dict(zip(pairs, pool.map(one_trace, pairs), strict=True))
    return {one.name: between(traces[one, "one"], traces[one, "two"]) for one in shorts}


def between(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    if failed := [one["failed"] for one in (left, right) if "failed" in one]:
        return {"failed": failed}

    def other(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
        return [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]

    kernels = other(left["kernels"], right["kernels"])
    return {
        "same process, gradients": [other(*one["gradients"]) for one in (left, right)],
        "same process, losses": [one["losses"] for one in (left, right)],
        "two processes, gradients": other(left["gradients"][0], right["gradients"][0]),
        "two processes, steps": [
            {"loss": a["loss"] == b["loss"], "grad_norm": a["grad_norm"] == b["grad_norm"],
             "weights": other(a["weights"], b["weights"])}
            for a, b in zip(left["steps"], right["steps"], strict=True)
        ],
        "compiled kernels": len(left["kernels"]),
        "kernels with other tiles": {key: [left["kernels"].get(key), right["kernels"].get(key)] for key in kernels},
        "seconds": [left["seconds"], right["seconds"]],
    }  # fmt: skip


def say_between(name: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        say(f"{name}: {found['failed']}")
        return
    say(f"{name}: same process, gradients that differ: {[len(one) for one in found['same process, gradients']]} "
        f"{[one[:6] for one in found['same process, gradients']]}")  # fmt: skip
    say(f"{name}: two processes, gradients that differ: {len(found['two processes, gradients'])} "
        f"{found['two processes, gradients'][:12]}")  # fmt: skip
    for step, one in enumerate(found["two processes, steps"], 1):
        say(f"{name}: step {step}: loss equal {one['loss']}, norm equal {one['grad_norm']}, weights that differ "
            f"{len(one['weights'])} {one['weights'][:4]}")  # fmt: skip
    other = found["kernels with other tiles"]
    rounding = {key: taken for key, taken in other.items() if not key.startswith(POINTWISE)}
    say(
        f"{name}: {found['compiled kernels']} compiled kernels, other tiles in {len(other)}, of which {len(rounding)} sum"
    )
    for key, (mine, theirs) in list(rounding.items())[:12]:
        say(f"    {key}: {mine} and {theirs}")


def say(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - BEGAN:6.1f} s] {text}\n")
    sys.stdout.flush()


def table(found: dict[str, Any]) -> None:
    lines = ["", "| recipe | two processes | killed and resumed | without the key | cost |"]
    lines.append("| --- " * 5 + "|")
    names = list(dict.fromkeys([*found.get("deterministic", {}), *found.get("cost", {})]))
    for name in names:
        exact, plain = found.get("deterministic", {}).get(name, {}), found.get("plain", {}).get(name, {})
        loose = plain.get("astray", {}).get(KILLED)
        told = f"loss within {loose['loss']:.1e}" if loose else plain.get("killed and resumed", "-")
        cells = (exact.get("two processes", "-"), exact.get("killed and resumed", "-"), told,
                 said_cost(found.get("cost", {}).get(name, {})))  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RECIPE or KEY=VALUE")
    parser.add_argument("--layers", type=int, help="layers of the model, instead of the recipe's")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (not for times)")
    parser.add_argument("--plain", action="store_true", help="also without run.deterministic")
    parser.add_argument("--cost", action="store_true", help="also the speed with and without the key")
    parser.add_argument("--cost-layers", type=int, help="layers for that; all of them without it")
    parser.add_argument("--only-cost", action="store_true", help="nothing but the speed")
    parser.add_argument("--diagnose", action="store_true", help="pin down what differs")
    parser.add_argument("--out", type=Path, default=Path("runs/same-bits"))
    given = parser.parse_args()
    names = [word for word in given.words if "=" not in word]
    overrides = [word for word in given.words if "=" in word]
    if not names and not given.diagnose:
        parser.error("name at least one recipe, or --diagnose")
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    place = Place(given.out.resolve())
    os.environ.setdefault("RUSH_CACHE", str(place.folder / "rush-cache"))
    found: dict[str, Any] = {}

    def keep(key: str, work: Callable[[], Any]) -> None:
        found[key] = work()
        (place.folder / "same_bits.json").write_text(json.dumps(found, indent=1))

    shorts = [short(name, overrides, given.layers) for name in names]
    for one in shorts:
        prepared(one)
    say("the text is ready")
    if given.diagnose:
        import torch

        from scripts.same_bits_ops import try_all

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        keep(
            "machine",
            lambda: {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            },
        )
        keep("operators", lambda: try_all(device, say))
        keep("traces", lambda: diagnosed(place, shorts, given.jobs))
        for name, one in found["traces"].items():
            say_between(name, one)
        return 0
    if not given.only_cost:
        keep("deterministic", lambda: compare(place, shorts, given.jobs))
        if given.plain:
            loose = [short(name, overrides, given.layers, deterministic=False) for name in names]
            keep("plain", lambda: compare(place, loose, given.jobs, "plain-"))
    if given.cost or given.only_cost:
        deep = [short(name, overrides, given.cost_layers) for name in names]
        keep("cost", lambda: {one.name: measured(place, one) for one in deep})
    table(found)
    pairs = found.get("deterministic", {}).values()
    return int(any(one[key] != "equal" for one in pairs for key in ("two processes", "killed and resumed")))


BEGAN = time.monotonic()
if __name__ == "__main__":
    sys.exit(main())
