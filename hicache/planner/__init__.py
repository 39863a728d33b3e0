"""The brain: what to do about an event, with no clock, thread, tensor or file."""

from hicache.planner.config import PlannerConfig
from hicache.planner.planner import Planner

__all__ = ["Planner", "PlannerConfig"]
