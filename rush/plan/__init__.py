"""Memory and time of a recipe on a machine, predicted by arithmetic alone.

No device is used and nothing is measured. See docs/plan.md for the model and its errors.
"""

from rush.plan.check import check
from rush.plan.layout_search import search
from rush.plan.planning import Plan, plan
from rush.plan.spec import spec_of
from rush.plan.target import TargetMachine, target_here, target_of

__all__ = ["Plan", "TargetMachine", "check", "plan", "search", "spec_of", "target_here", "target_of"]
