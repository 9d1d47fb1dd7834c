"""Schedules as pure data: one ordered list of actions per stage."""

from collections.abc import Callable

from phalanx.pipeline.schedules.action import Action
from phalanx.pipeline.schedules.gpipe import gpipe
from phalanx.pipeline.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int, int], tuple[Action, ...]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}

__all__ = ["SCHEDULES", "Action", "gpipe", "one_f_one_b"]
