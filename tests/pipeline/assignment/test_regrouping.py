"""Stages move to the workers that are there: none has two more than another, and nothing moves without need."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.pipeline.assignment.assignment import (
    Assignment,
    first_assignment,
    roles_of,
    settle_assignment,
    shadowed_by_owner,
)
from phalanx.pipeline.assignment.rebalance import rebalance_assignment
from phalanx.pipeline.config import OWNER


def names(count):
    return [f"worker-{n}" for n in range(1, count + 1)]


def loads(assignment, workers):
    return [sum(holder == worker for holder in assignment.holders.values()) for worker in workers]


@given(st.integers(2, 10), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_whoever_comes_or_goes_the_load_is_even_and_every_stage_is_watched(num_stages, before, after, guarded):
    old = first_assignment(num_stages, names(before), guarded=guarded)

    new = rebalance_assignment(old, names(after), guarded=guarded)

    workers = names(after)
    assert new.holders[0] == new.holders[num_stages - 1] == OWNER
    assert set(new.holders.values()) <= {OWNER, *workers}
    if workers:
        assert max(loads(new, workers)) - min(loads(new, workers)) <= 1
        assert sum(loads(new, workers)) == num_stages - 2
    watched = {stage for stage, holder in new.holders.items() if holder != OWNER} if guarded else set()
    assert set(new.shadows) == watched
    assert all(new.holders[stage] != shadow for stage, shadow in new.shadows.items())
    assert all(shadow != OWNER for shadow in new.shadows.values()) or after < 2
    assert rebalance_assignment(new, workers, guarded=guarded) == new


@given(st.integers(3, 10), st.integers(1, 9), st.integers(1, 9))
def test_who_holds_a_stage_keeps_it_unless_another_has_less(num_stages, before, after):
    old = first_assignment(num_stages, names(before), guarded=True)

    new = rebalance_assignment(old, names(after), guarded=True)

    moved = [stage for stage in old.holders if new.holders[stage] != old.holders[stage]]
    if after == before:
        assert moved == []
    if after > before:
        assert {new.holders[stage] for stage in moved} <= set(names(after)) - set(names(before))


def test_a_newcomer_relieves_the_owner_of_its_watch():
    old = first_assignment(3, names(1), guarded=True)

    new = rebalance_assignment(old, names(2), guarded=True)

    assert new == Assignment({0: OWNER, 1: "worker-1", 2: OWNER}, {1: "worker-2"})


def test_a_newcomer_takes_half_of_what_one_worker_holds():
    old = first_assignment(6, names(1), guarded=True)
    assert set(old.holders.values()) == {OWNER, "worker-1"}

    new = rebalance_assignment(old, names(2), guarded=True)

    assert loads(new, names(2)) == [2, 2]


def test_what_a_leaving_holder_had_goes_to_its_shadow():
    old = first_assignment(4, names(3), guarded=True)

    new = rebalance_assignment(old, ["worker-2", "worker-3"], guarded=True)

    assert (old.shadows[1], new.holders[1]) == ("worker-3", "worker-3")
    assert new.holders[2] == "worker-2"


def test_whoever_gives_a_stage_away_sends_its_state():
    old = Assignment({0: OWNER, 1: "worker-1", 2: "worker-1", 3: OWNER}, {1: "worker-3", 2: "worker-3"})
    new = Assignment({0: OWNER, 1: "worker-1", 2: "worker-2", 3: OWNER}, {1: "worker-2", 2: "worker-1"})

    roles = roles_of(new, old, {"worker-1", "worker-2", OWNER})

    assert [(role.source, role.newcomers) for role in roles[1:3]] == [
        ("worker-1", ("worker-2",)),
        ("worker-1", ("worker-2",)),
    ]
    gone = roles_of(new, old, {"worker-2", OWNER})
    assert [role.source for role in gone[1:3]] == ["worker-1", "worker-1"]


def test_after_an_interruption_nobody_holds_what_it_was_still_waiting_for():
    old = Assignment({0: OWNER, 1: "worker-1", 2: "worker-1", 3: OWNER}, {1: OWNER, 2: OWNER})
    new = Assignment({0: OWNER, 1: "worker-1", 2: "worker-2", 3: OWNER}, {1: "worker-2", 2: "worker-1"})

    found = settle_assignment(new, old, present=["worker-1", OWNER])

    assert found.holders[2] == "worker-1"
    assert found.shadows == {1: OWNER, 2: OWNER}


def test_what_the_owner_has_it_sends_itself():
    holders = {0: OWNER, 1: "worker-1", 2: OWNER}
    old, new = Assignment(holders, {1: OWNER}), Assignment(holders, {1: "worker-2"})

    role = roles_of(new, old, {"worker-1", "worker-2", OWNER})[1]

    assert (role.source, role.newcomers) == (OWNER, ("worker-2",))


def test_of_a_disputed_stage_the_owner_is_the_shadow_though_the_former_one_is_there():
    holders = {0: OWNER, 1: "worker-1", 2: "worker-2", 3: OWNER}

    shadows = shadowed_by_owner(Assignment(holders, {1: "worker-3", 2: "worker-3"}), {1}).shadows

    assert shadows == {1: OWNER, 2: "worker-3"}
