"""What each stage of cleaning gives in held-out loss, at equal tokens: python examples/data-quality/study.py FOLDER --record results/…

Only rush's commands are used. `rush data clean` takes the first k stages of pipeline.toml; `rush train` trains one small model on
what is left, with as many tokens whatever is left, once for each seed; `rush evaluate` measures its loss on clean text of
modules that no corpus has. All share one tokenizer, that of the corpus before the dirt was planted, or losses per token could
not be compared. A stage is compared with the raw corpus seed by seed: same initial weights, same tokens. What is finished is kept,
so an interrupted study continues. With `--draw` only the picture and the table of docs/finetuning/cleaning.md are made, from the record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ["OMP_NUM_THREADS"] = (
    "1"  # before torch is imported: commands are forked from a process that has it
)
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from dirt import SHARES, make  # noqa: E402

from rush.hardware import probe  # noqa: E402
from rush.lab.statistics import student_quantile  # noqa: E402
from rush.lab.trial.starter import COMMANDS, Starter, Streams  # noqa: E402
from rush.recipe_io import load_recipe  # noqa: E402
from rush.report.panel_file import standalone  # noqa: E402
from rush.report.panels import Curve, Curves, Dot, Level, Mark  # noqa: E402

PIPELINE, RECIPE = HERE / "pipeline.toml", HERE / "recipe.toml"
PAGE = HERE.parents[1] / "docs" / "finetuning" / "cleaning.md"
PICTURE = HERE.parents[1] / "docs" / "pictures" / "data-quality.svg"
BEGIN, END = "<!-- quality: begin, by examples/data-quality/study.py -->", "<!-- quality: end -->"
RAW, BEFORE = "raw", "before the dirt"


def stages() -> list[str]:
    return [stage["name"] for stage in tomllib.loads(PIPELINE.read_text())["stage"]]


def first_stages(count: int) -> str:
    """The pipeline up to a stage, as it is written."""
    head, *tables = PIPELINE.read_text().split("[[stage]]")
    return "[[stage]]".join([head, *tables[:count]])


class Study:
    def __init__(self, folder: Path, starter: Starter) -> None:
        self.folder, self.starter = folder, starter
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUSH_CACHE": str(folder / "cache")}

    def rush(self, *words: str | Path) -> str:
        """A command of rush, and what it prints."""
        streams = Streams(Path(os.devnull), self.folder / "stdout", self.folder / "stderr")
        given = [str(word) for word in words]
        codes = self.starter.rush(given, streams, [self.environment], limit_s=1800)
        said = streams.stderr.read_text() + streams.stdout.read_text()
        if codes != [0]:
            raise SystemExit(f"rush {' '.join(given)} ended with {codes}: {said[-2000:]}")
        return streams.stdout.read_text()

    def corpora(self) -> dict[str, Path]:
        """The raw corpus, what every further stage leaves of it, and the corpus before the dirt was planted."""
        if not (self.folder / "held_out.jsonl").exists():
            make(self.folder)
        found = {RAW: self.folder / "raw.jsonl"}
        for count, name in enumerate(stages(), start=1):
            target = self.folder / f"stage-{count}.jsonl"
            if not target.exists():
                pipeline = self.folder / f"stage-{count}.toml"
                pipeline.write_text(first_stages(count))
                self.rush("data", "clean", pipeline, found[RAW], "-o", target)
            found[f"+ {name}"] = target
        return found | {BEFORE: self.folder / "clean.jsonl"}

    def loss(self, place: int, corpus: Path, seed: int, *changes: str) -> float:
        """Held-out loss of a model trained on a corpus."""
        kept = self.folder / "losses" / f"{place}-{seed}.json"
        if not kept.exists():
            run = self.folder / "runs" / f"{place}-{seed}"
            tokenizer = self.folder / "runs" / "tokenizer"
            first = not (tokenizer / "tokenizer").exists()
            if first:  # a short run on the corpus before the dirt makes the tokenizer of all
                self.rush("train", RECIPE, f"data.files=['{self.folder / 'clean.jsonl'}']", "schedule.steps=1", "schedule.warmup=0",
                          "--out", tokenizer)  # fmt: skip
            words = [
                f"data.files=['{corpus}']",
                f"data.tokenizer={tokenizer / 'tokenizer'}",
                f"run.seed={seed}",
                *changes,
            ]
            self.rush("train", RECIPE, *words, "--out", run, *(["--resume"] if run.exists() else []))
            said = self.rush(
                "evaluate", run, "--data", self.folder / "held_out.jsonl", "--answers", "0", "--json"
            )
            held_out = json.loads(said)["models"][0]["held_out"]
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(held_out))
        return float(json.loads(kept.read_text())["loss"])

    def record(self, seeds: int, changes: list[str]) -> dict[str, Any]:
        corpora = self.corpora()
        losses: dict[str, list[float]] = {name: [] for name in corpora}
        for seed in range(seeds):
            for place, (name, corpus) in enumerate(corpora.items()):
                losses[name].append(self.loss(place, corpus, seed, *changes))
        rows = []
        for name, corpus in corpora.items():
            kinds = Counter(json.loads(line)["kind"] for line in corpus.read_text().splitlines())
            gains = [raw - own for raw, own in zip(losses[RAW], losses[name], strict=True)]
            rows.append({"corpus": name, "documents": sum(kinds.values()), "bytes": corpus.stat().st_size, "kinds": dict(kinds),
                         "losses": losses[name], "loss": statistics.fmean(losses[name]),
                         "gain": None if name == RAW else interval(gains)})  # fmt: skip
        recipe = load_recipe(str(RECIPE), changes)
        assert recipe.batch.total_tokens is not None
        return {
            "format": 1,
            "tokens": recipe.schedule.steps * recipe.batch.total_tokens,
            "seeds": seeds,
            "planted": SHARES,
            "machine": probe().to_dict(),
            "rows": rows,
        }


def interval(gains: list[float]) -> dict[str, float]:
    """The mean of the seeds' differences, with its 95 % interval by Student's distribution."""
    mean = statistics.fmean(gains)
    freedom = len(gains) - 1
    width = quantile(freedom) * statistics.stdev(gains) / math.sqrt(len(gains))
    return {"mean": mean, "low": mean - width, "high": mean + width}


def quantile(freedom: int) -> float:
    if freedom < 2:
        raise SystemExit("an interval needs three seeds at least.")
    return 0.95 * math.sqrt(2 / (1 - 0.95**2)) if freedom == 2 else student_quantile(freedom)


def picture(record: dict[str, Any]) -> str:
    rows = [row for row in record["rows"] if row["gain"]]
    dots = [
        Dot(place, row["gain"]["mean"], row["gain"]["low"], row["gain"]["high"])
        for place, row in enumerate(rows, start=1)
    ]
    caption = (
        f"Held-out loss on the raw corpus minus that on what is left (above zero: cleaning helped), nats a token: mean of "
        f"{record['seeds']} seeds with its 95 % interval, {record['tokens']:,} tokens each. Stages are cumulative."
    )
    panel = Curves(
        "Held-out loss gained over the raw corpus", "stages, one after another", "nats a token", "", "",
        [Curve("", dots, color=1, style="dots")], x_log=False, y_log=False, y_from_zero=False, caption=caption,
        levels=[Level(0.0, "")],
        marks=[Mark(place, row["corpus"]) for place, row in enumerate(rows, start=1)],
    )  # fmt: skip
    return standalone("What cleaning gives at equal tokens", "", [panel])


def table(record: dict[str, Any]) -> str:
    lines = ["| corpus | documents | planted dirt left | clean documents left | held-out loss | gain over raw, 95 % interval |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in record["rows"]:
        clean, gain = row["kinds"].get("clean", 0), row["gain"]
        dirt = 1 - clean / row["documents"]
        said = (
            ""
            if gain is None
            else f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})".replace("-", "−")
        )
        lines.append(
            f"| {row['corpus']} | {row['documents']:,} | {dirt:.1%} | {clean:,} | {row['loss']:.3f} | {said} |"
        )
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> str:
    """The page with the table of the record between its marks."""
    text = PAGE.read_text()
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{table(record)}\n\n{text[text.index(END) :]}"


def main() -> None:
    options = argparse.ArgumentParser(
        description="What each stage of cleaning gives in held-out loss, at equal tokens."
    )
    options.add_argument("folder", type=Path, nargs="?", help="where corpora and runs are kept")
    options.add_argument("--record", type=Path, required=True, help="folder of record.json")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change of the recipe"
    )
    options.add_argument(
        "--draw", action="store_true", help="only the picture and the table, from the record"
    )
    given = options.parse_args()
    path = given.record / "record.json"
    if not given.draw:
        folder = given.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        starter = Starter(COMMANDS, dismantle=False)
        try:
            record = Study(folder, starter).record(given.seeds, given.set)
        finally:
            starter.close()
        given.record.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    record = json.loads(path.read_text())
    PICTURE.write_text(picture(record))
    PAGE.write_text(write_page(record))


if __name__ == "__main__":
    main()
