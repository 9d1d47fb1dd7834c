"""GPipe: all forwards, then all backwards."""

from phalanx.pipeline.schedules.action import Action


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order of one stage; backwards run in ascending order, so that gradients add up alike in every schedule.

    Source: Huang et al. 2019, section 2.3.
    """
    del stage, num_stages  # every stage has the same order
    forwards = [Action("forward", m) for m in range(num_microbatches)]
    return (*forwards, *(Action("backward", m) for m in range(num_microbatches)))
