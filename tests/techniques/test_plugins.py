"""Techniques of other packages: found by their metadata, imported on demand, known to trials and run folders."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rush.errors import RecipeError
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder
from rush.techniques import check, registry
from rush.techniques.api import plugins
from rush.techniques.api.evidence import prove
from rush.techniques.api.own_files import added, check_remembered, digests, package_digests, remember
from tests.techniques.tiny_runs import ROOT, compare, make_run, recipe_of, trace
from tests.training.small_runs import small_recipe, write_corpus

EXAMPLE = ROOT / "tests" / "plugin_example"
NAME = "foreach_adamw"
Install = Callable[..., Path]


def install(
    into: Path,
    *,
    name: str = "rush-example",
    version: str = "1.0",
    entries: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """The package in a folder as `pip install --target` leaves it: its modules, and its metadata from pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("rush-example", "1.0")
    offers = project["entry-points"][plugins.GROUP] if entries is None else entries
    if not (into / "rush_example").exists():
        shutil.copytree(EXAMPLE / "rush_example", into / "rush_example")
    for file, text in (files or {}).items():
        (into / file).write_text(text)
    about = into / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = "".join(f"{one} = {place}\n" for one, place in offers.items())
    (about / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{rows}")
    return about


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs packages for this process; afterwards they are forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def go(**how: object) -> Path:
        about = install(folder, **how)  # type: ignore[arg-type]
        _forget()
        return about

    _forget()
    with registry().restored():
        yield go
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    plugins.offered.cache_clear()
    plugins.report.cache_clear()
    for module in [name for name in sys.modules if name.startswith("rush_example")]:
        del sys.modules[module]


def test_a_package_is_imported_only_when_a_recipe_names_it_or_all_are_listed(installed: Install) -> None:
    installed()
    machine = probe("cpu")
    check(load_recipe("tiny", ["techniques=['fused_adamw']"]), machine)
    assert NAME in registry()
    assert "rush_example" not in sys.modules
    check(recipe_of(NAME), machine)
    assert "rush_example.foreach_adamw" in sys.modules
    assert NAME in list(registry())
    assert NAME not in registry().ours()


def test_a_conflict_that_a_package_declares_counts_for_both_sides(installed: Install) -> None:
    assert NAME not in registry()["fused_adamw"].conflicts
    installed()
    assert "fused_adamw" in registry()[NAME].conflicts
    assert NAME in registry()["fused_adamw"].conflicts
    for pair in ((NAME, "fused_adamw"), ("fused_adamw", NAME)):
        with pytest.raises(RecipeError, match="cannot be combined: both replace the plain update"):
            check(recipe_of(*pair), probe("cpu"))


def test_the_example_takes_effect_and_learns_what_plain_fp32_learns(installed: Install) -> None:
    installed()
    plain, run = trace(make_run(), 3, watch=True), make_run(NAME)
    ours = trace(run, 3, watch=True)
    assert ours.seen is not None
    assert plain.seen is not None
    assert prove(run.uses, ours.seen)[NAME].took_effect
    assert not registry()[NAME].evidence(plain.seen, {}).took_effect
    assert compare(run, "float32", ours, plain).verdict == "equal"


BROKEN: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "raises": (
        {"broken": "rush_example.broken:technique"},
        {"broken": "1 / 0"},
        "ZeroDivisionError: division",
    ),
    "leaves": (
        {"broken": "rush_example.broken:technique"},
        {"broken": "raise SystemExit(3)"},
        "SystemExit: 3",
    ),
    "is not there": ({"broken": "rush_example.nothing:technique"}, {}, "ModuleNotFoundError"),
    "defines nothing": ({"broken": "rush_example.broken:technique"}, {"broken": ""}, "AttributeError"),
    "is no technique": (
        {"broken": "rush_example.broken:technique"},
        {"broken": "technique = 1"},
        "is a int; an entry point",
    ),
    "has another name": ({"broken": "rush_example.foreach_adamw:technique"}, {}, "is named 'foreach_adamw'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_package_that_is_broken_is_one_sentence_and_does_not_stop_the_others(
    what: str, installed: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    entries, modules, says = BROKEN[what]
    installed()
    files = {f"rush_example/{name}.py": text for name, text in modules.items()}
    installed(name="broken-package", version="0.3", entries=entries, files=files)
    listed = list(registry())
    assert NAME in listed
    assert "compile" in listed
    assert "broken" not in listed
    assert list(registry()) == listed
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert "'broken' of the package broken-package 0.3" in said
    assert says in said
    with pytest.raises(RecipeError, match=r"the package broken-package 0\.3"):
        check(recipe_of("broken"), probe("cpu"))


def test_a_name_of_ours_is_refused_with_a_sentence_and_ours_is_used(
    installed: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    before = registry()["compile"]
    installed(name="taker", version="2.0", entries={"compile": "rush_example.foreach_adamw:technique"})
    assert check(recipe_of("compile"), probe("cpu"))[0].technique.apply is before.apply
    assert registry()["compile"].apply is before.apply
    dict(registry())
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert "the package taker 2.0 offers a technique 'compile', which rush has itself" in said
    assert package_digests(recipe_of("compile")) == []


def test_two_packages_with_one_name_are_both_named(installed: Install) -> None:
    installed()
    installed(name="copycat", version="0.1")
    with pytest.raises(
        RecipeError, match=r"copycat 0\.1 and rush-example 1\.0 all offer .* uninstall all but one"
    ):
        check(recipe_of(NAME), probe("cpu"))


def test_a_file_with_the_name_of_an_installed_technique_is_refused(installed: Install) -> None:
    installed()
    with (
        pytest.raises(RecipeError, match=r"so does the package rush-example 1\.0; give it another name"),
        added([EXAMPLE / "rush_example" / "foreach_adamw.py"]),
    ):
        pass


def test_trials_and_ranks_know_the_version_and_the_code_of_a_package(installed: Install) -> None:
    about = installed()
    recipe = recipe_of(NAME)
    first = package_digests(recipe)
    assert first[0].startswith(f"{NAME} rush-example 1.0 ")
    assert first[0] in digests(recipe)
    assert package_digests(recipe_of("fused_adamw")) == []
    file = about.parent / "rush_example" / "foreach_adamw.py"
    file.write_text(file.read_text() + "\n# changed\n")
    second = package_digests(recipe)
    shutil.rmtree(about)
    installed(version="1.1")
    third = package_digests(recipe)
    assert len({first[0], second[0], third[0]}) == 3


def test_a_resume_without_the_package_names_it_and_another_version_is_reported(
    installed: Install, tmp_path: Path
) -> None:
    about, recipe = installed(), recipe_of(NAME)
    folder = RunFolder(tmp_path)
    remember(folder, recipe)
    assert json.loads(folder.techniques.read_text()) == {NAME: {"package": "rush-example", "version": "1.0"}}
    heard: list[str] = []
    check_remembered(folder, recipe, heard.append)
    assert heard == []
    shutil.rmtree(about)
    about = installed(version="1.1")
    check_remembered(folder, recipe, heard.append)
    assert "now comes from rush-example 1.1, and the run was started with rush-example 1.0" in heard[0]
    shutil.rmtree(about)
    _forget()
    with pytest.raises(RecipeError, match=r"with the package rush-example 1\.0\. Install it again"):
        check_remembered(folder, recipe)


def test_an_unknown_technique_says_how_to_give_a_file_or_a_package() -> None:
    with pytest.raises(
        RecipeError, match=r"give its file with --technique FILE \(the file is executed\), or install"
    ):
        check(recipe_of("nonesuch"), probe("cpu"))


def rush(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m rush` in a new process that finds the packages in this folder."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    surroundings = {**os.environ, "PYTHONPATH": path, "RUSH_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "rush", *(str(word) for word in words)]
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=240)


def short(folder: Path, **run: object) -> Path:
    file = folder / "short.toml"
    often = {"save_every": 2, "sample_every": 0, "validate_every": 0, **run}
    schedule = {"steps": 2, "warmup": 0}
    file.write_text(small_recipe(write_corpus(folder / "corpus"), schedule=schedule, run=often))
    return file


@pytest.mark.slow
def test_a_real_process_trains_with_a_technique_of_a_package(tmp_path: Path) -> None:
    install(tmp_path)
    words = ("train", short(tmp_path), f"techniques=['{NAME}']", "--out", tmp_path / "run")
    done = rush(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "run" / "techniques.json").read_text())
    assert told == {NAME: {"package": "rush-example", "version": "1.0"}}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_knows_the_technique_of_a_package_that_pip_installed(tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--target", str(tmp_path)]
    pip = [sys.executable, "-m", "pip", "install", *options, str(source)]
    made = subprocess.run(pip, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        install(tmp_path)  # no pip, or no setuptools to build with
    assert rush(tmp_path, "recipes").returncode == 0
    listed = json.loads(rush(tmp_path, "probe", "--json").stdout)["techniques"]
    assert [row["group"] for row in listed if row["name"] == NAME] == ["rush_example"]
    recipe, naming = short(tmp_path), f"techniques=['{NAME}']"
    planned = rush(tmp_path, "plan", recipe, naming, "--json")
    assert planned.returncode == 0, planned.stderr
    two = rush(tmp_path, "train", recipe, naming, "layout.ddp=2", "--nproc", "2", "--out", tmp_path / "two")
    assert two.returncode == 0, two.stderr
    ladder = tmp_path / "ladder.toml"
    ladder.write_text(
        f'recipe = "{recipe}"\nrungs = ["{NAME}"]\n[measure]\nprocesses = 2\nwindows = 3\nwindow_ms = 20\n'
    )
    climbed = rush(tmp_path, "ladder", ladder, "--out", tmp_path / "climbed", "--json")
    assert climbed.returncode == 0, climbed.stderr
    rung = json.loads(climbed.stdout)["rungs"][1]
    assert rung["status"] == "ok", rung
    assert [row["took_effect"] for row in rung["evidence"]] == [True]
    assert rung["parity"]["verdict"] == "equal"
    assert rung["life"]["verdict"] == "ok", rung["life"]
