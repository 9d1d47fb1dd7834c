"""1F1B: after a warm-up each forward is followed by a backward, so few microbatches are held at once."""

from phalanx.pipeline.schedules.action import Action


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order of one stage; at most ``num_stages - stage`` microbatches are in flight in it.

    Source: Narayanan et al. 2019 (PipeDream), section 3.2; Narayanan et al. 2021, section 2.2.
    """
    warmup = min(num_microbatches, num_stages - stage)
    actions = [Action("forward", m) for m in range(warmup)]
    for m in range(num_microbatches):
        actions.append(Action("backward", m))
        if warmup + m < num_microbatches:
            actions.append(Action("forward", warmup + m))
    return tuple(actions)
