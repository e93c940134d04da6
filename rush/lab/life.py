"""A life: everything a run goes through, by the command line in real processes.

A recipe can be fast, and right over 200 steps, and still die at its first validation, or not come back from a kill. So
it is taken through a short life: it trains with accumulation, validations, samples and saves; it is killed between two saves (SIGKILL);
it is resumed and trains to the end; it is trained once more undisturbed, to the same bits; it is evaluated, exported to
transformers, made to generate and, where it is a chat recipe, to chat; its adapters are merged. After each part
is checked what must hold then. A life says nothing about speed or about long runs: it is the shortest run in which
everything happens that happens in a long one.

`rush/lab/usable.py` has a shorter one of two processes (`whole`, `again`) for what a ladder or a search has measured.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.lab.life_logits import largest_difference
from rush.lab.starter import Starter, Streams
from rush.recipe import Recipe
from rush.recipe_io import changed, write_toml
from rush.records.checkpoints import verify
from rush.records.manifest import CheckpointDamaged
from rush.records.metrics import read_rows
from rush.records.run_folder import RunFolder
from rush.techniques import registry

STEPS, SAVE_EVERY, VALIDATE_EVERY, SAMPLE_EVERY = 6, 2, 3, 3
TRAINING = ("train", "resume")
"""The parts that show whether a recipe can be trained with at all."""
UNDISTURBED = ("whole", "again")
"""The same without a kill, so that what a resumed run computes is seen beside what it should."""
EVERY = ("train", "resume", "repeat", "evaluate", "export", "generate", "chat", "merge")
ADAPTERS = ("lora", "qlora", "int8_base")
CLOCK = {"tokens_per_s", "trained_per_s", "step_s", "data_s", "memory_bytes", "mfu", "ceiling_fraction"}
"""What differs between two runs that are otherwise the same."""


class Broken(Exception):
    """Something that must hold after a part of a life does not."""

    def __init__(self, problem: str, code: int | None = None) -> None:
        super().__init__(problem)
        self.code = code


@dataclass(frozen=True)
class Part:
    """One part of a life: what is wrong after it, if anything, and how long it took."""

    name: str
    problem: str | None
    seconds: float
    code: int | None = None
    """The exit code of the command that failed; negative: the signal it died of."""


@dataclass(frozen=True)
class Life:
    parts: tuple[Part, ...]

    @property
    def problem(self) -> str | None:
        """What the recipe cannot do, or None after a whole life."""
        return next((f"{part.name}: {part.problem}" for part in self.parts if part.problem), None)


def short(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with a schedule in which everything happens within a few steps, each of two micro batches."""
    tokens = recipe.micro * recipe.batch.sequence * recipe.data_ranks
    return changed(
        recipe,
        {
            "schedule.steps": STEPS,
            "schedule.warmup": 1,
            "batch.total_tokens": 2 * tokens,
            "run.save_every": SAVE_EVERY,
            "run.keep": STEPS,
            "run.validate_every": VALIDATE_EVERY,
            "run.validate_sequences": 2 * recipe.micro,
            "run.sample_every": SAMPLE_EVERY,
            "run.sample_tokens": 4,
            "run.tensorboard": False,
            **changes,
        },
    )


