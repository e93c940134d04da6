"""Data cleaning: a pipeline of filters and deduplication over rows of JSONL, CSV or Parquet.

    pipeline = load_pipeline("cooking")
    report = clean(pipeline, ["recipes.jsonl"], "cleaned.jsonl")

It runs on datatrove (extra `corpus`), imported on first use: a pipeline can be loaded and validated without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.data.clean.spec import load_pipeline, parse_pipeline
from rush.data.clean.stages import CleaningPipeline
from rush.data.readers import import_extra

if TYPE_CHECKING:
    from rush.data.clean.run import CleanProgress, clean

__all__ = ["CleanProgress", "CleaningPipeline", "clean", "load_pipeline", "parse_pipeline"]


def __getattr__(name: str) -> Any:
    if name in ("CleanProgress", "clean"):
        import_extra("datatrove", "corpus", "Cleaning data")
        from rush.data.clean import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
