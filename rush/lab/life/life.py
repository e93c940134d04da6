"""A life: everything a run goes through, by the command line in real processes.

A recipe can be fast, and right over 200 steps, and still die at its first validation, or not come back from a kill. So
it is taken through a short life: it trains with accumulation, validations, samples and saves; it is killed between two saves (SIGKILL);
it is resumed and trains to the end; it is trained once more undisturbed, to the same bits; it is evaluated, exported to
transformers, made to generate and, where it is a chat recipe, to chat; its adapters are merged. After each part
is checked what must hold then. A life says nothing about speed or about long runs: it is the shortest run in which
everything happens that happens in a long one.

`rush/lab/life/usable.py` has a shorter one of two processes (`whole`, `again`) for what a ladder or a search has measured.
"""

from __future__ import annotations

import json
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
from rush.hub.answers import encode_question
from rush.lab.life import checks
from rush.lab.life.checks import Broken
from rush.lab.life.logits import largest_difference
from rush.lab.trial.starter import Starter, Streams
from rush.recipe import Recipe
from rush.recipe_io import changed, write_toml
from rush.records.metrics import read_rows
from rush.records.run_folder import RunFolder
from rush.techniques.api.rounding import FP32, adapts_plain_weights, rounding, trains_adapters

STEPS, SAVE_EVERY, VALIDATE_EVERY, SAMPLE_EVERY = 6, 2, 3, 3
TRAINING = ("train", "resume")
"""The parts that show whether a recipe can be trained with at all."""
UNDISTURBED = ("whole", "again")
"""The same without a kill, so that what a resumed run computes is seen beside what it should."""
EVERY = ("train", "resume", "repeat", "evaluate", "export", "generate", "chat", "merge", "adapter")
ATTEMPTS = 3
"""To be killed in time: on a busy machine a tiny run may be over before it is noticed that the moment has come."""
SAID = 4000
SAMPLING = ("--temperature", "0.8", "--top-k", "50")
"""How a run draws its samples."""


@dataclass(frozen=True)
class PartResult:
    """One part of a life: what is wrong after it, if anything, and how long it took."""

    name: str
    problem: str | None
    seconds: float
    code: int | None = None
    """The exit code of the command that failed; negative: the signal it died of."""
    said: str = ""
    """The end of what its last command wrote to standard error, where there is a problem."""


