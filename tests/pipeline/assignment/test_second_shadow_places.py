"""Where second shadows go, and who follows when parties are lost."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.pipeline import OWNER
from phalanx.pipeline.assignment.assignment import (
    Assignment,
    add_second_shadows,
    assignment_of,
    first_assignment,
    promote_shadows,
    roles_of,
    settle_assignment,
    shadowed_by_owner,
)
from phalanx.pipeline.assignment.memory import Footprint, Memory
from phalanx.pipeline.processes.own_memory import ALONE


def names(count):
    return [f"worker-{n}" for n in range(1, count + 1)]


def begin(num_stages, workers, memory=None):
    first = first_assignment(num_stages, workers, guarded=True)
    return add_second_shadows(first, None, workers, *([] if memory is None else [memory]))


def check(assignment):
    """Three parties of each stage, as long as the owner is none of the first two."""
    for stage, holder in assignment.holders.items():
        parties = assignment.parties_of(stage)
        assert len({*parties}) == len(parties)
        two_workers = OWNER not in (holder, assignment.shadows.get(stage, OWNER))
        assert (stage in assignment.second_shadows) == two_workers


@given(st.integers(3, 8), st.integers(0, 4), st.data())
def test_of_any_two_parties_that_go_at_once_the_third_has_the_stage(num_stages, spares, data):
    workers = names(num_stages - 2 + spares)
    old = begin(num_stages, workers)
    check(old)
    while len(workers) >= 2:
        gone = data.draw(st.permutations(workers))[:2]
        new = old
        for name in gone:
            workers = [worker for worker in workers if worker != name]
            wanted = add_second_shadows(promote_shadows(new, name, workers, guarded=True), new, workers)
            # what newcomers are given does not arrive, for the next party is gone already
            new = settle_assignment(wanted, new, {*workers, OWNER})
        covered = promote_shadows(new, gone[-1], workers, guarded=True)
        old, before = add_second_shadows(covered, new, workers), old
        check(old)
        for stage, holder in old.holders.items():
            assert holder in before.parties_of(stage)
            assert holder not in gone


def test_spares_come_first_then_neighbours_then_the_owner():
    assert begin(4, names(6)).second_shadows == {1: "worker-5", 2: "worker-6"}
    assert begin(5, names(3)).second_shadows == {1: "worker-3", 2: "worker-1", 3: "worker-1"}
    assert begin(4, names(2)).second_shadows == {1: OWNER, 2: OWNER}
    assert begin(3, names(1)).second_shadows == {}


def test_a_party_without_room_is_passed_over():
    memory = Memory([Footprint(0, 0), Footprint(10, 10), Footprint(10, 10), Footprint(0, 0)], {"worker-5": {ALONE: 5}})

    assert begin(4, names(6), memory).second_shadows[1] == "worker-6"


def test_a_second_shadow_stays_and_needs_no_state_anew():
    old = begin(5, names(6))
    lost = old.holders[1]
    workers = [name for name in names(6) if name != lost]
    new = add_second_shadows(promote_shadows(old, lost, workers, guarded=True), old, workers)

    (role,) = [role for role in roles_of(new, old) if role.stage == 1]

    assert (role.holder, role.shadow) == (old.shadows[1], old.second_shadows[1])
    assert role.newcomers == (role.second_shadow,)
    assert new.second_shadows[2] == old.second_shadows[2]
    assert assignment_of(roles_of(new, old)) == new


def test_the_owner_takes_a_disputed_stage_alone():
    old = begin(5, names(6))

    new = shadowed_by_owner(old, {1})

    assert new.shadows_of(1) == (OWNER,)
    assert new.shadows_of(2) == old.shadows_of(2)


def test_roles_without_a_second_shadow_are_written_as_before():
    (role,) = roles_of(Assignment({0: OWNER}, {}), None)

    assert "second_shadow" not in role.model_dump(mode="json")
