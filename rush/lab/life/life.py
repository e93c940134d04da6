"""A life: everything a run goes through, with the command line in real processes.

A recipe can be fast, and right over 200 steps, and still fail at its first validation or at a resume. So it is taken through a
short life: it trains with gradient accumulation, validations, samples and checkpoints; it is killed between two checkpoints
(SIGKILL), resumed and trained to the end; it is trained again without interruption, to the same bits; it is evaluated, exported
to transformers, and generates or chats; its adapters are merged. Each part is followed by its checks. A life says nothing about
speed or long runs: it is the shortest run with all the events of a long one.

`rush/lab/life/usable.py` has a shorter life of two processes (`whole`, `again`) for ladders and searches.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rush.data import Tokenizer
from rush.data.conversations import find_template
from rush.errors import printable
from rush.hub.answers import encode_question
from rush.lab.life import checks
from rush.lab.life.checks import Broken
from rush.lab.life.logits import largest_difference
from rush.lab.trial.starter import Starter, Streams
from rush.parallel.launching import threads_per_rank
from rush.recipe import Recipe
from rush.recipe_io import CONSTANT_BATCH, changed, write_toml
from rush.records.metrics import MetricsRow, SampleRow, read_rows
from rush.records.run_folder import RunFolder
from rush.techniques.api.rounding import FP32, adapts_plain_weights, rounding, trains_adapters

STEPS, SAVE_EVERY, VALIDATE_EVERY, SAMPLE_EVERY = 6, 2, 3, 3
TRAINING = ("train", "resume")
"""The parts that show whether a recipe trains at all."""
UNDISTURBED = ("whole", "again")
"""The same without a kill, so that the losses of the resumed run can be compared."""
EVERY = ("train", "resume", "repeat", "evaluate", "export", "generate", "chat", "merge", "adapter")
ATTEMPTS = 3
"""Attempts to kill a run in time: on a busy machine a tiny run may end first."""
MAX_STDERR = 4000
SMALLEST_FREE_BYTES = 64 << 10
"""A disk with less is full."""
SAMPLING = ("--temperature", "0.8", "--top-k", "50")
"""The sampling options of a run's samples."""


@dataclass(frozen=True)
class PartResult:
    """One part of a life: its problem, if any, and its time."""

    name: str
    problem: str | None
    seconds: float
    code: int | None = None
    """Exit code of the command that failed; negative: the signal that killed it."""
    stderr: str = ""
    """The end of the last command's standard error, if there is a problem."""
    phase: str | None = None
    """The phase in which the run failed (`rush.training.failures.Phase`, in lower case)."""
    techniques: tuple[str, ...] = ()
    """The techniques to blame."""
    late: bool = False
    """Whether the command was killed because it ran past its time limit."""
    disk_full: bool = False
    """Whether there was no space left for the files of the run."""
    message: str | None = None
    """The error message of the command that failed, without the path of a log; None where rush itself wrote none."""


@dataclass(frozen=True)
class LifeResult:
    parts: tuple[PartResult, ...]

    @property
    def problem(self) -> str | None:
        """The first problem; None after a complete life."""
        return next((f"{part.name}: {part.problem}" for part in self.parts if part.problem), None)


