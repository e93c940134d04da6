"""Ranks that use techniques with one setting of the knobs after another, and what the profile shows of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.parallel.rank_work import Result, loader, recipe


def show_knobs(
    family: str,
    layout: Mapping[str, int],
    settings: Sequence[Iterable[str]],
    more: Iterable[str] = (),
) -> list[Result]:
    """For each setting (techniques): the proofs, and the values of their knobs that this rank's profile shows."""
    from rush.hardware import probe
    from rush.parallel import join
    from rush.profiling.observe import observe
    from rush.techniques.api.evidence import prove
    from rush.training.build import build
    from rush.training.step import launch_step
    from tests.techniques.knob_values import accepted

    chosen = [recipe(family, layout, techniques, *more) for techniques in settings]
    found = []
    with join(chosen[0].layout.model_dump(), "cpu") as ranks:
        for asked in chosen:
            run = build(asked, probe("cpu"), None, ranks)
            with loader(run) as given:
                launch_step(run, 1, 1e-3, list(given.next_step())).result()
                seen = observe(run, lambda given=given: list(given.next_step()), steps=1)  # type: ignore[misc]
            found.append(
                {
                    "proofs": {name: (p.took_effect, p.what) for name, p in prove(run.uses, seen).items()},
                    "accepted": {use.technique.name: accepted(use, seen) for use in run.uses},
                    "used": {use.technique.name: dict(use.knobs) for use in run.uses},
                }
            )
    return found
