from __future__ import annotations

from pathlib import Path

import pytest

from rush.errors import RecipeError
from rush.lab.ladder.climb import builds_on, worth_repeating
from rush.lab.ladder.findings import RungState
from rush.lab.ladder.ladder_file import Addition, compose, load_ladder
from rush.lab.trial.trial import Outcome
from rush.parallel import AXES
from rush.ready import LADDERS
from rush.techniques import registry


@pytest.mark.parametrize("name", LADDERS.names())
def test_every_ready_ladder_reads_and_every_rung_composes(name: str) -> None:
    plan = load_ladder(name)
    kept: list[Addition] = []
    for addition in plan.additions:
        recipe = compose(plan.base, [*kept, addition])
        assert {used for used, _ in recipe.technique_uses()} <= set(registry())
        if addition.keep:
            kept.append(addition)


def test_the_ready_ladders_are_there_and_tiny_has_eight_rungs() -> None:
    assert {"tiny", "gpt2-124m", "llama-3.2-1b", "llama-3.1-8b"} <= set(LADDERS.names())
    assert len(load_ladder("tiny").additions) >= 8


PAGES = Path(__file__).resolve().parents[2] / "docs" / "techniques"
SEVERAL_RANKS = set(AXES)
FINE_TUNING = {"bucket", "flatten", "int8_base", "lora", "pack_best_fit", "pack_concat", "pad", "qlora"}

UNSEEN = {"expandable_segments"}
"""It closes gaps between tensors; a ladder tells what tensors take and how fast they are made, and neither changes."""
ON_CPU = {"cpu_attention", "fp16_matmul"}
RACED = {"muon"}
"""It changes what is learned, and makes steps slower: only a race says what it gains."""


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2-124m"])
def test_the_two_large_ladders_of_a_model_try_every_technique_of_pretraining(name: str) -> None:
    plans = [load_ladder(name), load_ladder(f"{name}-kernels")]
    started = {used for plan in plans for used, _ in plan.base.technique_uses()}
    tried = {addition.technique_name for plan in plans for addition in plan.additions}
    # A new technique may be tried before it is in a ladder; with its page it is part of the book.
    described = {page.stem for page in PAGES.glob("*.md")} - {"README"}
    assert described - tried - started == FINE_TUNING | SEVERAL_RANKS | UNSEEN | ON_CPU | RACED


def test_the_ladders_of_fine_tuning_try_what_is_for_fine_tuning() -> None:
    plans = [load_ladder(name) for name in ("sft-tiny", "sft", "sft-8b")]
    assert {addition.technique_name for plan in plans for addition in plan.additions} >= FINE_TUNING
    way = ["pad", "bucket", "pack_best_fit", "flatten", "compile", "fused_loss", "lora", "qlora"]
    for plan in plans[1:]:
        assert [a.technique_name for a in plan.additions][: len(way)] == way


def test_what_a_later_rung_takes_the_place_of_is_not_at_the_top(tmp_path: Path) -> None:
    rungs = """["flash_attention", {"batch.micro" = 4}, {name = "compile", scope = "block"}, "compile",
        {name = "cudnn_attention", replaces = ["flash_attention"]}, {"batch.micro" = 8, "batch.sequence" = 64}]"""
    flash, four, block, whole, cudnn, eight = load_ladder(_ladder(tmp_path, f"rungs = {rungs}")).additions
    assert cudnn.supersedes(flash)
    assert whole.supersedes(block)
    assert eight.supersedes(four)
    assert not four.supersedes(eight)
    assert not cudnn.supersedes(four)
    assert not eight.supersedes(flash)


def _state(speed: float, over: RungState | None = None, parity: str = "equal") -> RungState:
    timing = {"step_tokens": speed, "samples_s": [1.0], "peak_memory_bytes": 1}
    outcome = Outcome("ok", None, {"timing": timing})
    return RungState(None, "thing", "thing", None, [outcome], parity={"verdict": parity}, over=over)


def _tried(ratio: float, parity: str, keep: bool | str) -> bool:
    addition = Addition("thing", "thing", "thing", {}, keep=keep)  # type: ignore[arg-type]
    return builds_on(addition, _state(ratio, parity=parity), _state(1.0))


