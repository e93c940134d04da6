"""The end of a search: candidates near the lead are timed longer, and the best one is proved.

A winner has parity with plain fp32, every technique took effect, it passed a short life, and it is better than the unchanged
recipe. Otherwise the next candidate is tried; techniques without effect, or that broke the life, are removed and the rest is
tried in its place. If no candidate is left, the recipe stays unchanged.
"""

from __future__ import annotations

from rush.records.life import broken
from rush.tune.candidates import Candidate
from rush.tune.goal import gain
from rush.tune.search import Search

NEAR = 0.98
"""Candidates with this fraction of the lead's score are timed longer."""
FINALISTS = 3
NOTHING = "nothing that was tried is better and proved"


def decide(search: Search) -> Candidate:
    """The winner, after `Search.climb`."""
    places = _ranking(search)
    finalists = [c for c in places if _score(search, c) >= NEAR * _score(search, search.lead)][:FINALISTS]
    if len(finalists) > 1:
        for candidate in finalists:
            if "prove" not in candidate.results and search.affordable("decide", candidate.known_recipe):
                search.run("decide", candidate)
                candidate.round = max(candidate.round, 2)
        places = sorted(finalists, key=lambda c: _place(search, c)) + places[len(finalists) :]
    winner = proved(search, places) or search.base
    search.winner = _compared(search, winner)
    for candidate in finalists:
        if candidate.round == 2 and candidate.state in ("ahead", "lost"):
            behind = search.goal.ratio(candidate.best, search.winner.best)
            candidate.reason = f"lost round 2: {behind:.2f}×"
    search.winner.state = "won"
    search.report(search, None)
    return search.winner


def _ranking(search: Search) -> list[Candidate]:
    """The candidates that may win, best first, the lead before those ahead of it within the noise. With the objective memory, those
    that are fast enough."""
    start = search.base.results["rank"]
    fine = [
        c
        for c in search.candidates
        if c.timed and c.state in ("start", "ahead", "lost") and c is not search.lead
        if search.goal.fast_enough(c.best, start)
    ]
    return [search.lead, *sorted(fine, key=lambda c: _score(search, c), reverse=True)]


def _score(search: Search, candidate: Candidate) -> float:
    return search.goal.ratio(candidate.best, search.base.results["rank"])


def _place(search: Search, candidate: Candidate) -> tuple[bool, float]:
    """Candidates clearly ahead of the lead when timed longer, then the lead, then the rest."""
    start, lead = search.base.results["rank"], search.lead
    longer = [c.best for c in (candidate, lead) if {"decide", "prove"} & set(c.results)]
    clearly = len(longer) == 2 and search.goal.ahead(longer[0], longer[1], start)
    return not clearly, 0.0 if candidate is lead else -_score(search, candidate) + 1e6 * (not clearly)


def proved(search: Search, places: list[Candidate]) -> Candidate | None:
    """The first candidate that is proved. Time for the first proof was reserved; more are made while time is left."""
    for number, candidate in enumerate(places):
        recipe = candidate.known_recipe
        one: Candidate | None = candidate
        if search.outlook.suspect(recipe):
            continue
        if candidate is search.base:
            if _examined(search):
                return None  # the ones after it are no better
            one = _remedy(search, candidate)
        elif names := search.outlook.breaks(recipe):
            reason = f"it has {', '.join(sorted(names))}, with which another one broke"
            candidate.state, candidate.reason = "unusable", reason
            continue
        elif number and "prove" not in candidate.results and not _timely(search, candidate):
            continue
        while one is not None:
            if search.prove(one) and search.live(one):
                return one
            one = _remedy(search, one)
    return None


def _timely(search: Search, candidate: Candidate) -> bool:
    return search.affordable("prove", candidate.known_recipe, reserve=False)


def _remedy(search: Search, candidate: Candidate) -> Candidate | None:
    """A failed candidate without the techniques at fault, if there is time to prove it."""
    rest = search.without_idle(candidate) or search.without_broken(candidate)
    return rest if rest is not None and _timely(search, rest) else None


def _compared(search: Search, winner: Candidate) -> Candidate:
    """The winner, compared with the unchanged recipe; that one if it is better."""
    base = search.base
    if winner is not base:
        if search.affordable("decide", base.known_recipe, reserve=False):
            search.run("decide", base)
        better, fault = search.goal.ratio(winner.best, base.best), ""
        if search.outlook.suspect(base.known_recipe):
            fault = "has no parity with plain fp32"
        elif search.outlook.breaks(base.known_recipe) or (better <= 1 and not search.live(base)):
            fault = "is unusable"
        if better > 1 or fault:
            search.gain = gain(base.best, winner.best)
            more = f", which {fault}" if fault else ""
            winner.reason = f"{better:.2f}× of the original recipe{more}"
            if broken(base.life):
                search.live(base)  # sets its reason
            return winner
        winner.state, winner.reason = "lost", f"lost the last round: {better:.2f}× of the original recipe"
    _examined(search)
    return base


def _examined(search: Search) -> bool:
    """Prove the unchanged recipe, if there is time, and take it through its life; whether it is usable."""
    base, faults = search.base, []
    if ("prove" in base.results or _timely(search, base)) and not search.prove(base):
        faults.append(base.reason)
    if not search.live(base):
        faults.append(base.reason)
    base.reason = "; of itself: ".join([NOTHING, *faults])
    return not broken(base.life)
