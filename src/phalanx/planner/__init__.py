"""The planner: memory, time and money that a layout needs, before anything is started; imports no torch."""

from phalanx.planner.layout import Layout
from phalanx.planner.model.adapter import Adapter
from phalanx.planner.model.read import shape_of
from phalanx.planner.model.recipe import Outer, Recipe
from phalanx.planner.schedules import SCHEDULES
from phalanx.planner.validity import nearest, why_not

__all__ = [
    "SCHEDULES",
    "Adapter",
    "Layout",
    "Outer",
    "Recipe",
    "nearest",
    "shape_of",
    "why_not",
]