@dataclass(frozen=True)
class Lives:
    """Takes recipes through lives, in a folder of its own."""

    starter: Starter
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 300.0
    """How long one command may take."""
    options: tuple[str, ...] = ()
    """Further options of every `rush train`."""
    strict: bool = True
    """Whether a warning that helps nobody is a problem."""
    tolerance: float = 0.0
    """How far the losses of the part `again` may be from those of `whole`, relative."""

    def live(self, recipe: Recipe, parts: Sequence[str] = EVERY) -> Life:
        """Take a recipe that `short` made through these parts, as far as they concern it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.toml").write_text(write_toml(recipe))
        one = _One(self, recipe, RunFolder(self.folder / "run"))
        lived: list[Part] = []
        for name in parts:
            if not one.concerns(name):
                continue
            began, problem, code = time.monotonic(), None, None
            try:
                getattr(one, name)()
            except Broken as broken:
                problem, code = str(broken), broken.code
            lived.append(Part(name, problem, round(time.monotonic() - began, 2), code))
            if problem is not None and name in (*TRAINING, *UNDISTURBED):
                break  # there is no trained model for the rest
        return Life(tuple(lived))


@dataclass(frozen=True)
class _One:
    """The parts of one recipe's life. Each raises `Broken` if something does not hold after it."""

    lives: Lives
    recipe: Recipe
    run: RunFolder

    def concerns(self, part: str) -> bool:
        names = [name for name, _ in self.recipe.technique_uses()]
        if part == "chat":
            return self.recipe.objective.kind != "lm"
        if part == "merge":
            return any(name in ADAPTERS for name in names)
        return True

    def train(self) -> None:
        """Train, and die by SIGKILL between two saves."""
        codes = self._train(self.run, kill_when=self._between_saves)
        if any(code > 0 for code in codes):
            self._finished(codes)
        if any(code == 0 for code in codes):
            raise Broken("the run ended before it could be killed")
        steps = self.run.checkpoints.steps()
        if not steps:
            raise Broken("there is no checkpoint after the kill")
        _verified(self.run, steps[-1])

    def resume(self) -> None:
        """Go on to the end: no row missing, twice or not finite; every validation, sample and save where it was due."""
        self._finished(self._train(self.run, "--resume"))
        _check_whole(self.run, self.recipe)

    def whole(self) -> None:
        """Train to the end."""
        self._finished(self._train(self.run))
        _check_whole(self.run, self.recipe)

    def again(self) -> None:
        """Once more from the first checkpoint, as if the run had been killed after it: to the same losses."""
        rows, (first, *later) = _rows(self.run.metrics), self.run.checkpoints.steps()
        for step in later:
            shutil.rmtree(self.run.checkpoints.path(step))
        self.resume()
        for before, now in zip(rows[first:], _rows(self.run.metrics)[first:], strict=True):
            for name in ("loss", "val_loss"):
                expected, found = before.get(name, 0.0), now.get(name, 0.0)
                if abs(found - expected) > self.lives.tolerance * abs(expected):
                    what = "validation loss" if name == "val_loss" else "loss"
                    raise Broken(
                        f"after a resume the {what} of step {now['step']} is {found:.6g}, without one {expected:.6g}"
                    )

    def repeat(self) -> None:
        """The same run without a kill, for the same bits."""
        whole = RunFolder(self.lives.folder / "undisturbed")
        self._finished(self._train(whole))
        for name in ("metrics", "samples"):
            found, expected = (_rows(getattr(folder, name)) for folder in (self.run, whole))
            for one, other in zip(found, expected, strict=True):
                if one != other:
                    raise Broken(f"{name} of the resumed run: {one}; of the undisturbed one: {other}")
        files, others = _checkpoint_files(self.run), _checkpoint_files(whole)
        if files.keys() != others.keys():
            raise Broken(f"checkpoints of the resumed run: {sorted(files)}; of the other: {sorted(others)}")
        if unequal := [name for name, content in files.items() if content != others[name]]:
            raise Broken(f"after a resume these files differ: {', '.join(sorted(unequal))}")

    def evaluate(self) -> None:
        """`rush evaluate` finds the loss that the run's last validation found."""
        batch = ["--batch", str(self.recipe.micro), "--limit", str(self.recipe.run.validate_sequences)]
        said = json.loads(
            self._rush("evaluate", "--json", "--answers", "0", *batch, *self._device(), str(self.run.path))
        )
        judged = said["models"][0]
        loss = judged["held_out"]["loss"]
        if not math.isfinite(loss):
            raise Broken(f"rush evaluate finds a loss of {loss}")
        if self.recipe.objective.kind == "lm":
            expected = _rows(self.run.metrics)[-1]["val_loss"]
            if abs(loss - expected) > _rounding(self.recipe) * abs(expected):
                raise Broken(f"rush evaluate finds a loss of {loss}, the run's validation {expected}")

    def export(self) -> None:
        """`rush export`, and transformers computes the same logits."""
        to = self.lives.folder / "exported"
        self._rush("export", str(self.run.path), "--to", str(to))
        self._same_logits(to)

    def merge(self) -> None:
        """`rush merge`, and the merged model computes the same logits."""
        to = self.lives.folder / "merged"
        self._rush("merge", str(self.run.path), "--to", str(to))
        self._same_logits(to)

    def generate(self) -> None:
        prompt = ["--prompt", self.recipe.run.sample_prompt, "--max-tokens", "4"]
        said = json.loads(self._rush("generate", "--json", *prompt, *self._device(), str(self.run.path)))
        if not all(0 <= token < self.recipe.shape().vocab_size for token in said["tokens"]):
            raise Broken(f"rush generate gives tokens outside the vocabulary: {said['tokens']}")

    def chat(self) -> None:
        """One turn."""
        words = ["chat", str(self.run.path), "--max-tokens", "4", *self._device()]
        if not self._rush(*words, stdin="What is a list?\n").endswith("\n"):
            raise Broken("rush chat gave no answer")

    def _same_logits(self, folder: Path) -> None:
        difference = largest_difference(self.run.path, folder, self.recipe.batch.sequence)
        if not difference <= _rounding(self.recipe):
            raise Broken(f"logits in transformers differ by {difference:.2e} of the largest one")

    def _between_saves(self) -> bool:
        """Whether a checkpoint is sealed and a later step done."""
        steps = self.run.checkpoints.steps()
        return bool(steps) and sum(1 for _ in read_rows(self.run.metrics)) > steps[-1]

    def _train(self, folder: RunFolder, *more: str, kill_when: Callable[[], bool] | None = None) -> list[int]:
        words = ["train", str(self.lives.folder / "recipe.toml"), "--out", str(folder.path), *more]
        ranks = _ranks(self.recipe.world)
        codes = self._start([*words, *self.lives.options], ranks, "", kill_when)
        if kill_when is None or all(code < 0 for code in codes):
            self._check_warnings()
        return codes

    def _rush(self, *words: str, stdin: str = "") -> str:
        """A command of one process that must succeed; what it printed."""
        self._finished(self._start(words, [{}], stdin, None))
        self._check_warnings()
        return self._streams().stdout.read_text()

    def _start(
        self,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        stdin: str,
        kill_when: Callable[[], bool] | None,
    ) -> list[int]:
        lives, streams = self.lives, self._streams()
        streams.stdin.write_text(stdin)
        surroundings = [{**lives.environment, **extra} for extra in environments]
        codes = lives.starter.rush(words, streams, surroundings, lives.limit_s, kill_when)
        if codes is None:
            raise Broken(f"`rush {words[0]}` was not done after {lives.limit_s:g} s", -signal.SIGKILL)
        return codes

    def _finished(self, codes: Sequence[int]) -> None:
        if any(codes):
            words = f"exit code {', '.join(map(str, codes))}: {_last_words(self._said())}"
            raise Broken(words, next(code for code in codes if code))

    def _check_warnings(self) -> None:
        if not self.lives.strict:
            return
        found = re.search(r"^.*(?:Warning\b|Traceback).*$", self._said(), re.MULTILINE)
        if found:
            raise Broken(f"a warning that helps nobody: {found.group(0).strip()[:300]}")

    def _said(self) -> str:
        """What the last command wrote to standard error, all its processes."""
        path = self._streams().stderr
        return "".join(file.read_text() for file in sorted(path.parent.glob(f"{path.name}*")))

    def _streams(self) -> Streams:
        return Streams(*(self.lives.folder / name for name in ("stdin", "stdout", "stderr")))

    def _device(self) -> list[str]:
        return ["--device", self.recipe.run.device]