def short(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with a schedule of a few steps that has every event, each step of two micro batches."""
    tokens = recipe.micro * recipe.batch.sequence * recipe.data_ranks
    return changed(
        recipe,
        {
            "schedule.steps": STEPS,
            "schedule.warmup": 1,
            "batch.total_tokens": 2 * tokens,
            **CONSTANT_BATCH,
            "run.save_every": SAVE_EVERY,
            "run.keep": STEPS,
            "run.validate_every": VALIDATE_EVERY,
            "run.validate_every_tokens": 0,
            "run.validate_sequences": 2 * recipe.micro,
            "run.sample_every": SAMPLE_EVERY,
            "run.sample_tokens": 4,
            "run.trackers": [],
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
    """Time limit of one command."""
    options: tuple[str, ...] = ()
    """Additional options of `rush train`."""
    strict: bool = True
    """Whether an unexplained warning is a problem."""
    tolerance: float = 0.0
    """Relative tolerance of the losses of `again` against `whole`."""

    def live(self, recipe: Recipe, parts: Sequence[str] = EVERY) -> LifeResult:
        """Take a recipe made by `short` through these parts, as far as they apply to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.toml").write_text(write_toml(recipe))
        one = _One(self, recipe, RunFolder(self.folder / "run"))
        lived: list[PartResult] = []
        for name in parts:
            if not one.applies(name):
                continue
            began, problem, code, phase, late, message = time.monotonic(), None, None, None, False, None
            try:
                getattr(one, name)()
            except Broken as broken:
                problem, code, phase, late = str(broken), broken.code, broken.phase, broken.late
                message = broken.message
            except Exception as error:  # finding any failure is the purpose of a life
                problem = f"{type(error).__name__}: {error}"
            stderr = one.stderr()[-MAX_STDERR:] if problem is not None else ""
            failure = one.failure() if code else {}
            phase, names = failure.get("phase", phase), tuple(failure.get("techniques", ()))
            message = failure.get("message", message)
            seconds = round(time.monotonic() - began, 2)
            full = bool(code) and (bool(failure.get("disk_full")) or one.disk_full())
            lived.append(PartResult(name, problem, seconds, code, stderr, phase, names, late, full, message))
            if problem is not None and name in (*TRAINING, *UNDISTURBED):
                break  # there is no trained model for the rest
        return LifeResult(tuple(lived))


@dataclass(frozen=True)
class _One:
    """The parts of one recipe's life. Each raises `Broken` if a check fails."""

    lives: Lives
    recipe: Recipe
    run: RunFolder
    before: list[MetricsRow] = field(default_factory=list)
    """The rows written before the kill."""

    def applies(self, part: str) -> bool:
        if part == "chat":
            return self.recipe.objective.kind != "lm"
        if part == "merge":
            return trains_adapters(self.recipe)
        if part == "adapter":
            return self._loads_in_peft()
        return True

    def train(self) -> None:
        """Train, killed by SIGKILL between two checkpoints."""
        for _ in range(ATTEMPTS):
            shutil.rmtree(self.run.path, ignore_errors=True)
            codes = self._train(self.run, kill_when=self._between_saves)
            if any(codes):
                break
        else:
            raise Broken(f"the run ended before it could be killed, {ATTEMPTS} times")
        if any(code != -signal.SIGKILL for code in codes):
            self._finished(codes)
        checks.check_stderr(self.stderr())
        checks.check_sealed(self.run, self.run.checkpoints.steps()[-1])
        self.before.extend(checks.rows_of(self.run.metrics, MetricsRow))

    def resume(self) -> None:
        """Resume to the end; rows written before the kill are written again."""
        self._finished(self._train(self.run, "--resume"))
        checks.check_whole(self.run, self.recipe)
        to_the_bit = self.recipe.run.deterministic or self._kind() == "cpu"
        checks.check_repeated(
            self.before, checks.rows_of(self.run.metrics, MetricsRow), to_the_bit=to_the_bit
        )

    def whole(self) -> None:
        """Train to the end."""
        self._finished(self._train(self.run))
        checks.check_whole(self.run, self.recipe)

    def again(self) -> None:
        """Resume from the first checkpoint, as if the run had been killed after it: to the same losses."""
        rows, (first, *later) = checks.rows_of(self.run.metrics, MetricsRow), self.run.checkpoints.steps()
        for step in later:
            shutil.rmtree(self.run.checkpoints.path(step))
        self.resume()
        for before, now in zip(
            rows[first:], checks.rows_of(self.run.metrics, MetricsRow)[first:], strict=True
        ):
            for name in checks.LOSSES:
                expected, found = before.get(name, 0.0), now.get(name, 0.0)
                if abs(found - expected) > self.lives.tolerance * abs(expected):
                    what = "validation loss" if name == "val_loss" else "loss"
                    raise Broken(
                        f"after a resume the {what} of step {now['step']} is {found:.6g}, without one {expected:.6g}"
                    )

    def repeat(self) -> None:
        """The same run without a kill, bit for bit."""
        whole = RunFolder(self.lives.folder / "undisturbed")
        self._finished(self._train(whole))
        checks.check_whole(whole, self.recipe)
        checks.check_same_runs(self.run, whole)

    def evaluate(self) -> None:
        """`rush evaluate` agrees with the run's last validation."""
        words = ["--answers", "1", "--max-tokens", "4", "--batch", "2"]
        limit = ["--limit", str(self.recipe.run.validate_sequences)]
        said = json.loads(
            self._rush("evaluate", "--json", *words, *limit, *self._device(), str(self.run.path))
        )
        checks.check_validation(
            said["models"][0], checks.rows_of(self.run.metrics, MetricsRow)[-1], self.recipe
        )

    def export(self) -> None:
        """`rush export`, and transformers computes the same logits."""
        to = self.lives.folder / "exported"
        self._rush("export", str(self.run.path), "--to", str(to))
        # Merging rounds every weight to the base's dtype once more, and errors add up.
        merged = 4 * rounding(self.recipe) if trains_adapters(self.recipe) else 0.0
        self._same_logits(to, max(merged, 10 * FP32))

    def generate(self) -> None:
        """`rush generate` repeats the run's last sample, and gives the same greedy tokens for the exported folder."""
        settings, exported = self.recipe.run, self.lives.folder / "exported"
        if self.recipe.objective.kind == "lm":
            said = self._generated(
                self.run.path, settings.sample_tokens, *SAMPLING, "--seed", str(settings.seed)
            )
            self._same_text(settings.sample_prompt + said["text"])
        greedy = [
            self._generated(folder, settings.sample_tokens, "--temperature", "0")["tokens"]
            for folder in (self.run.path, exported)
            if folder.is_dir() and not (folder is exported and trains_adapters(self.recipe))
        ]
        if any(tokens != greedy[0] for tokens in greedy):
            raise Broken(f"the greedy tokens of the run are {greedy[0]}, of its exported folder {greedy[1]}")

    def chat(self) -> None:
        """One turn of `rush chat`, which repeats the run's last sample."""
        settings = self.recipe.run
        words = ["--max-tokens", str(settings.sample_tokens), *SAMPLING, "--seed", str(settings.seed)]
        said = self._rush(
            "chat", *words, *self._device(), str(self.run.path), stdin=settings.sample_prompt + "\n"
        )
        if not said.endswith("\n"):
            raise Broken("rush chat gave no answer")
        tokenizer = Tokenizer.load(self.run.tokenizer)
        template = find_template(self.recipe.data.template, tokenizer)
        chatting = replace(tokenizer, chat_template=template.source)
        asked = tokenizer.decode(encode_question(chatting, settings.sample_prompt))
        self._same_text(asked + said[:-1], printable)

    def merge(self) -> None:
        """`rush merge`, and the merged model computes the same logits; in fp32, without another rounding."""
        to = self.lives.folder / "merged"
        self._rush("merge", str(self.run.path), "--dtype", "float32", "--to", str(to))
        self._same_logits(to, 10 * FP32)

    def adapter(self) -> None:
        """`rush export --adapter`, and PEFT with the base computes the same logits."""
        to, base = self.lives.folder / "adapter", self.recipe.model.init_from
        assert base is not None
        self._rush("export", str(self.run.path), "--adapter", "--to", str(to))
        self._same_logits(Path(base), 10 * FP32, adapter=to)

    def _loads_in_peft(self) -> bool:
        """Whether the run has adapters on unchanged weights of a folder that PEFT can load."""
        base = self.recipe.model.init_from
        opened = base is not None and (Path(base) / "config.json").is_file()
        return opened and adapts_plain_weights(self.recipe) and find_spec("peft") is not None

    def _generated(self, folder: Path, tokens: int, *words: str) -> dict[str, Any]:
        words = ("--prompt", self.recipe.run.sample_prompt, "--max-tokens", str(tokens), *words)
        said: dict[str, Any] = json.loads(
            self._rush("generate", "--json", *words, *self._device(), str(folder))
        )
        if not all(0 <= token < self.recipe.shape().vocab_size for token in said["tokens"]):
            raise Broken(f"rush generate gives tokens outside the vocabulary: {said['tokens']}")
        return said

    def _same_text(self, said: str, shown: Callable[[str], str] = str) -> None:
        """`shown`: how the command shows control characters."""
        sample = checks.rows_of(self.run.samples, SampleRow)[-1]["text"]
        if sample is None or shown(said) != shown(sample):
            raise Broken(f"it says {said!r}; the run's last sample was {sample!r}")

    def _same_logits(self, folder: Path, allowed: float, adapter: Path | None = None) -> None:
        sequence = self.recipe.batch.sequence
        difference = largest_difference(self.run.path, folder, sequence, self._kind(), adapter)
        if not difference <= allowed:
            by = "transformers" if adapter is None else "PEFT"
            raise Broken(
                f"logits by {by} differ by {difference:.2e} of the largest one, allowed {allowed:.2e}"
            )

    def _between_saves(self) -> bool:
        """Whether a checkpoint is complete and a later step done."""
        steps = self.run.checkpoints.steps()
        return bool(steps) and sum(1 for _ in read_rows(self.run.metrics, MetricsRow)) > steps[-1]

    def _train(self, folder: RunFolder, *more: str, kill_when: Callable[[], bool] | None = None) -> list[int]:
        words = ["train", str(self.lives.folder / "recipe.toml"), "--out", str(folder.path), *more]
        return self._start([*words, *self.lives.options], rank_environments(self.recipe.world), "", kill_when)

    def _rush(self, *words: str, stdin: str = "") -> str:
        """The standard output of a command of one process, which must succeed."""
        self._finished(self._start(words, [{}], stdin, None))
        return self._streams().stdout.read_bytes().decode()  # unchanged: a model may print a carriage return

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
            raise Broken(
                f"`rush {words[0]}` was not done after {lives.limit_s:g} s", -signal.SIGKILL, late=True
            )
        return codes

    def _finished(self, codes: Sequence[int]) -> None:
        """Exit code 0 and, if strict, no unexplained warning."""
        if any(codes):
            line, message = checks.last_error(self.stderr())
            problem = f"exit code {', '.join(map(str, codes))}: {line}"
            raise Broken(problem, next(code for code in codes if code), message=message)
        if self.lives.strict:
            checks.check_stderr(self.stderr())

    def failure(self) -> dict[str, Any]:
        """The identifiers of the run's last failure."""
        path = self.run.last_failure
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def disk_full(self) -> bool:
        """Whether the disk has no room even for a record of the failure."""
        return shutil.disk_usage(self.lives.folder).free < SMALLEST_FREE_BYTES

    def stderr(self) -> str:
        """Standard error of the last command, of all its processes."""
        path = self._streams().stderr
        return "".join(file.read_text() for file in sorted(path.parent.glob(f"{path.name}*")))

    def _streams(self) -> Streams:
        return Streams(*(self.lives.folder / name for name in ("stdin", "stdout", "stderr")))

    def _kind(self) -> str:
        return "cuda" if self.recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu"

    def _device(self) -> list[str]:
        return ["--device", self.recipe.run.device]


def rank_environments(world: int) -> list[dict[str, str]]:
    """The environment of each rank, as a launcher sets it."""
    if world == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(threads_per_rank(world))
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world)]
