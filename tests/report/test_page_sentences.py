"""Every sentence of the pages of scale, tune, models, kernels and plans, with data that would make it false."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rush.cli import main
from rush.cli.bench import model_row, verdict_of
from rush.cli.tune import summary
from rush.records.models import verdicts_of
from rush.records.parity import parity_again, parity_verdict
from rush.records.scaling import read_scale
from rush.records.targets import target_word
from rush.records.tune import read_tune, write_tune
from rush.report import plan, scaling_words, tune
from rush.report.kernels import kernel_page, reached_of
from rush.report.models import longest_words, model_page, verdict_words
from rush.report.notebook import tune_html
from rush.report.scaling import scale_page
from tests.report import made_up_benches, made_up_scale

RESULTS = Path(__file__).parents[2] / "results"


def _said(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


# Scale


def _study(*points: dict[str, Any], **more: Any) -> Any:
    return {**made_up_scale.scale(), "points": list(points), **more}


def _point(layout: str, devices: int, rate: float | None, verdict: str = "equal", **more: Any) -> Any:
    return {**made_up_scale.point(layout, devices, rate, verdict), **more}


SHARED = {"shared": True, "efficiency": {}, "tokens_per_s": None}
ONE = _point("one device", 1, 1000.0, "baseline")
DIFFERENT = _point("tp", 4, 3000.0, "different")


@pytest.mark.parametrize(
    ("points", "says", "never"),
    [
        ([ONE, _point("ddp", 4, 3600.0), _point("zero3", 4, 2000.0)], "ddp is the fastest that learns the same", "only"),
        ([ONE, _point("ddp", 4, 3600.0)], "ddp is the only layout measured that learns the same", "fastest"),
        # A layout that learns something else is not the fastest, however fast.
        ([ONE, _point("ddp", 4, 2000.0), DIFFERENT], "ddp is the only", "tp"),
        ([ONE, _point("ddp", 4, 3600.0)], ", ×3.60 of one device.", "cannot be told"),
        ([ONE, _point("ddp", 4, 900.0)], ", ×0.9 of one device.", "no faster"),
        ([ONE, _point("ddp", 4, 1000.0)], "×1.00 of one device, which cannot be told from none.", "no faster"),
        # As found: "no layout has been measured that learns the same" above a table of equal ones.
        ([ONE, _point("ddp", 2, None, "shared device", **SHARED), _point("zero3", 2, None, "shared device", **SHARED)],
         "ddp and zero3 on 2 ranks learn what one rank learns; the ranks shared a device", "No layout"),
        ([ONE, _point("ddp", 2, None, "shared device", **SHARED)], "ddp on 2 ranks learns what one rank learns", "No layout"),
        ([ONE, _point("ddp", 1, 900.0)], "ddp as a group of one makes 90.0 % of one device", "on 2 ranks"),
        ([ONE, DIFFERENT], "No layout on several devices has been measured that learns", "tp"),
        ([ONE], "No layout on several devices", "group of one"),
    ],
)  # fmt: skip
def test_the_headline_of_a_study_follows_from_its_points(points: list[Any], says: str, never: str) -> None:
    said = _said(scaling_words.headline(_study(*points)))
    assert says in said
    assert never not in said


def test_the_recipe_of_a_study_is_of_the_fastest_layout_that_learns_the_same() -> None:
    best = scaling_words.best_point(
        _study(ONE, _point("ddp", 4, 2000.0), _point("zero3", 4, 1500.0), DIFFERENT)
    )
    assert best is not None
    assert best["layout"] == "ddp"
    assert scaling_words.best_point(_study(ONE, DIFFERENT)) is None


def test_the_committed_study_says_what_its_table_shows() -> None:
    said = scaling_words.headline(read_scale(RESULTS / "scale-h200"))
    assert said.startswith("ddp and zero3 on 2 ranks learn what one rank learns")


@pytest.mark.parametrize(
    ("interval", "tail"), [([1.1, 1.3], ""), ([0.98, 1.02], ", no difference"), ([0.8, 1.5], ", cannot tell")]
)
def test_two_points_differ_only_where_their_interval_says_so(interval: list[float], tail: str) -> None:
    said = scaling_words.pair_words({"ratio": 1.0, "ci95": interval})
    assert said.endswith(f"{interval[1]:.2f}){tail}")
    assert scaling_words.pair_words(None) == "–"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"drift": {"flagged": True, "ratio": 0.9, "restless": True}}, "had moved by −10 %"),
        ({"drift": {"flagged": False, "restless": True}}, "too busy to tell"),
        ({"drift": {"flagged": False, "restless": True, "uneven": True}}, "share too few of them"),
        ({"machine": {"device": "cpu"}, "threads_per_rank": 1}, "ran on a CPU, 1 core each"),
    ],
)
def test_the_warnings_of_a_study_are_there_only_where_they_are_true(more: dict[str, Any], says: str) -> None:
    quiet: dict[str, Any] = {"drift": None, "machine": {"device": "cuda"}, "threads_per_rank": None}
    assert scaling_words.warnings(_study(ONE, **quiet)) == []
    assert says in _said(" ".join(scaling_words.warnings(_study(ONE, **{**quiet, **more}))))


def test_a_study_took_its_trials_and_not_the_days_between_them() -> None:
    times = {"started": "2026-01-01T00:00:00", "finished": "2026-01-03T00:00:00"}
    assert _said(scaling_words.took(_study(ONE, **times, trials_s=90.0))) == "its trials took 90.0 s"
    assert _said(scaling_words.took(_study(ONE, **times))) == "took 48 h 0 min"
    short = {**times, "finished": "2026-01-01T00:00:01"}
    assert "in several sessions" in scaling_words.took(_study(ONE, **short))


def test_a_verdict_is_explained_only_where_it_occurs() -> None:
    assert "More ranks than devices" not in scale_page(_study(ONE))
    assert "More ranks than devices" in scale_page(
        _study(ONE, _point("ddp", 2, None, "shared device", **SHARED))
    )


# Tune


def _winner(**more: Any) -> dict[str, Any]:
    return {
        "as_it_stood": False, "gain": {"ratio": 1.3, "ci95": [1.2, 1.4]}, "parity": {"verdict": "equal", "steps": 5}, "what": "x",
        "peak_memory_bytes": 2**30, "memory_ratio": 0.8, **more,
    }  # fmt: skip


def _search(objective: str = "tokens/s", **more: Any) -> Any:
    return {"objective": objective, "winner": _winner(**more), "candidates": []}


@pytest.mark.parametrize(
    ("record", "says", "never"),
    [
        (_search(), "×1.30 (1.20 to 1.40) the speed of the unchanged recipe", "cannot"),
        (_search(gain={"ratio": 1.1, "ci95": [0.9, 1.4]}), "Whether it is faster than the unchanged recipe cannot be told", "×1.30"),
        (_search(gain={"ratio": 1.0, "ci95": [0.99, 1.01]}), "No faster than the unchanged recipe", "Slower"),
        (_search(gain={"ratio": 0.8, "ci95": [0.7, 0.9]}), "Slower than the unchanged recipe", "No faster"),
        (_search(gain=None), "was not measured", "×"),
        (_search(as_it_stood=True), "Nothing that was tried is better and proved", "×"),
        (_search("memory"), "−20 % peak memory", "speed"),
        (_search(sequence=4096), "tokens fit", "speed"),
        (_search(), "learns the same as plain fp32", "does not"),
        # As found: "learns the same as plain fp32: different".
        (_search(parity={"verdict": "different"}), "does not learn the same as plain fp32", "; learns the same"),
        (_search(parity={"verdict": "not judged"}), "is not judged", "; learns the same"),
        (_search(parity=None), "not compared with plain fp32", "learns"),
        (_search(life={"verdict": "broken"}), "short life broken", "short life ok"),
        ({"winner": None}, "The search is not over.", "×"),
    ],
)  # fmt: skip
def test_the_headline_of_a_search_follows_from_its_winner(record: Any, says: str, never: str) -> None:
    said = _said(tune.headline(record))
    assert says in said
    assert never not in said


@pytest.mark.parametrize(
    ("interval", "said"),
    [([1.1, 1.3], ""), ([0.99, 1.01], "no faster"), ([0.9, 1.4], "cannot be told from none")],
)
def test_the_terminal_says_of_a_search_what_the_interval_says(interval: list[float], said: str) -> None:
    gain = {"ratio": 1.2, "ci95": interval}
    told = summary(_search(gain=gain, beside=[{"name": "by hand", "gain": gain}]))
    assert said in told
    assert ("no difference" in told) == (said == "no faster")
    assert (", cannot tell." in told) == (said == "cannot be told from none")


@pytest.mark.parametrize(
    ("interval", "tail"),
    [([1.1, 1.3], ")"), ([0.99, 1.01], ", no difference"), ([0.9, 1.4], ", cannot tell")],
)
def test_the_winner_beats_a_recipe_made_by_hand_only_where_the_interval_says_so(
    interval: list[float], tail: str
) -> None:
    assert tune.beside_words({"ratio": 1.2, "ci95": interval}).endswith(tail)
    assert tune.beside_words(None) == "–"


STEPS = 40
FALLING = [10.0 - 0.1 * step for step in range(STEPS)]
BEHIND = [loss + 0.05 * step for step, loss in enumerate(FALLING)]
"""As found in a record of 200 steps: equal by the rule of its time, a tenth of the decrease behind."""


def _parity(losses: list[float] = FALLING, **more: Any) -> dict[str, Any]:
    """As recorded by an earlier rule: equal, whatever the curve."""
    return {
        "verdict": "equal", "class": "STATISTICAL", "steps": len(losses), "why": "within the tolerance", "worst": 0.01, "tolerance": 0.1,
        "losses": losses, "reference_losses": FALLING, "twin_losses": FALLING, "measured": "statistical", **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parity", "verdict", "why"),
    [
        (_parity(), "equal", "within the tolerance"),
        (_parity(BEHIND), "different", "the loss went to"),
        (_parity(BEHIND, twin_losses=[]), "not judged", "no perturbed reference run"),
        (_parity(BEHIND, twin_losses=BEHIND), "not judged", "too unsteady to judge"),
        (_parity([*FALLING[:-1], None]), "different", "non-finite"),
        (_parity([], reference_losses=[]), "not judged", "no two loss curves"),
        (_parity(FALLING[:5]), "not judged", "no two loss curves"),
        (_parity(worst=0.2), "different", "the worst difference is 2.0e-01"),
        (_parity(differences=[{"kind": "cached results", "detail": "of step 3", "late": True}]), "different", "cached results: of step 3"),
        (_parity(timed={"verdict": "different", "why": "the loss jumps"}), "different", "over the timed steps the loss jumps"),
        (_parity(**{"class": "EXACT"}), "equal", "within"),
        (_parity([*FALLING[:-1], 6.1000001], **{"class": "EXACT"}), "different", "bit for bit"),
        (_parity([*FALLING[:-1], 6.1000001], measured="same bits"), "different", "bit for bit"),
        (_parity(grad_norms=[1.0], reference_grad_norms=[1.1], measured="same bits"), "different", "bit for bit"),
        (_parity([10.0, 9.0], reference_losses=[10.0, 9.05], twin_losses=[10.0, 9.05]), "equal", "within"),
        (_parity([10.0, 9.0], reference_losses=[10.0, 9.5], twin_losses=[10.0, 9.5], **{"class": "CLOSE"}), "different", "of rounding"),
        (_parity(BEHIND, verdict="not judged"), "not judged", "within the tolerance"),
        ({"verdict": "equal"}, "equal", ""),
        (_parity([0.0] * STEPS, reference_losses=[0.0] * STEPS), "equal", ""),
        (_parity([10**400] * STEPS), "different", "non-finite"),
    ],
)  # fmt: skip
def test_equal_is_read_again_from_what_the_record_holds(
    parity: dict[str, Any], verdict: str, why: str
) -> None:
    again = parity_again(parity)
    assert again is not None
    assert (again["verdict"], parity_verdict(parity)) == (verdict, verdict)
    assert why in again.get("why", "")
    assert ("recorded as equal" in again.get("why", "")) == (verdict != parity["verdict"])


def _recorded(**winner: Any) -> Any:
    """A whole record of a search that two recipes were tried in."""
    row = {
        "key": "a", "state": "won", "reason": "1.30× of the original recipe", "round": 3, "recipe": "x = 1", "techniques": [],
        "tokens_per_s": {"median": 1300.0, "ci95": [1200.0, 1400.0], "n": 1, "samples": [1300.0], "processes": [[1300.0]]},
        "peak_memory_bytes": 2**30, "ratio": 1.3, "expected": None, "evidence": [], "at_s": 0.0,
    }  # fmt: skip
    won = _winner(key="a", tokens_per_s=1300.0, life=None, **winner)
    base = {**row, "key": "unchanged", "state": "start", "reason": "", "parity": None}
    return {
        "name": "small", "objective": "tokens/s", "started": "2026-01-01T00:00:00", "finished": "2026-01-01T00:10:00", "machine": {},
        "budget_s": 60.0, "spent_s": 50.0, "settings": {"tokens": 64}, "allowed": ["close"], "counted": "processed", "base": {},
        "events": [{"candidate": "a", "kind": "rank", "began_s": 1.0, "wall_s": 2.0, "status": "ok"}],
        "candidates": [base, {**row, "parity": won["parity"]}], "winner": won,
    }  # fmt: skip


def test_a_winner_that_was_equal_once_and_is_not_by_the_rule_of_now_gains_nothing_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for parity, says in (
        (_parity(BEHIND), "does not learn the same"),
        (_parity(BEHIND, twin_losses=[]), "is not judged"),
    ):
        record = _recorded(parity=parity)
        folder = tmp_path / says
        folder.mkdir()
        write_tune(folder / "tune.json", {"format": 1, **record})
        with pytest.raises(SystemExit, match="0"):
            main(["report", str(folder)])
        page = _said((folder / "report.html").read_text())
        assert "No gain is proved." in page
        assert says in page
        for told in (page, summary(record), tune_html(record)):
            assert "the speed of the" not in told
            assert "×1.30 (" not in told
            assert "1.30× (" not in told
        assert "of the winner, which is not proved" in page
        assert "recorded as equal" in page
        capsys.readouterr()


def test_a_proved_winner_is_announced_by_page_terminal_and_notebook() -> None:
    record = _recorded(parity=_parity())
    assert "×1.30 (1.20 to 1.40) the speed of the unchanged recipe; learns the same" in _said(
        tune.tune_page(record)
    )
    assert "1.30× (1.20 to 1.40) the speed of the original recipe, 1.00 GiB" in summary(record)
    assert "1.30× (1.20 to 1.40) the speed of the original recipe<" in tune_html(record)
    assert "not proved" not in tune.tune_page(record)


def test_a_winner_within_the_noise_is_no_faster_in_any_row() -> None:
    record = _recorded(parity=_parity(), gain={"ratio": 1.02, "ci95": [0.97, 1.12]})
    assert "1.30× of the original recipe" not in tune.tune_page(record)
    assert "which cannot be told from none" in tune.tune_page(record)


def test_a_committed_search_that_lost_its_warm_up_is_no_gain_by_the_rule_of_now() -> None:
    """bf16 weights with round-to-nearest: recorded as equal over 200 steps, before its quarters were compared."""
    record = read_tune(RESULTS / "tune-llama-3.2-1b-nearest-h200")
    assert record["winner"] is not None
    assert record["winner"]["parity"]["verdict"] == "equal", "the record stays as it was written"
    said = tune.tune_page(record)
    assert "the speed of the unchanged recipe" not in said
    assert "in the first quarter of the steps" in said


@pytest.mark.parametrize(
    ("ratio", "says"),
    [(0.8, "−20 % peak memory"), (0.995, "No less peak memory"), (1.2, "No less peak memory")],
)
def test_memory_is_saved_only_where_there_is_less_of_it(ratio: float, says: str) -> None:
    assert _said(tune.headline(_search("memory", memory_ratio=ratio))).startswith(says)


def test_what_changes_by_design_is_not_said_to_learn_the_same() -> None:
    said = _said(tune.headline(_search(parity={"verdict": "not judged", "class": "CHANGES"})))
    assert said == "×1.30 (1.20 to 1.40) the speed of the unchanged recipe; what it learns differs by design."


# Models and kernels


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ({"verdict": "reached", "at_least": 1.2, "ci95": [1.21, 1.3], "why": None}, "reached"),
        ({"verdict": "reached", "at_least": 1.2, "ci95": [1.19, 1.3], "why": None}, "close call"),
        ({"verdict": "reached", "at_most": 0.9, "ci95": [0.8, 0.95]}, "close call"),
        ({"verdict": "reached", "at_most": 0.9, "ci95": [0.8, 0.85]}, "reached"),
        ({"verdict": "reached", "at_least": 0.85, "at_most": None, "ci95": None, "why": None}, "reached"),
        (
            {"verdict": "missed", "at_least": 1.2, "ci95": [1.0, 1.3], "why": "1.1× is less than 1.2×"},
            "missed",
        ),
        ({"verdict": "not measured", "at_least": 1.2, "ci95": None, "why": "gone"}, "not measured"),
    ],
)
def test_a_target_is_a_close_call_where_the_record_or_its_interval_says_so(
    target: dict[str, Any], word: str
) -> None:
    assert target_word(target) == word
    assert verdict_words({**target, "memory": {"verdict": "missed"}}) == f"{word}; memory missed"
    assert verdict_of({**target, "why": target.get("why")}).startswith(word)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reached", "missed"], "1 of 2 targets reached"),
        (["reached", "close call"], "1 of 2 targets reached, 1 close call"),
        (["close call"] * 2 + ["not measured"], "0 of 3 targets reached, 2 close calls, 1 not measured"),
        (["reached"], "1 of 1 target reached"),
    ],
)
def test_a_close_call_is_not_counted_as_reached(words: list[str], said: str) -> None:
    assert reached_of(words) == said


def test_pages_and_terminal_say_close_call_of_models_and_kernels() -> None:
    models: Any = made_up_benches.models()
    assert "close call" not in model_page(models)
    target = models["workloads"][0]["ours"][0]["target"]
    target |= {"ci95": [target["at_least"] - 0.01, target["ci95"][1]]}
    assert "close call" in model_page(models)
    assert verdicts_of(models)[0] == "close call"
    assert model_row(models["workloads"][0]["ours"][0]["rung"], dict(target))[-1] == "close call"
    kernels: Any = made_up_benches.kernels()
    before = kernel_page(kernels).count('class="badge caution"')
    kernels["ops"][0]["targets"][0] |= {"ci95": [0.9, 1.3]}
    page = kernel_page(kernels)
    assert page.count('class="badge caution"') == before + 1
    assert "1 close call" in page


@pytest.mark.parametrize(
    ("more", "says", "never"),
    [
        ({}, "4,096 tokens ran in 80 GB; the next was not tried", "did not fit"),
        ({"fails_at": 8192}, "8,192 did not fit", "not tried"),
        ({"found": None}, "No length that was tried ran in 80 GB", "tokens ran"),
        ({"parity": {"verdict": "different"}}, "parity different", "parity equal"),
        ({"evidence": [{"technique": "compile", "took_effect": False}]}, "no trace of compile", "parity"),
        ({"evidence": [{"technique": "compile", "took_effect": True}]}, "4,096 tokens", "no trace"),
    ],
)
def test_the_longest_sequence_is_told_with_where_it_ended(
    more: dict[str, Any], says: str, never: str
) -> None:
    found = {"sequence": 4096, "tokens_per_s": None}
    said = longest_words({"limit_bytes": 80 * 10**9, "found": found, "fails_at": None, **more})  # type: ignore[typeddict-item]
    assert says in said
    assert never not in said


# Plans


def _plan(**more: Any) -> dict[str, Any]:
    return {
        "title": "A plan", "fits": True, "tight": False, "expected_error": {"memory": 0.05, "time": 0.1},
        "memory_bytes": {"parameters": 2**30, "logits": 2**30, "total": 2**31, "tensors": 2**31}, "phases_bytes": {"step": 2**31},
        "fullest_phase": "step", "fullest_moment": "loss", "time_s": {"matmul": 0.5, "bubble": 0.1, "step": 0.6},
        "machine": {"name": "m", "devices": 1, "memory_bytes": 2**33, "how": "datasheet", "sources": []}, "problems": [],
        "batch": {"step_tokens": 4096}, "tokens_per_s_per_device": 1000.0, "mfu": None, "largest_micro": 0, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "fits"),
        ({"tight": True}, "tight: it fits by less than the expected error of 5 %"),
        ({"fits": False}, "does not fit"),
        ({"fits": False, "tight": True}, "does not fit"),
    ],
)
def test_a_plan_that_fits_by_less_than_the_error_is_tight(more: dict[str, Any], said: str) -> None:
    assert plan.verdict(_plan(**more)) == said
    assert f": {said}." in plan.plan_page("p", [_plan(**more)], [])


def test_a_plan_counts_the_fullest_phase_and_says_which() -> None:
    assert "takes most in another phase" not in plan.plan_page("p", [_plan()], [])
    page = _said(plan.plan_page("p", [_plan(phases_bytes={"save": 2**32}, fullest_phase="save")], []))
    assert "A run takes most in another phase: save, 4.00 GiB." in page
    assert "4.00 GiB of 8.00 GiB" in page


def test_a_part_has_one_color_in_every_plan_and_stands_in_the_legend_with_it() -> None:
    """As found: colors went by the place of a part, so they changed from plan to plan, and no legend said which was which."""
    fewer = _plan(memory_bytes={"logits": 2**30, "total": 2**30, "tensors": 2**30})
    for one in (_plan(), fewer):
        page = plan.plan_page("p", [one], [])
        assert page.count('class="part loss"') == 2, "the bar and the legend"
    for kinds in (("parameters", "gradients", "optimizer", "activations", "logits", "working", "unfilled", "context"),
                  ("matmul", "attention", "elementwise", "loss", "communication", "bubble", "optimizer", "data", "other")):  # fmt: skip
        assert len({plan.kind_of(kind) for kind in kinds}) == len(kinds)
