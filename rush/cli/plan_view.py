"""One plan in the terminal: memory against the device's limit, step time by part, and advice if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from rush.cli.output import print_table, say

if TYPE_CHECKING:
    from rush.plan import Plan

BAR = 60
STYLES = (
    "blue",
    "green",
    "cyan",
    "magenta",
    "yellow",
    "red",
    "bright_blue",
    "bright_green",
    "bright_black",
    "white",
)


def show_plan(name: str, plan: Plan, tokens: float | None, price: float | None) -> None:
    from rush.plan.describe import describe
    from rush.plan.run_peak import STEP

    target, error = plan.target, plan.expected_error
    room = target.memory_bytes
    say(f"{name} on {plan.spec.world:,} × {target.name}: {describe(plan.spec)}", bold=True)
    for problem in plan.problems:
        say(f"  cannot run there: {problem}", fg="yellow")
    verdict = "fits by less than the error" if plan.tight else "fits" if plan.fits else "does not fit"
    fullest = plan.memory.moment
    if plan.life.fullest != STEP:
        fullest = f"{plan.life.fullest}; a step takes {plan.memory.total / 2**30:.1f} GiB, by part:"
    say(
        f"\nMemory of one device: {plan.life.total / 2**30:.1f} of {room / 2**30:.1f} GiB, {verdict} (±{error['memory']:.0%}); "
        f"peak: {fullest}"
    )
    _bar(plan.memory.parts, max(room, plan.memory.total), limit=room)
    print_table(
        ["part", "GiB", "share"],
        [[part, f"{value / 2**30:.2f}", f"{value / room:.0%}"] for part, value in plan.memory.parts.items()],
    )
    if plan.memory.activations:
        most = sorted(plan.memory.activations.items(), key=lambda item: -item[1])[:6]
        say("activations: " + ", ".join(f"{term} {value / 2**30:.2f}" for term, value in most))
    besides = ", ".join(f"{phase} {value / 2**30:.2f} GiB" for phase, value in plan.life.besides.items())
    say(
        f"between steps: {besides}; host copy of the state while a checkpoint is written: {plan.staged / 2**30:.2f} GiB"
    )
    if plan.memory.host_bytes:
        there = f" of {target.host_bytes / 2**30:.1f}" if target.host_bytes else ""
        say(f"on the host: {plan.on_host / 2**30:.1f}{there} GiB{'' if plan.host_fits else ', does not fit'}")
    say(f"largest micro batch: {plan.largest_micro:,}; longest sequence: {plan.longest_sequence:,}")
    if not plan.fits:
        smaller = 0 < plan.largest_micro < plan.spec.micro
        less = f" It fits with batch.micro of at most {plan.largest_micro}." if smaller else ""
        say(
            f"It does not fit.{less} --search finds layouts, checkpointing and precisions that do.",
            fg="yellow",
        )
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu else ""
    say(
        f"\nA step of {plan.spec.step_tokens:,} tokens: {plan.time.step * 1e3:,.1f} ms, {plan.tokens_per_s_per_device:,.0f} "
        f"tokens/s/device{mfu} (±{error['time']:.0%})"
    )
    _bar(plan.time.parts, plan.time.step)
    print_table(
        ["part", "ms", "share"],
        [
            [part, f"{value * 1e3:,.1f}", f"{value / plan.time.step:.0%}"]
            for part, value in plan.time.parts.items()
        ],
    )
    if len(plan.spec.phases) > 1:
        sizes = " → ".join(f"{float(size) * plan.spec.step_tokens:,.0f}" for _, size in plan.spec.phases)
        whole = "" if plan.run is None else "; the whole run of {steps:,} steps: {tokens:,} tokens, {hours:,.1f} h".format(**plan.run)  # fmt: skip
        say(f"\nBatch-size schedule: {sizes} tokens a step{whole}")
    if tokens:
        say(f"\n{plan.say_budget(tokens, price)}")
    say(f"\nRates: {target.how} ({'; '.join(plan.sources)})")


def _bar(parts: Mapping[str, float], whole: float, limit: float | None = None) -> None:
    """A stacked bar; `limit` is marked where the parts pass it."""
    text = Text()
    drawn = 0.0
    place = 0
    for number, value in enumerate(parts.values()):
        drawn += value
        end = round(BAR * drawn / whole)
        text.append("█" * (end - place), style=STYLES[number % len(STYLES)])
        place = end
    text.append("·" * (BAR - place))
    if limit is not None:
        at = round(BAR * limit / whole)
        text = text[:at] + Text("│") + text[at:]
    Console().print(text)
