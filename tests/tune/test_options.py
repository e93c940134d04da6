"""What is tried next: likely before dear, small gains together, and nothing set back by a bad day. On a CPU of the catalogue."""

from __future__ import annotations

import pytest

from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.techniques import registry
from rush.tune.finals import decide
from rush.tune.goal import Goal, TrialLimit, TuneResult
from rush.tune.options import MoveOption, TrialTurn
from rush.tune.outlook import PAYS
from rush.tune.search import Search
from tests.tune.simulated import Table, search_for

SMALL = {"fused_adamw": 1.007, "loader_workers": 1.008, "gc_control": 1.006}
"""Each is within the noise; together they are not."""


def tiny(table: Table | None = None, **options: object) -> Search:
    table = table or Table({}, {8: 1.0}, noise=0.0005)
    return search_for(load_recipe("tiny"), table, machine="cpu", **options)  # type: ignore[arg-type]


def options_of(search: Search) -> dict[str, MoveOption]:
    return {option.move.key: option for option in search.options.over(search.start, 0.0)}


class Exact(Table):
    """Says how fast it is to the digit, so that what is a little ahead is ahead, and takes its limits seriously."""

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        self.limits = {**getattr(self, "limits", {}), recipe.digest: limit}
        found = super().trial(kind, recipe, limit)
        ended = found.speed < limit.slowest
        return TuneResult(
            "ok", None, [self.speed(recipe) * wobble for wobble in (0.996, 1.0, 1.004)], 2**30,
            300.0 if ended else found.wall_s, found.evidence, found.parity, {"hopeless": ended},
        )  # fmt: skip


def test_small_gains_are_tried_together_once_and_win() -> None:
    search = tiny(Exact({"flash_attention": 1.15, "compile": 0.8, **SMALL}, {8: 1.0, 16: 0.9, 4: 0.9}))
    search.climb()
    common = [c for c in search.candidates if c.key.startswith("together")]
    assert [c.key for c in common] == ["together: loader_workers + fused_adamw + gc_control"]
    assert common[0].expected == pytest.approx(1.007 * 1.008 * 1.006)
    singles = [c for c in search.candidates if c.key in SMALL]
    assert {c.state for c in singles} == {"lost"}, "each alone is within chance"
    assert search.candidates.index(common[0]) > max(map(search.candidates.index, singles))
    winner = decide(search)
    assert {name for name, _ in winner.known_recipe.technique_uses()} == {"flash_attention", *SMALL}


def test_time_is_set_aside_for_small_gains() -> None:
    factors = {"flash_attention": 1.15, "compile": 0.8, "fused_adamw": 1.007, "loader_workers": 1.008}
    search = tiny(Exact(factors, {8: 1.0, 16: 0.9, 4: 0.9}), budget_s=280.0)
    search.climb()
    assert any(c.key.startswith("together") and c.state == "ahead" for c in search.candidates)
    assert any(c.state == "not tried" for c in search.candidates), "time was short"
    decide(search)
    assert search.budget.spent_s <= 280


def test_what_only_saves_memory_is_tried_last_unless_memory_is_the_goal() -> None:
    found = list(options_of(tiny()).values())
    last = [option.move.key for option in found if option.turn is TrialTurn.LAST]
    assert "adam8bit" in last
    assert found[-len(last) :] == [option for option in found if option.turn is TrialTurn.LAST]
    assert all(option.expected < PAYS for option in found if option.turn is TrialTurn.LAST)
    assert not any(o.turn is TrialTurn.LAST for o in options_of(tiny(goal=Goal("memory"))).values())


def test_claims_of_memory_are_distinguished_from_claims_of_traffic() -> None:
    about = {name for name, technique in registry().items() if technique.claim.of_memory}
    assert about >= {"adam8bit", "chunked_loss", "fused_loss", "pure_bf16", "offload_activations"}
    assert not about & {"fused_update", "fused_rope", "flash_attention", "compile", "checkpoint_full"}


def test_of_two_that_promise_alike_the_one_that_compiles_comes_later_where_time_is_short() -> None:
    known = {"fused_adamw": 1.3, "compile(scope=block)": 1.3}
    for budget_s, first in ((200.0, "fused_adamw"), (20_000.0, "compile(scope=block)")):
        search = tiny(budget_s=budget_s, known=known)
        search.begin()
        keys = [option.move.key for option in search.options.over(search.start, 0.0)]
        assert keys[0] == first


def test_an_optimizer_that_compiles_is_known_by_what_it_declares() -> None:
    takes = {key: tiny().budget.expected_s(frozenset({key} if compiles else ())) for key, compiles in
             (("adam8bit", registry()["adam8bit"].compiles({"backend": "torchao"})),
              ("adam8bit(backend=rush)", registry()["adam8bit"].compiles({"backend": "rush"})))}  # fmt: skip
    assert takes["adam8bit"] > 30 > takes["adam8bit(backend=rush)"]


def test_a_gain_remembered_brings_forward_and_a_loss_sets_nothing_back() -> None:
    alone = options_of(tiny())
    busy = options_of(tiny(known={"flash_attention": 0.6, "fused_adamw": 1.3, "micro 16": 0.5}))
    assert busy["flash_attention"].expected == alone["flash_attention"].expected > 1
    assert busy["micro 16"].expected == alone["micro 16"].expected
    assert list(busy)[:2] == ["fused_adamw", "flash_attention"]
    assert next(iter(alone)) == "flash_attention"


def test_moves_that_lost_before_are_not_part_of_a_jump() -> None:
    search = tiny(known={"flash_attention": 0.6})
    assert "flash_attention" not in {
        n for n, _ in search.outlook.planned(search.start, search.rules).technique_uses()
    }


@pytest.mark.timeout(60)
def test_remembered_gains_that_contradict_each_other_lead_to_an_end() -> None:
    """Larger and smaller micro batches were both found to pay, at different hours: on paper that was a way without end."""
    search = tiny(known={"micro 16": 1.2, "micro 8": 1.2, "micro 4": 1.2, "flash_attention": 1.3})
    planned = search.outlook.planned(search.start, search.rules)
    assert "flash_attention" in dict(planned.technique_uses())


def test_what_the_planner_and_the_past_call_hopeless_is_pruned() -> None:
    search = tiny(known={"checkpoint_full": 0.7})
    assert "checkpoint_full" not in options_of(search)
    assert next(c.reason for c in search.candidates if c.key == "checkpoint_full").startswith("predicted 0.")


def test_a_trial_that_is_plainly_slower_ends_early_and_teaches_nothing_about_time() -> None:
    table = Exact({"flash_attention": 1.15, "compile": 0.95, "fused_adamw": 0.3}, {8: 1.0})
    search = tiny(table)
    search.climb()
    slow = next(c for c in search.candidates if c.key == "fused_adamw")
    assert slow.reason == "slower, ended early: 0.30×"
    assert search.budget.expected_s(frozenset()) == 10.0, "300 s are no usual time"
    first, lead = search.base.known_recipe, search.lead
    assert table.limits[first.digest].slowest == 0, "nothing to compare with"
    assert table.limits[slow.known_recipe.digest].slowest == pytest.approx(lead.results["rank"].speed / 2)


def test_for_memory_what_is_slow_enough_to_lose_is_measured_by_the_speed_to_keep() -> None:
    lead, start = TuneResult("ok", None, [300.0]), TuneResult("ok", None, [100.0])
    assert Goal("tokens/s").slowest(lead, start) == 150
    assert Goal("memory", 0.8).slowest(lead, start) == 40
