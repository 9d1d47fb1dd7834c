"""The planner: memory, time and money that a layout needs, before anything is started; imports no torch."""

from phalanx.planner.layout import Layout as Layout
from phalanx.planner.model.adapter import Adapter as Adapter
from phalanx.planner.model.read import shape_of as shape_of
from phalanx.planner.model.recipe import OuterLoop as OuterLoop, Recipe as Recipe
from phalanx.planner.schedules import SCHEDULES as SCHEDULES
from phalanx.planner.validity import nearest_valid_layout as nearest_valid_layout, describe_refusal as describe_refusal
