"""Know what fits and how fast it goes before renting: memory and time of a recipe on a machine, by arithmetic alone.

No device is touched and nothing is measured here. See docs/plan.md for how the numbers come about and how far they
are off.
"""

from rush.plan.check import check
from rush.plan.layout_search import search
from rush.plan.planning import Plan, plan
from rush.plan.spec import spec_of
from rush.plan.target import TargetMachine, target_here, target_of

__all__ = ["Plan", "TargetMachine", "check", "plan", "search", "spec_of", "target_here", "target_of"]
