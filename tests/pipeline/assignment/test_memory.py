"""What parties are given fits into what they have: found whenever it can be, refused by name when it cannot."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.pipeline.assignment.assignment import Assignment, first_assignment, promote_shadows
from phalanx.pipeline.assignment.fit import fit_assignment
from phalanx.pipeline.assignment.memory import UNBOUNDED, Footprint, Memory
from phalanx.pipeline.assignment.rebalance import PaceMeter, rebalance_assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.processes.own_memory import ALONE

MIB = 2**20
WORKERS = ["worker-1", "worker-2", "worker-3"]
SMALL = st.integers(0, 6)
FOOTPRINTS = st.lists(st.builds(Footprint, SMALL, SMALL), min_size=3, max_size=5)
ROOMS = st.dictionaries(st.sampled_from([ALONE, "here", "there"]), st.integers(0, 25), max_size=2)
EVERYBODYS_ROOMS = st.fixed_dictionaries({name: ROOMS for name in (*WORKERS, OWNER)})


def even(num_stages, held=2, shadowed=3):
    return [Footprint(held, shadowed)] * num_stages


def alone(**sizes):
    """Memory that each has for itself; worker_1 is worker-1."""
    return {name.replace("_", "-"): {ALONE: size} for name, size in sizes.items()}


def fits(memory, assignment):
    return memory.excess_bytes(assignment.holders, assignment.shadows) == 0


def every_assignment(num_stages, workers, *, guarded):
    """All there are in which workers hold the middle stages, and others or the owner shadow them."""
    middle = range(1, num_stages - 1)
    for held in product(workers, repeat=len(middle)):
        holders = {0: OWNER, num_stages - 1: OWNER, **dict(zip(middle, held, strict=True))}
        watchers = [[name for name in (*workers, OWNER) if name != holder] for holder in held]
        for shadows in product(*watchers) if guarded else [()]:
            yield Assignment(holders, dict(zip(middle, shadows, strict=guarded)))


@given(FOOTPRINTS, EVERYBODYS_ROOMS, st.integers(1, 3), st.booleans())
def test_first_roles_fit_whenever_any_would(footprints, rooms, count, guarded):
    memory, workers, stages = Memory(footprints, rooms), WORKERS[:count], len(footprints)

    first = first_assignment(stages, workers, guarded=guarded, memory=memory)
    found = fit_assignment(first, workers, memory)

    assert fits(memory, found) == any(fits(memory, a) for a in every_assignment(stages, workers, guarded=guarded))
    assert found == first or not fits(memory, first)
    assert set(found.shadows) == (set(range(1, stages - 1)) if guarded else set())
    assert all(found.holders[stage] != shadow for stage, shadow in found.shadows.items())


@given(FOOTPRINTS, EVERYBODYS_ROOMS, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(1, 5))
def test_when_workers_come_and_go_roles_fit_whenever_any_would(footprints, rooms, before, after, guarded, slow):
    memory, stages = Memory(footprints, rooms), len(footprints)
    old = first_assignment(stages, WORKERS[:before], guarded=guarded)

    new = rebalance_assignment(old, WORKERS[:after], guarded=guarded, pace={"worker-1": float(slow)}, memory=memory)

    assert fits(memory, new) == any(fits(memory, a) for a in every_assignment(stages, WORKERS[:after], guarded=guarded))
    assert set(new.holders.values()) <= {OWNER, *WORKERS[:after]}
    assert all(new.holders[stage] != shadow for stage, shadow in new.shadows.items())


@given(FOOTPRINTS, EVERYBODYS_ROOMS, st.booleans())
def test_who_takes_over_keeps_it_and_shadows_go_where_there_is_room(footprints, rooms, tight):
    memory, stages = Memory(footprints, rooms if tight else {}), len(footprints)
    old, left = first_assignment(stages, WORKERS, guarded=True), WORKERS[1:]

    successors = promote_shadows(old, "worker-1", left, guarded=True, memory=memory)
    new = fit_assignment(successors, left, memory, holders_stay=True)

    same = [a for a in every_assignment(stages, left, guarded=True) if a.holders == successors.holders]
    if OWNER not in {successors.holders[stage] for stage in range(1, stages - 1)}:
        assert fits(memory, new) == any(fits(memory, a) for a in same)
    assert new.holders == successors.holders
    assert set(new.shadows) == {stage for stage, holder in new.holders.items() if holder != OWNER}


@given(
    st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 20), min_size=1),
    st.integers(0, 60),
    st.dictionaries(st.sampled_from([*WORKERS, "liar"]), st.integers(0, 20)),
)
def test_a_liar_that_claims_to_be_on_a_machine_takes_nothing_from_it_and_adds_nothing(honest, claim, needs):
    truth = {name: {"here": size} for name, size in honest.items()}
    without_liar, with_liar = Memory(even(3), truth), Memory(even(3), {**truth, "liar": {"here": claim}})

    mine = {name: size for name, size in needs.items() if name in honest}
    fit_alone = without_liar.excess_of(mine) == 0

    assert (with_liar.excess_of(mine) == 0) == fit_alone
    # what fits with the liar on the machine that it is not on, fits without it
    if with_liar.excess_of({**mine, "liar": needs.get("liar", 0)}) == 0:
        assert fit_alone


def test_workers_on_one_machine_have_its_memory_once():
    rooms = {"worker-1": {"here": 12}, "worker-2": {"here": 11}}
    elsewhere = {"worker-1": {"here": 12}, "worker-2": {"there": 11}}
    wanted = first_assignment(4, WORKERS[:2], guarded=True)

    # each holds one stage and shadows the other: 5 of one unit, 10 of both
    assert fits(Memory(even(4, 2, 3), rooms), wanted)
    assert not fits(Memory(even(4, 3, 4), rooms), wanted)
    assert fits(Memory(even(4, 3, 4), elsewhere), wanted)


def test_a_container_has_its_own_limit_and_shares_its_machine():
    rooms = {"worker-1": {"here": 12, "box-1": 6}, "worker-2": {"here": 12, "box-2": 9}}
    memory = Memory(even(4), rooms)

    assert memory.excess_of({"worker-1": 6, "worker-2": 6}) == 0
    assert memory.excess_of({"worker-1": 7, "worker-2": 1}) == 1
    assert memory.excess_of({"worker-1": 5, "worker-2": 8}) == 1
    assert memory.free_bytes("worker-2", {"worker-1": 5, "worker-2": 2}) == 5


def test_who_says_nothing_of_its_memory_has_no_limit():
    memory = Memory(even(4), {"worker-1": {}, OWNER: {ALONE: 4}})

    assert memory.excess_of({"worker-1": 10**9, OWNER: 4}) == 0
    assert memory.free_bytes("worker-1", {}) is None
    assert UNBOUNDED.excess_bytes({1: "worker-1"}, {1: "worker-2"}) == 0


def test_what_fits_nowhere_is_refused_with_who_has_how_much_and_needs_how_much():
    footprints = [Footprint(1, 1), Footprint(3 * MIB, 5 * MIB), Footprint(1, 1)]
    memory = Memory(footprints, alone(worker_1=2 * MIB, owner=100 * MIB))
    wanted = fit_assignment(first_assignment(3, WORKERS[:1], guarded=True), WORKERS[:1], memory)

    with pytest.raises(ConfigError) as refused:
        memory.check_fit(wanted.holders, wanted.shadows)

    said = str(refused.value)
    assert "worker-1 has 2.0 MiB for stages and needs 3.0 MiB (worker-1 holds 1)" in said
    assert "owner" not in said
    assert "memory_mib" in said


def test_of_a_shared_machine_all_are_named_who_use_it():
    rooms = {name: {"here": 4 * MIB} for name in WORKERS[:2]}
    memory = Memory([Footprint(0, 0), *even(2, 3 * MIB, 0), Footprint(0, 0)], rooms)

    (said,) = memory.describe_shortages({0: OWNER, 1: "worker-1", 2: "worker-2", 3: OWNER}, {})

    assert said == (
        "worker-1 and worker-2 together have 4.0 MiB for stages and need 6.0 MiB (worker-1 holds 1; worker-2 holds 2)"
    )


def test_a_small_worker_is_given_the_small_stage():
    footprints = [Footprint(0, 0), Footprint(9, 9), Footprint(1, 1), Footprint(0, 0)]
    memory = Memory(footprints, alone(worker_1=3))

    found = fit_assignment(first_assignment(4, WORKERS[:2], guarded=True), WORKERS[:2], memory)

    assert found.holders[1] == "worker-2"
    assert fits(memory, found)
    assert found.shadows[1] == OWNER


def test_a_fast_worker_is_given_no_more_than_it_has_room_for():
    old = first_assignment(6, WORKERS[:2], guarded=False)
    pace = {"worker-1": 9.0, "worker-2": 1.0}

    free = rebalance_assignment(old, WORKERS[:2], guarded=False, pace=pace)
    tight = rebalance_assignment(old, WORKERS[:2], guarded=False, pace=pace, memory=Memory(even(6), alone(worker_2=6)))

    assert [stage for stage, holder in free.holders.items() if holder == "worker-1"] == []
    assert len([stage for stage, holder in tight.holders.items() if holder == "worker-2"]) == 3


def test_nobody_is_slow_enough_to_move_stages_to_where_there_is_no_room():
    assignment = first_assignment(6, WORKERS[:2], guarded=False)
    busy = {"worker-1": 90.0, "worker-2": 1.0}
    full = Memory(even(6), alone(worker_2=4))

    for memory, moves in ((UNBOUNDED, True), (full, False)):
        balance = PaceMeter([1.0] * 6, 5)
        assert not balance.is_unbalanced(0, assignment, WORKERS[:2], dict.fromkeys(WORKERS, 0.0), memory)
        assert balance.is_unbalanced(5, assignment, WORKERS[:2], busy, memory) == moves


def test_who_has_too_much_is_relieved_by_who_has_room():
    crowded = Assignment({0: OWNER, 1: "worker-1", 2: "worker-1", 3: OWNER}, {1: "worker-2", 2: "worker-2"})
    memory = Memory(even(4), alone(worker_1=2))

    new = rebalance_assignment(crowded, WORKERS, guarded=True, memory=memory)

    assert not fits(memory, crowded)
    assert fits(memory, new)


def test_where_nothing_fits_nothing_moves_without_use():
    old = first_assignment(4, WORKERS[:2], guarded=True)
    memory = Memory(even(4), alone(worker_1=0, worker_2=0, worker_3=0, owner=0))

    new = rebalance_assignment(old, WORKERS[:2], guarded=True, memory=memory)

    assert memory.excess_bytes(new.holders, new.shadows) <= memory.excess_bytes(old.holders, old.shadows)
    assert set(new.shadows) == {1, 2}
