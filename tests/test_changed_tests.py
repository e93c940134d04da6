"""`make test-changed` picks the tests of what changed."""

from __future__ import annotations

from pathlib import Path

from scripts.changed_tests import ROOT, concerned, imported

TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").glob("**/test_*.py"))


def picked(*changed: str) -> set[str]:
    return {str(path) for path in concerned({Path(one) for one in changed}, TESTS)}


def test_a_module_is_tested_by_its_mirror_and_by_whoever_imports_it() -> None:
    assert {"tests/lab/test_statistics.py", "tests/lab/test_paired.py"} <= picked("rush/lab/statistics.py")
    assert "tests/plan/test_time.py" in picked("rush/plan/time.py")


def test_a_helper_of_tests_concerns_those_that_import_it_and_a_test_itself() -> None:
    users = {str(test) for test in TESTS if "tests.techniques.tiny_runs" in imported(ROOT / test)}
    assert len(users) > 5
    assert users <= picked("tests/techniques/tiny_runs.py")
    assert picked("tests/plan/test_time.py") == {"tests/plan/test_time.py"}


def test_a_page_of_docs_concerns_no_test() -> None:
    assert picked("docs/plan.md") == set()
