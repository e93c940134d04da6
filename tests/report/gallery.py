"""Every kind of page, drawn from committed records and made-up ones: for axe, and for the screenshots of the docs."""

from __future__ import annotations

from pathlib import Path

from rush import plan_recipe
from rush.explain.page import write as write_explanation
from rush.explain.records import explain
from rush.report.compare_runs import compare_runs, write_run_comparison
from rush.report.documents import documents_page
from rush.report.plan import write_plan
from rush.report.redraw import redraw
from tests.explain import made_up as made_up_explain
from tests.report.made_up_run import REAL_RUN, write_run

RESULTS = Path(__file__).resolve().parents[2] / "results"
RECORDED = {
    "ladder": RESULTS / "llama-3.2-1b-h200",
    "tune": RESULTS / "tune-gpt2-124m-h200",
    "scale": RESULTS / "scale-h200",
    "race": RESULTS / "race-tiny-x86",
    "kernels": RESULTS / "kernels-h200",
    "models": RESULTS / "models-h200",
    "run": REAL_RUN,
}
LENGTHS = [{"from": 2**at, "below": 2 ** (at + 1), "documents": count} for at, count in enumerate((2, 30, 210, 95), start=4)]  # fmt: skip
TALK = [("user: ", False), ("What does bisect do?", False), ("\nassistant: ", False), ("It finds a place in a sorted list.", True)]  # fmt: skip
DOCUMENTS = {
    "source": "talks.jsonl", "template": "plain", "train_on": "assistant", "sequence": 128, "folder": "~/.cache/rush/documents/talks",
    "held_out_note": None,
    "splits": {"train": {
        "rows": 340, "documents": 337, "tokens": 19_204, "trained": 9_410, "trained_share": 0.49, "histogram": LENGTHS,
        "dropped": {"no answer": 3}, "cut": 1, "cut_tokens": 40, "examples": {"no answer": ["talks.jsonl:7"], "cut": ["talks.jsonl:9"]},
        "unused": {"id": 340}, "controls": {},
    }},
}  # fmt: skip


def draw_pages(folder: Path) -> dict[str, Path]:
    """The pages by name, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {name: folder / f"{name}.html" for name in (*RECORDED, "plan", "data", "compare")}
    for name, place in RECORDED.items():
        redraw(place, pages[name])
    planned = plan_recipe("llama-3.1-8b", "layout.fsdp=8", machine="h100-sxm", devices=8)
    write_plan(
        pages["plan"],
        "llama-3.1-8b",
        [planned.to_dict() | {"title": "fsdp 8 (parameters, ZeRO-3), micro 4"}],
        ["tp 8: 0.74× at best: 22% of its time more for communication"],
    )
    example = {
        "name": "talks.jsonl:1",
        "tokens": 31,
        "trained": 12,
        "pieces": [{"text": text, "trained": target} for text, target in TALK],
    }
    pages["data"].write_text(documents_page(DOCUMENTS, [example]), encoding="utf-8")
    runs = [
        write_run(folder / "runs" / name, rows=300, rate=rate)
        for name, rate in (("plain", 1.0), ("fast", 1.7))
    ]
    write_run_comparison(compare_runs(runs), pages["compare"])
    record = made_up_explain.record("attention", made_up_explain.EVERY["attention"]())
    return pages | {"explain": write_explanation(explain(record), folder / "explain")["report"]}
