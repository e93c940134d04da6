"""Verification of a checkpoint by all ranks: each reads some of its files, and damage found by one counts for all.

A checkpoint of a large model takes minutes to read, so ranks share the work. Each rank also reports which files it has read: a
file that no rank read, or ranks that see different folders, must not pass as intact.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from rush.parallel import Ranks
from rush.records.checkpoint_manifest import (
    CheckpointDamaged,
    CheckpointManifest,
    check_contents,
    check_sizes,
    read_manifest,
)
from rush.records.checkpoint_store import Checkpoint, CheckpointStore, OnDamaged


class RankReport(TypedDict):
    """One rank's result for a checkpoint."""

    problem: str
    """The problem with its files; empty if there is none."""
    read: list[str]
    """The files whose every byte it has read."""
    seal: str
    """The digest of the manifest that it sees."""


def newest_good(store: CheckpointStore, ranks: Ranks, on_damaged: OnDamaged) -> Checkpoint | None:
    """The newest checkpoint that verifies on all ranks; every damaged one met on the way is reported. All ranks call this."""
    for step in reversed(ranks.on_rank0(store.steps)):
        path = store.path(step)
        manifest, report = _verify_share(path, ranks)
        problem = _problem(path, ranks.all_gather_object(report), ranks)
        if not problem:
            assert manifest is not None
            return Checkpoint(path, manifest)
        on_damaged(path, problem)
    return None


def _verify_share(path: Path, ranks: Ranks) -> tuple[CheckpointManifest | None, RankReport]:
    """Read this rank's files. Problems are reported, not raised: the other ranks wait for the report."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        read = check_contents(path, manifest, (ranks.rank, ranks.world))
    except CheckpointDamaged as error:
        return None, {"problem": str(error), "read": [], "seal": ""}
    except OSError as error:
        where = "" if ranks.alone else f" on rank {ranks.rank}"
        problem = f"Checkpoint {path} cannot be read{where}: {error.strerror or error}."
        return None, {"problem": problem, "read": [], "seal": ""}
    return manifest, {"problem": "", "read": read, "seal": manifest.digest}


def _problem(path: Path, reports: Sequence[RankReport], ranks: Ranks) -> str:
    """The problem with a checkpoint, from the reports of all ranks; the same on every rank."""
    if problems := [report["problem"] for report in reports if report["problem"]]:
        return problems[0]
    if others := [str(rank) for rank, report in enumerate(reports) if report["seal"] != reports[0]["seal"]]:
        return (
            f"Checkpoint {path} is not the same on all ranks: rank {', '.join(others)} reads another manifest.json than rank 0. "
            "All ranks must see the same folder."
        )
    read = sorted(name for report in reports for name in report["read"])
    files = sorted(read_manifest(path).files)
    assert read == files, f"{ranks.world} ranks verified {read} of the files {files}"
    return ""
