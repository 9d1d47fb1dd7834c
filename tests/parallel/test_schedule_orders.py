"""The orders that the planner plays on paper are those in which torch's schedules run the ranks of a domain."""

import pytest
from torch.distributed.pipelining import schedules

from phalanx.planner import SCHEDULES
from phalanx.planner.schedules import Work, rank_orders

_KINDS = {
    schedules.FORWARD: "forward",
    schedules.FULL_BACKWARD: "backward",
    schedules.BACKWARD_INPUT: "inputs",
    schedules.BACKWARD_WEIGHT: "weights",
}


def torch_order(name, rank, num_ranks, num_microbatches):
    """torch's order for one rank, without its idle places, from a schedule that has no stages to run."""
    schedule = object.__new__(getattr(schedules, SCHEDULES[name].torch_class))
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, SCHEDULES[name].chunks
    schedule._n_microbatches = num_microbatches
    schedule.number_of_rounds = num_microbatches // num_ranks
    schedule.microbatches_per_round = num_ranks
    actions = schedule._calculate_single_rank_operations(rank)
    return tuple(
        Work(_KINDS[action.computation_type], action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None
    )


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "interleaved-zero-bubble"])
@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 1), (2, 3), (4, 2), (8, 1)])
def test_torch_runs_each_rank_in_the_order_of_the_table(name, num_ranks, rounds):
    ours = rank_orders(name, num_ranks, rounds * num_ranks, SCHEDULES[name].chunks)

    theirs = tuple(torch_order(name, rank, num_ranks, rounds * num_ranks) for rank in range(num_ranks))

    assert ours == theirs
