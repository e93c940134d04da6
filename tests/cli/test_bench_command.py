"""`rush bench` as a person uses it: a table and a page, JSON for machines, and a sentence for what it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.cli import main


def call(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capfd.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))


def test_a_kernel_bench_on_a_cpu_says_what_it_is_worth(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "bench"
    words = ("bench", "kernels", "gelu", "--quick", "--device", "cpu", "--out", folder)
    code, out, err = call(capfd, *words)
    assert code == 0, err
    assert "interpreted: not a speed" in out
    assert "equal" in out
    assert "plain torch" in out
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    code, out, _ = call(capfd, *words, "--json")
    assert code == 0
    record = json.loads(out)
    assert record == json.loads((folder / "kernels.json").read_text())
    assert [op["op"] for op in record["ops"]] == ["gelu"]


def test_what_it_does_not_know_is_refused_with_the_nearest(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = call(capfd, "bench", "kernels", "layer_norm", "--out", tmp_path)
    assert code == 2
    assert "layernorm" in err
    code, _, err = call(capfd, "bench", "models", "llama-1b", "--out", tmp_path)
    assert code == 2
    assert "llama-3.2-1b" in err
