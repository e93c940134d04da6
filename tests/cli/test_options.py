"""What the words of a command are: recipes, files and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.cli import main
from rush.recipe_io import load_recipe, write_toml


@pytest.mark.parametrize(
    "command",
    ["train", "tune", "scale", "probe", "plan", "plan --chart links", "plan --search", "overfit", "ladder", "race tiny"],
)  # fmt: skip
def test_a_recipe_may_have_an_equals_sign_in_its_path(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("other=1") / "recipe.toml"
    path.parent.mkdir()
    ladder = 'recipe = "tiny"\nrungs = ["fused_adamw"]\n[base]\ntechniques = []\n'
    path.write_text(ladder if command == "ladder" else write_toml(load_recipe("tiny")))
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), str(path), "batch.mikro=1"])
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert "batch.mikro" in err, err
    assert "more like it" not in err, err  # of which the path would be one, read as an override


def test_a_folder_named_as_an_override_is_not_taken_for_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the runs of a sweep may be."""
    monkeypatch.chdir(tmp_path)
    Path("batch.mikro=1").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["tune", "batch.mikro=1"])
    assert ended.value.code == 2
    assert "batch.mikro is not a key of a recipe" in capfd.readouterr().err
