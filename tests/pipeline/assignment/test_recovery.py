import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import NoHolderError
from phalanx.pipeline import OWNER
from phalanx.pipeline.assignment.assignment import Assignment, first_assignment, promote_shadows, roles_of


def names(count):
    return [f"worker-{n}" for n in range(1, count + 1)]


def check(assignment, num_stages, alive):
    """Check what must hold of every assignment, after any loss."""
    holders, shadows = assignment.holders, assignment.shadows
    assert set(holders) == set(range(num_stages))
    assert holders[0] == holders[num_stages - 1] == OWNER
    assert set(holders.values()) | set(shadows.values()) <= {OWNER, *alive}
    # whoever can lie is watched, and never by itself; the owner is trusted
    assert set(shadows) == {stage for stage, holder in holders.items() if holder != OWNER}
    assert all(holders[stage] != shadow for stage, shadow in shadows.items())


@given(st.integers(1, 10), st.integers(0, 4), st.data())
def test_whoever_goes_every_stage_is_held_and_watched(num_stages, spares, data):
    alive = names(max(num_stages - 2, 0) + spares)
    assignment = first_assignment(num_stages, alive, guarded=True)
    check(assignment, num_stages, alive)
    while alive:
        gone = data.draw(st.sampled_from(alive))
        alive = [name for name in alive if name != gone]
        held = {stage for stage, holder in assignment.holders.items() if holder == gone}
        new = promote_shadows(assignment, gone, alive, guarded=True)

        check(new, num_stages, alive)
        for stage, holder in assignment.holders.items():
            expected = assignment.shadows[stage] if stage in held else holder
            assert new.holders[stage] == expected, "only a shadow has the weights"
        for role in roles_of(new, assignment):
            had = {assignment.holders[role.stage], assignment.shadows.get(role.stage)}
            assert role.source in had | {OWNER}
            assert role.source != gone
            assert not set(role.newcomers) & had
            present = {role.holder, role.shadow} - {None}
            assert set(role.newcomers) == present - had
        assignment = new

    assert set(assignment.holders.values()) == {OWNER}


def test_workers_get_the_middle_stages_in_order():
    assignment = first_assignment(5, names(3), guarded=True)

    assert assignment.holders == {0: OWNER, 1: "worker-1", 2: "worker-2", 3: "worker-3", 4: OWNER}


def test_a_spare_shadows_before_a_neighbour_does():
    assert first_assignment(4, names(3), guarded=True).shadows == {1: "worker-3", 2: "worker-1"}


def test_the_neighbour_shadows_where_there_is_no_spare():
    assert first_assignment(5, names(3), guarded=True).shadows == {1: "worker-2", 2: "worker-3", 3: "worker-2"}


def test_the_owner_shadows_where_there_is_nobody_else():
    assert first_assignment(3, names(1), guarded=True).shadows == {1: OWNER}


def test_without_a_guard_nobody_is_shadowed_and_a_loss_is_final():
    assignment = first_assignment(4, names(2), guarded=False)

    assert assignment.shadows == {}
    with pytest.raises(NoHolderError, match=r"stage 1: worker-1 is lost and had no shadow.*--resume"):
        promote_shadows(assignment, "worker-1", ["worker-2"], guarded=False)


def test_a_party_that_shadowed_itself_leaves_nobody():
    broken = Assignment({0: OWNER, 1: "worker-1", 2: OWNER}, {1: "worker-1"})

    with pytest.raises(NoHolderError):
        promote_shadows(broken, "worker-1", [], guarded=True)


def test_too_few_workers_hold_several_stages_side_by_side():
    assignment = first_assignment(5, names(2), guarded=True)

    assert assignment.holders == {0: OWNER, 1: "worker-1", 2: "worker-1", 3: "worker-2", 4: OWNER}
    assert assignment.shadows == {1: "worker-2", 2: "worker-2", 3: "worker-1"}


def test_without_a_worker_the_owner_holds_everything():
    assignment = first_assignment(5, [], guarded=True)

    assert set(assignment.holders.values()) == {OWNER}
    assert assignment.shadows == {}


def test_at_the_start_the_owner_sends_every_state():
    roles = roles_of(first_assignment(4, names(2), guarded=True), None)

    assert {role.source for role in roles} == {OWNER}
    assert [role.newcomers for role in roles] == [
        (OWNER,),
        ("worker-1", "worker-2"),
        ("worker-2", "worker-1"),
        (OWNER,),
    ]
