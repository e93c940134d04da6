"""The scripts of examples/from-nothing: what they read out of packages, and what a kill leaves behind."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "from-nothing"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_every_package_has_a_licence_and_a_reader() -> None:
    from readers import READERS

    packages = tomllib.loads((EXAMPLE / "packages.toml").read_text())
    assert len(packages) > 20
    for name, entry in packages.items():
        assert entry["licence"], name
        assert entry["files"], name
        assert entry["kind"] in {*READERS, "wordnet", "descriptions"}, name


def test_a_dictionary_is_read_entry_by_entry_without_marks_and_without_what_dictd_says_of_itself(
    tmp_path: Path,
) -> None:
    from readers import read_dictionary

    entries = [
        ("00databaseinfo", "About this dictionary.\n"),
        ("Abide", 'Abide \\A*bide"\\, v. i.\n   To wait; to {stay}.\n      [1913 Webster]\n'),
        ("naïve", "naïve adj.\n   Not at all\n   crafty.\n"),
    ]
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    index, text = [], b""
    for word, said in entries:
        data = said.encode()
        places = "\t".join(digits[value // 64] + digits[value % 64] for value in (len(text), len(data)))
        index.append(f"{word}\t{places}")
        text += data
    (tmp_path / "a.dict.dz").write_bytes(gzip.compress(text))
    (tmp_path / "a.index").write_text("\n".join([*index, f"abode\t{index[1].split(chr(9), 1)[1]}"]) + "\n")
    assert list(read_dictionary(tmp_path, ["*.dict.dz"])) == [
        "Abide v. i. To wait; to stay.",
        "naïve adj. Not at all crafty.",
    ]


def test_wordnet_gives_senses_with_examples_synonyms_opposites_and_what_they_are_a_kind_of(
    tmp_path: Path,
) -> None:
    from words import describe, read_words

    # Two synsets as WordNet's own files have them, wndb(5WN): a word, its broader word, and an antonym of the first.
    (tmp_path / "data.noun").write_text(
        '00000001 05 n 02 dog 0 domestic_dog 0 002 @ 00000002 n 0000 ! 00000002 n 0101 | a tame canine; "the dog barked"\n'
        "00000002 05 n 01 canine 0 000 | an animal with fangs\n"
    )
    (tmp_path / "index.noun").write_text(
        "  1 a licence\ndog n 1 2 @ ! 1 1 00000001\ncanine n 1 0 1 0 00000002\ndomestic_dog n 1 0 1 0 00000001\n"
    )
    for kind in ("verb", "adj", "adv"):
        (tmp_path / f"data.{kind}").write_text("")
        (tmp_path / f"index.{kind}").write_text("")
    words = read_words(tmp_path)
    assert set(words) == {"dog", "canine", "domestic dog"}
    assert describe("dog", words["dog"]) == (
        'dog (noun): a tame canine. For example: "the dog barked". Synonyms: domestic dog. Opposite: canine. A kind of canine.'
    )


def test_a_killed_run_leaves_the_rows_that_no_checkpoint_holds(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "lost.jsonl"
    (run / "checkpoints" / "step-000004").mkdir(parents=True)
    trains = (
        "import json, sys, time\n"
        "file = open(sys.argv[1], 'w', buffering=1)\n"
        "for step in range(1, 1000): file.write(json.dumps({'step': step, 'loss': 1 / step}) + '\\n'); time.sleep(0.02)\n"
        "open(sys.argv[1] + '.end', 'w')\n"
    )
    command = [sys.executable, "-c", trains, str(run / "metrics.jsonl")]
    options = ["--run", str(run), "--at", "7", "--keep", str(kept), "--", *command]
    subprocess.run([sys.executable, str(EXAMPLE / "killing.py"), *options], check=True, timeout=60)
    steps = [json.loads(line)["step"] for line in kept.read_text().splitlines()]
    assert steps[0] == 5
    assert steps[-1] >= 7
    assert not (run / "metrics.jsonl.end").exists()
