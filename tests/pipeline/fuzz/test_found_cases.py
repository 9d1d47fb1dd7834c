"""What the fuzzer found, as small as it could make it: each case fails on the code of its day."""

import pytest
from changes import Put
from schedule import Act, Alter, Drop, Liar, On, Payload, Repeat, Schedule


def one(company, *acts, liar=1, **kwargs):
    """One liar with these acts."""
    return Schedule(company, {liar: Liar(acts)}, **kwargs)


FOUND = {
    "a_stage_that_refuses_a_tensor_for_another_stage_is_not_replaced_for_lacking_it": one(
        "gradient", Act(On("tensor", 0), Alter(("target",), Put(2**53)))
    ),
    "false_weights_at_the_end_are_passed_over_for_those_of_the_other_copy": one(
        "gradient", Act(On("bulk", step=3, lasting=True), Payload("negated"))
    ),
    "a_stage_that_gives_the_owner_no_state_is_replaced_and_the_run_goes_on": one(
        "gradient", Act(On("bulk", step=1, lasting=True), Drop()), events=((1, "kill", 2),)
    ),
    "a_stage_that_floods_its_neighbour_does_not_end_it": Schedule(
        "gradient", {1: Liar((Act(On("tensor", lasting=True), Repeat(50)),), "adaptive", 0)}
    ),
    "a_shadow_in_lock_step_that_gives_its_gradient_to_another_step_is_replaced": one(
        "lockstep", Act(On("gradient_held"), Alter(("step",), Put(1))), liar=2
    ),
    "a_shadow_in_lock_step_that_keeps_its_gradient_to_itself_is_replaced": one(
        "lockstep", Act(On("gradient_held", lasting=True), Drop()), liar=2
    ),
    "a_shadow_that_is_not_given_its_state_is_not_replaced_for_lacking_it": Schedule(
        "league", {1: Liar((Act(On("bulk", lasting=True), Alter(("epoch",), Put(-1))),)), 2: Liar((), "adaptive", 0)}
    ),
    "nor_is_it_where_the_other_copy_was_an_honest_party_that_died": one(
        "three workers", Act(On("bulk", step=1, lasting=True), Drop()), events=((1, "kill", 2),)
    ),
    "a_stage_is_not_replaced_for_a_shadow_that_says_nothing_of_the_state_it_was_given": one(
        "three workers", Act(On("ready", nth=1, lasting=True), Drop()), liar=3, events=((1, "kill", 2),)
    ),
}


@pytest.mark.parametrize("schedule", FOUND.values(), ids=FOUND)
def test_found(stage, schedule):
    outcome = stage.play(schedule)

    assert outcome.fired == outcome.num_acts
    assert stage.faults(schedule, outcome) == []


def test_a_worker_that_cannot_read_a_message_complains_about_its_sender(stage):
    outcome = stage.play(one("gradient", Act(On("tensor"), Alter(("direction",), Put("sideways")))))

    complaints = [body for kind, body in outcome.events if kind == "fault" and body["party"] == "worker-2"]
    assert [body["about"] for body in complaints] == ["worker-1"]
