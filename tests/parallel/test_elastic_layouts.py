"""The layout follows the number of ranks, as far as the run file allows; the batch of a step stays as it is."""

import pytest
from rank_layouts import architecture

from phalanx.errors import ConfigError
from phalanx.parallel import ParallelConfig, StepWorkload, fit_layout, list_world_sizes

LOAD = StepWorkload(batch_size=12, microbatches=2, sequence_length=16)
MODEL = architecture("gpt2")


def fit(world, load=LOAD, **section):
    return fit_layout(ParallelConfig(**section), world, MODEL, load)


@pytest.mark.parametrize(("world", "dp"), [(1, 1), (2, 2), (3, 3), (6, 6), (9, 6)])
def test_there_are_as_many_copies_as_ranks_where_the_batch_can_be_shared(world, dp):
    assert fit(world, dp=2, min_dp=1, max_dp=6).dp == dp


@pytest.mark.parametrize(("world", "dp"), [(4, 3), (5, 3)])
def test_a_number_that_gives_uneven_shares_is_passed_over(world, dp):
    found = fit(world, dp=2, min_dp=1, max_dp=6)

    assert (found.dp, found.num_ranks) == (dp, dp)


def test_whole_copies_are_added_and_taken_away():
    section = {"dp": 1, "tp": 2, "min_dp": 1, "max_dp": 3}

    assert [fit(world, **section).num_ranks for world in (2, 3, 4, 5, 6)] == [2, 2, 4, 4, 6]


def test_one_copy_alone_shares_nothing():
    found = fit(1, dp=2, zero=3, min_dp=1, offload=True)

    assert (found.dp, found.zero, found.offload) == (1, 0, False)


def test_what_is_not_elastic_wants_its_own_number_of_ranks():
    assert fit(2, dp=2).dp == 2
    with pytest.raises(ConfigError, match=r"dp=2 needs 2 ranks, 3 were started; start as many, or set min_dp"):
        fit(3, dp=2)


def test_too_few_ranks_are_refused_with_the_number_that_is_needed():
    with pytest.raises(ConfigError, match=r"1 ranks were started, dp=2 copies of 2 need 4"):
        fit(1, dp=2, tp=2, min_dp=2, max_dp=3)


def test_where_no_number_works_the_reason_is_said():
    with pytest.raises(ConfigError, match=r"dp=3 \* 2 microbatches does not divide 8 sequences"):
        fit(3, StepWorkload(8, 2, 16), dp=3, min_dp=3, max_dp=6)


def test_a_number_outside_its_own_limits_is_refused_with_the_run_file():
    with pytest.raises(ValueError, match="dp = 2 is not between min_dp = 3 and max_dp = 4"):
        ParallelConfig(dp=2, min_dp=3, max_dp=4)


def test_numbers_of_ranks_are_listed_most_first():
    assert list_world_sizes(ParallelConfig(dp=2, tp=2, min_dp=1, max_dp=6), 12, 2) == [12, 6, 4, 2]
    assert list_world_sizes(ParallelConfig(dp=2), 12, 2) == [2]
