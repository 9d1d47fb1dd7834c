"""One verified stage's order of work, from the table that ranks and planner read as well."""

from phalanx.errors import ConfigError
from phalanx.pipeline.schedules.action import Action
from phalanx.planner.schedules import SCHEDULES


def actions(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order of one stage.

    Raises:
        ConfigError: Stages in other hands cannot work in this schedule.
    """
    line = SCHEDULES[schedule]
    if not line.is_verifiable:
        raise ConfigError(f"pipeline.schedule: {schedule!r} is not one of whole stages and whole backwards")
    order = line.order(stage, num_stages, num_microbatches, 1)
    return tuple(Action("forward" if work.kind == "forward" else "backward", work.microbatch) for work in order)


__all__ = ["Action", "actions"]
