"""The study of data quality: what is planted, what its pipeline takes out, and that the page says what the record says."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "examples" / "data-quality"
RECORD = ROOT / "results" / "data-quality-x86" / "record.json"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    # It imports its neighbour by name, as a script does.
    with pytest.MonkeyPatch.context() as imports:
        imports.setitem(sys.modules, "dirt", _loaded("dirt", STUDY / "dirt.py"))
        yield _loaded("data_quality_study", STUDY / "study.py")


def _loaded(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_page_and_the_picture_are_those_of_the_record(study: ModuleType) -> None:
    record = json.loads(RECORD.read_text())
    assert study.write_page(record) == study.PAGE.read_text(), (
        "run study.py --draw --record results/data-quality-x86"
    )
    assert study.picture(record) == study.PICTURE.read_text()


def test_the_record_holds_together(study: ModuleType) -> None:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    rows = {row["corpus"]: row for row in record["rows"]}
    assert list(rows) == ["raw", *(f"+ {name}" for name in study.stages()), "before the dirt"]
    assert record["seeds"] >= 3
    for row in rows.values():
        assert len(row["losses"]) == record["seeds"]
        assert row["documents"] == sum(row["kinds"].values())
        if row["gain"] is not None:
            gains = [raw - own for raw, own in zip(rows["raw"]["losses"], row["losses"], strict=True)]
            assert row["gain"]["mean"] == pytest.approx(sum(gains) / len(gains))
    raw = rows["raw"]
    for kind, share in record["planted"].items():
        assert raw["kinds"][kind] / raw["documents"] == pytest.approx(share, abs=0.005)
    assert set(rows["before the dirt"]["kinds"]) == {"clean"}


def test_an_interval_is_students(study: ModuleType) -> None:
    # 1, 2 and 4: mean 7/3, standard deviation 1.5275, t of two degrees of freedom 4.3027.
    found = study.interval([1.0, 2.0, 4.0])
    assert found["mean"] == pytest.approx(7 / 3)
    assert found["high"] - found["mean"] == pytest.approx(4.30265 * 1.527525 / 3**0.5, rel=1e-4)


def test_every_planted_kind_is_taken_out_by_its_stage(study: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    from random import Random

    dirt = sys.modules["dirt"]

    from rush.data.clean import clean, load_pipeline

    chance = Random(3)
    prose = "This function returns the number of bytes that were read from the file, or raises an error, e.g. if it isn't open."
    rows = [
        {
            "text": f"{prose} It takes the argument number {n}, which is ignored in version {n}.",
            "kind": "clean",
        }
        for n in range(3)
    ]
    rows += [{"text": dirt.broken(prose, chance), "kind": "broken encoding"} for _ in range(8)]
    rows += [{"text": dirt.boilerplate(chance), "kind": "boilerplate"} for _ in range(8)]
    rows += [{"text": dirt.foreign(chance), "kind": "other language"} for _ in range(8)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pipeline = tmp_path / "pipeline.toml"
    pipeline.write_text(study.first_stages(3))
    report = clean(
        load_pipeline(str(pipeline)), [str(tmp_path / "raw.jsonl")], tmp_path / "out.jsonl", workers=1
    )
    assert report is not None
    assert [stage["removed"] for stage in report["stages"]] == [8, 8, 8]
    left = [json.loads(line)["kind"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert Counter(left) == {"clean": 3}