@dataclass(frozen=True)
class LifeResult:
    parts: tuple[PartResult, ...]

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

    def live(self, recipe: Recipe, parts: Sequence[str] = EVERY) -> LifeResult:
        """Take a recipe that `short` made through these parts, as far as they concern it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.toml").write_text(write_toml(recipe))
        one = _One(self, recipe, RunFolder(self.folder / "run"))
        lived: list[PartResult] = []
        for name in parts:
            if not one.concerns(name):
                continue
            began, problem, code = time.monotonic(), None, None
            try:
                getattr(one, name)()
            except Broken as broken:
                problem, code = str(broken), broken.code
            except Exception as error:  # whatever breaks in a life is what the life is asked about
                problem = f"{type(error).__name__}: {error}"
            said = one.said()[-SAID:] if problem is not None else ""
            lived.append(PartResult(name, problem, round(time.monotonic() - began, 2), code, said))
            if problem is not None and name in (*TRAINING, *UNDISTURBED):
                break  # there is no trained model for the rest
        return LifeResult(tuple(lived))


@dataclass(frozen=True)
class _One:
    """The parts of one recipe's life. Each raises `Broken` if something does not hold after it."""

    lives: Lives
    recipe: Recipe
    run: RunFolder
    before: list[dict[str, Any]] = field(default_factory=list)
    """The rows that the run had written when it was killed."""

    def concerns(self, part: str) -> bool:
        if part == "chat":
            return self.recipe.objective.kind != "lm"
        if part == "merge":
            return trains_adapters(self.recipe)
        if part == "adapter":
            return self._opened_by_peft()
        return True

    def train(self) -> None:
        """Train, and die by SIGKILL between two saves."""
        for _ in range(ATTEMPTS):
            shutil.rmtree(self.run.path, ignore_errors=True)
            codes = self._train(self.run, kill_when=self._between_saves)
            if any(codes):
                break
        else:
            raise Broken(f"the run ended before it could be killed, {ATTEMPTS} times")
        if any(code != -signal.SIGKILL for code in codes):
            self._finished(codes)
        checks.check_words(self.said())
        checks.check_sealed(self.run, self.run.checkpoints.steps()[-1])
        self.before.extend(checks.rows_of(self.run.metrics))

    def resume(self) -> None:
        """Go on to the end; what was written before the kill is written again."""
        self._finished(self._train(self.run, "--resume"))
        checks.check_whole(self.run, self.recipe)
        to_the_bit = self.recipe.run.deterministic or self._kind() == "cpu"
        checks.check_repeated(self.before, checks.rows_of(self.run.metrics), to_the_bit=to_the_bit)

    def whole(self) -> None:
        """Train to the end."""
        self._finished(self._train(self.run))
        checks.check_whole(self.run, self.recipe)

    def again(self) -> None:
        """Once more from the first checkpoint, as if the run had been killed after it: to the same losses."""
        rows, (first, *later) = checks.rows_of(self.run.metrics), self.run.checkpoints.steps()
        for step in later:
            shutil.rmtree(self.run.checkpoints.path(step))
        self.resume()
        for before, now in zip(rows[first:], checks.rows_of(self.run.metrics)[first:], strict=True):
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
        checks.check_whole(whole, self.recipe)
        checks.check_same_runs(self.run, whole)

    def evaluate(self) -> None:
        """`rush evaluate` finds what the run's last validation found."""
        words = ["--answers", "1", "--max-tokens", "4", "--batch", "2"]
        limit = ["--limit", str(self.recipe.run.validate_sequences)]
        said = json.loads(
            self._rush("evaluate", "--json", *words, *limit, *self._device(), str(self.run.path))
        )
        checks.check_validation(said["models"][0], checks.rows_of(self.run.metrics)[-1], self.recipe)

    def export(self) -> None:
        """`rush export`, and transformers computes the same logits."""
        to = self.lives.folder / "exported"
        self._rush("export", str(self.run.path), "--to", str(to))
        # Adapters are merged into weights of the base's dtype: every weight is rounded once more, and errors add up.
        merged = 4 * rounding(self.recipe) if trains_adapters(self.recipe) else 0.0
        self._same_logits(to, max(merged, 10 * FP32))

    def generate(self) -> None:
        """`rush generate` says what the run's last sample said; and of the exported folder what it says of the run's."""
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
            raise Broken(
                f"the likeliest tokens by the run are {greedy[0]}, by its exported folder {greedy[1]}"
            )

    def chat(self) -> None:
        """One turn of `rush chat`, which answers as the run's last sample does."""
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
        self._same_text(tokenizer.decode(encode_question(chatting, settings.sample_prompt)) + said[:-1])

    def merge(self) -> None:
        """`rush merge`, and the merged model computes the same logits; in fp32, where nothing is rounded once more."""
        to = self.lives.folder / "merged"
        self._rush("merge", str(self.run.path), "--dtype", "float32", "--to", str(to))
        self._same_logits(to, 10 * FP32)

    def adapter(self) -> None:
        """`rush export --adapter`, and PEFT, which puts it on the base, computes the same logits."""
        to, base = self.lives.folder / "adapter", self.recipe.model.init_from
        assert base is not None
        self._rush("export", str(self.run.path), "--adapter", "--to", str(to))
        self._same_logits(Path(base), 10 * FP32, adapter=to)

    def _opened_by_peft(self) -> bool:
        """Whether the run has adapters over a folder that PEFT can open and on weights as they are there."""
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

    def _same_text(self, said: str) -> None:
        sample = checks.rows_of(self.run.samples)[-1]["text"]
        if said != sample:
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
        """Whether a checkpoint is sealed and a later step done."""
        steps = self.run.checkpoints.steps()
        return bool(steps) and sum(1 for _ in read_rows(self.run.metrics)) > steps[-1]

    def _train(self, folder: RunFolder, *more: str, kill_when: Callable[[], bool] | None = None) -> list[int]:
        words = ["train", str(self.lives.folder / "recipe.toml"), "--out", str(folder.path), *more]
        return self._start([*words, *self.lives.options], _ranks(self.recipe.world), "", kill_when)

    def _rush(self, *words: str, stdin: str = "") -> str:
        """A command of one process that must succeed; what it printed."""
        self._finished(self._start(words, [{}], stdin, None))
        return self._streams().stdout.read_bytes().decode()  # as it is: a model may say a carriage return

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
        """Exit code 0, and nothing said that needs an explanation."""
        if any(codes):
            words = f"exit code {', '.join(map(str, codes))}: {checks.last_words(self.said())}"
            raise Broken(words, next(code for code in codes if code))
        if self.lives.strict:
            checks.check_words(self.said())

    def said(self) -> str:
        """What the last command wrote to standard error, all its processes."""
        path = self._streams().stderr
        return "".join(file.read_text() for file in sorted(path.parent.glob(f"{path.name}*")))

    def _streams(self) -> Streams:
        return Streams(*(self.lives.folder / name for name in ("stdin", "stdout", "stderr")))

    def _kind(self) -> str:
        return "cuda" if self.recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu"

    def _device(self) -> list[str]:
        return ["--device", self.recipe.run.device]


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
