"""The last step: join the parts into the output, write samples and report, and rename all into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from rush.data.clean.failure import recording_errors
from rush.data.clean.output import input_schema, join_parts, parts_schema
from rush.data.clean.plan import CleaningLayout
from rush.data.clean.report import write_report
from rush.data.clean.row_files import Inputs
from rush.data.clean.stages import CleaningPipeline
from rush.data.readers import import_extra
from rush.errors import RecipeError
from rush.files import fsync_file, fsync_folder

FORMATS = ("jsonl", "parquet")
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class JoinTarget:
    """The output: a file, by its extension, or a folder with a file per unit."""

    path: Path
    format: str

    @classmethod
    def of(cls, path: str | Path, format: str | None, inputs_are_parquet: bool) -> JoinTarget:
        path = Path(path).expanduser().absolute()
        ending = next((ending for ending in ENDINGS if path.name.lower().endswith(ending)), None)
        if ending is None and path.suffix:
            raise RecipeError(
                f"--output is {path.name}; allowed: a name with the extension {', '.join(ENDINGS)} for one file, or one "
                "without an extension for a folder of files."
            )
        implied = None if ending is None else "parquet" if ending == ".parquet" else "jsonl"
        if format is not None and implied is not None and format != implied:
            raise RecipeError(
                f"--format is {format}, but the extension of --output {path.name} is of {implied}."
            )
        return cls(path, implied or format or ("parquet" if inputs_are_parquet else "jsonl"))

    @property
    def one_file(self) -> bool:
        return self.path.name.lower().endswith(ENDINGS)

    @property
    def removed(self) -> Path:
        """The folder of the removed samples and, for one file, of the report."""
        if not self.one_file:
            return self.path / "removed"
        ending = next(ending for ending in ENDINGS if self.path.name.lower().endswith(ending))
        return self.path.with_name(self.path.name[: -len(ending)] + ".removed")

    @property
    def working(self) -> Path:
        return self.path.with_name(f".{self.path.name}.cleaning")


class Join(PipelineStep):  # type: ignore[misc]
    name = "output"
    type = "rush writer"

    def __init__(
        self, pipeline: CleaningPipeline, inputs: Inputs, target: JoinTarget, examples: int, force: bool
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.inputs = inputs
        self.target = target
        self.examples = examples
        self.force = force

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        layout = CleaningLayout(self.target.working)
        with recording_errors(layout.errors, rank):
            result = self.target.working / "result"
            shutil.rmtree(result, ignore_errors=True)
            result.mkdir()
            files = self._write(result, Path(layout.parts))
            removed = result / "removed"
            write_report(removed, self.pipeline, self.inputs, layout, self.target.path.name, self.examples)
            if not self.target.one_file:
                os.replace(removed / "report.json", result / "report.json")
            for file in files:
                fsync_file(file)
            self._publish(result, removed)
        # Another run with the same output starts anew.
        (self.target.working / "key.json").unlink()
        for name in ("stages", "parts", "counts", "unreadable", "result", "old"):
            shutil.rmtree(self.target.working / name, ignore_errors=True)
        yield from ()

    def _write(self, result: Path, parts_folder: Path) -> list[Path]:
        suffix = ".parquet" if self.target.format == "parquet" and self.inputs.parquet else ".jsonl"
        parts = [parts_folder / f"{unit:05d}{suffix}" for unit in range(len(self.inputs.units))]
        schema = self._schema(parts_folder) if self.target.format == "parquet" else None
        if self.target.one_file:
            join_parts(parts, result / self.target.path.name, schema)
            return [result / self.target.path.name]
        files: list[Path] = []
        for part in [part for part in parts if part.stat().st_size > 0] or parts[:1]:
            files.append(result / f"data-{len(files):05d}.{self.target.format}")
            join_parts([part], files[-1], schema)
        return files

    def _schema(self, parts_folder: Path) -> Any:
        if self.inputs.parquet:
            return input_schema(self.inputs)
        arrow = import_extra("pyarrow", "parquet", "Writing Parquet files")
        return parts_schema(parts_folder) or arrow.schema([])

    def _publish(self, result: Path, removed: Path) -> None:
        """Rename into place, the output itself last."""
        target, old = self.target, self.target.working / "old"
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        if target.path.exists() and not self.force:
            raise RecipeError(exists(target.path))
        moves = [(result, target.path)]
        if target.one_file:
            moves = [(removed, target.removed), (result / target.path.name, target.path)]
        for source, destination in moves:
            if destination.is_dir():
                os.replace(destination, old / destination.name)
            os.replace(source, destination)
        fsync_folder(target.path.parent)


def exists(path: Path) -> str:
    return f"{path} exists already; choose another --output, or add --force to replace it."
