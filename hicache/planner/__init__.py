"""The brain: what to do about an event, with no clock, thread, tensor or file."""

from hicache.planner.planner import Planner
from hicache.planner.residency import PlannerConfig

__all__ = ["Planner", "PlannerConfig"]