def test_what_is_clear_after_one_process_is_not_measured_again() -> None:
    base = _state(100.0)
    doubled = _state(200.0, base)
    near = _state(190.0, doubled)
    halved = _state(95.0, near)
    lost = RungState(None, "lost", "lost", None, [Outcome("crashed", "why", {})], over=near)
    states = [base, doubled, near, halved, lost]
    assert worth_repeating(states, None) == [base, doubled, near, halved]
    assert worth_repeating(states, 0.15) == [
        base,
        doubled,
        near,
    ]  # the ground of what is near must be known as well
    assert worth_repeating(states, 0.01) == [base]


def test_a_rung_is_built_upon_if_it_is_to_be_or_if_it_pays_and_learns_the_same() -> None:
    assert _tried(0.5, "equal", True)
    assert not _tried(2.0, "equal", False)
    assert _tried(1.01, "equal", "faster")
    assert not _tried(0.99, "equal", "faster")
    assert not _tried(1.5, "different", "faster")


def test_overrides_reach_the_base_recipe_and_the_ladders_own_tables() -> None:
    plan = load_ladder("tiny", ["batch.micro=4", "measure.processes=7", "parity.steps=2"])
    assert plan.base.batch.micro == 4
    assert plan.base.batch.total_tokens is None
    assert plan.measure.processes == 7
    assert plan.parity.steps == 2


def _ladder(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ladder.toml"
    path.write_text('recipe = "tiny"\n' + text)
    return str(path)


def test_a_rung_may_have_knobs_changes_a_title_and_replace_another(tmp_path: Path) -> None:
    rung = '{name = "pure_bf16", "batch.micro" = 8, title = "bf16", replaces = ["amp_bf16"], keep = false}'
    plan = load_ladder(
        _ladder(tmp_path, f'rungs = ["amp_bf16", {rung}]\n[base]\n"batch.total_tokens" = "none"')
    )
    first, second = plan.additions
    assert (second.title, second.keep) == ("bf16", False)
    recipe = compose(plan.base, [first, second])
    assert recipe.techniques == ["pure_bf16"]
    assert recipe.batch.micro == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rungs = [3]", "a technique's name, or a table"),
        ('rungs = [{scope = "block"}]', "names no technique"),
        ('rungs = ["compile", "compile"]', "twice"),
        ("rungs = []\n[measur]\nwindows = 3", "measure"),
        ("rungs = []\n[measure]\nwindow = 3", "measure.windows"),
        ("rungs = []\n[measure]\nwindows = 0", "measure.windows is 0"),
        ('rungs = [{name = "tf32", keep = "often"}]', 'true, false or "faster"'),
        ("rungs = [\n", "not valid TOML"),
        ("about = 'x'", "list of rungs"),
    ],
)
def test_a_wrong_ladder_is_refused_with_a_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words.replace(".", r"\.")):
        load_ladder(_ladder(tmp_path, text))


def test_an_unknown_ladder_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'tiny'"):
        load_ladder("tinny")


def test_rungs_and_the_whole_climb_may_have_a_claim_with_what_it_is_relative_to(tmp_path: Path) -> None:
    told = 'gain = 0.5, regime = "here", source = "me"'
    plan = load_ladder(_ladder(tmp_path, f'rungs = [{{"batch.micro" = 4, claim = {{ {told} }} }}]\n[claim]\ngain = 9.0\nregime = "there"\nsource = "they"'))  # fmt: skip
    assert plan.additions[0].claim is not None
    assert (plan.additions[0].claim["gain"], plan.additions[0].claim["relative_to"]) == (
        0.5,
        "the rung before",
    )
    assert plan.claim is not None
    assert (plan.claim["gain"], plan.claim["relative_to"]) == (9.0, "the base")
    assert load_ladder(_ladder(tmp_path, 'rungs = ["tf32"]')).claim is None
    with pytest.raises(RecipeError, match=r"claim\.gain is not a|claim\.gian"):
        load_ladder(_ladder(tmp_path, 'rungs = [{"batch.micro" = 4, claim = { gian = 1.0, gain = 1.0, regime = "", source = "" } }]'))  # fmt: skip


@pytest.mark.parametrize("name", ["gpu", "tiny"])
def test_the_first_ladders_have_a_claim_for_their_batch(name: str) -> None:
    batch = [addition for addition in load_ladder(name).additions if "batch.micro" in addition.changes]
    assert [addition.claim is not None for addition in batch] == [True]