def _check_whole(run: RunFolder, recipe: Recipe) -> None:
    rows, total = _rows(run.metrics), recipe.schedule.steps
    if [row["step"] for row in rows] != list(range(1, total + 1)):
        raise Broken(f"metrics.jsonl has the steps {[row['step'] for row in rows]} of {total}")
    if bad := [row["step"] for row in rows if row["loss"] is None or not math.isfinite(row["loss"])]:
        raise Broken(f"the loss is not finite at step {bad[0]}")
    settings = recipe.run
    for what, every, found in (
        ("validations", settings.validate_every, [row["step"] for row in rows if "val_loss" in row]),
        ("samples", settings.sample_every, [row["step"] for row in _rows(run.samples)]),
        ("checkpoints", settings.save_every, run.checkpoints.steps()),
    ):
        due = [step for step in range(1, total + 1) if step == total or (every and step % every == 0)]
        if found != due:
            raise Broken(f"{what} after the steps {found}, due after {due}")
    _verified(run, total)


def _verified(run: RunFolder, step: int) -> None:
    try:
        verify(run.checkpoints.path(step))
    except CheckpointDamaged as error:
        raise Broken(str(error)) from None


def _rounding(recipe: Recipe) -> float:
    """How far losses and logits of the plain fp32 model may be from those of the run, relative."""
    close = all(
        registry()[name].parity.name in ("EXACT", "CLOSE") or name in ADAPTERS[:1]
        for name, _ in recipe.technique_uses()
        if name in registry()
    )
    return 1e-4 if close else 3e-2


def _rows(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read_rows(path)]


def _checkpoint_files(run: RunFolder) -> dict[str, bytes]:
    return {
        str(path.relative_to(run.path)): path.read_bytes() for path in run.checkpoints.folder.glob("step-*/*")
    }


def _ranks(world: int) -> list[dict[str, str]]:
    """The environments in which processes find each other, as a launcher sets them."""
    if world == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world)]


def _last_words(said: str) -> str:
    """The error message, or what was said last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")] or lines
    return told[-1][:1000] if told else "it said nothing"
