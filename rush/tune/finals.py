"""The end of a search: those that came near the lead are timed longer, and the best one is proved.

A winner learns the same as plain fp32, all of it took effect, it can be trained with (a short life), and it is better than the
recipe as it stood. One that is not is passed over for the next; what has no effect, or broke the life, is taken out and the rest
tried in its place. Where nobody is left, the recipe stays as it was.
"""

from __future__ import annotations

from rush.records.life import broken
from rush.tune.candidates import Candidate
from rush.tune.goal import gain
from rush.tune.search import Search

NEAR = 0.98
"""Those that came this near the lead are timed longer."""
FINALISTS = 3
NOTHING = "nothing that was tried is better and proved"


def decide(search: Search) -> Candidate:
    """The winner of a search that has climbed."""
    places = _ranking(search)
    finalists = [c for c in places if _score(search, c) >= NEAR * _score(search, search.lead)][:FINALISTS]
    if len(finalists) > 1:
        for candidate in finalists:
            if "prove" not in candidate.results and search.affordable("decide", candidate.known_recipe):
                search.run("decide", candidate)
                candidate.round = max(candidate.round, 2)
        places = sorted(finalists, key=lambda c: _place(search, c)) + places[len(finalists) :]
    winner = _proved(search, places) or search.base
    search.winner = _compared(search, winner)
    for candidate in finalists:
        if candidate.round == 2 and candidate.state in ("ahead", "lost"):
            behind = search.goal.ratio(candidate.best, search.winner.best)
            candidate.reason = f"lost round 2: {behind:.2f}×"
    search.winner.state = "won"
    search.tell(search, None)
    return search.winner


def _ranking(search: Search) -> list[Candidate]:
    """Those that may win, best first; the lead before those that are ahead of it by chance. For the objective memory, those
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
    """Those that are clearly ahead of the lead when timed longer, then the lead, then the rest."""
    start, lead = search.base.results["rank"], search.lead
    longer = [c.best for c in (candidate, lead) if {"decide", "prove"} & set(c.results)]
    clearly = len(longer) == 2 and search.goal.ahead(longer[0], longer[1], start)
    return not clearly, 0.0 if candidate is lead else -_score(search, candidate) + 1e6 * (not clearly)


def _proved(search: Search, places: list[Candidate]) -> Candidate | None:
    """The first that stands. Time for the first proof was set aside; further ones are made while there is some."""
    for number, candidate in enumerate(places):
        recipe = candidate.known_recipe
        one: Candidate | None = candidate
        if search.outlook.suspect(recipe):
            continue
        if candidate is search.base:
            if _examined(search):
                return None  # what comes behind it is no better
            one = _remedy(search, candidate)
        elif names := search.outlook.breaks(recipe):
            told = f"it has {', '.join(sorted(names))}, with which another one broke"
            candidate.state, candidate.reason = "unusable", told
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
    """What is left of one that does not stand, without what is wrong with it, if there is time to prove that."""
    rest = search.without_idle(candidate) or search.without_broken(candidate)
    return rest if rest is not None and _timely(search, rest) else None


def _compared(search: Search, winner: Candidate) -> Candidate:
    """The winner over the recipe as it stands, both timed as long as there was time for."""
    base = search.base
    if winner is not base:
        if search.affordable("decide", base.known_recipe, reserve=False):
            search.run("decide", base)
        better, fault = search.goal.ratio(winner.best, base.best), ""
        if search.outlook.suspect(base.known_recipe):
            fault = "learns something else than plain fp32"
        elif search.outlook.breaks(base.known_recipe) or (better <= 1 and not search.live(base)):
            fault = "cannot be trained with"
        if better > 1 or fault:
            search.gain = gain(base.best, winner.best)
            more = f", which {fault}" if fault else ""
            winner.reason = f"{better:.2f}× of the recipe as it stood{more}"
            if broken(base.life):
                search.live(base)  # says what is wrong with it
            return winner
        winner.state, winner.reason = "lost", f"lost the last round: {better:.2f}× of the recipe as it stood"
    _examined(search)
    return base


def _examined(search: Search) -> bool:
    """Hold the recipe as it stands against plain fp32, where there is time, and take it through its life; whether it can be
    trained with."""
    base, faults = search.base, []
    if ("prove" in base.results or _timely(search, base)) and not search.prove(base):
        faults.append(base.reason)
    if not search.live(base):
        faults.append(base.reason)
    base.reason = "; of itself: ".join([NOTHING, *faults])
    return not broken(base.life)
