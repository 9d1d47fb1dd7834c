"""Which party gets which stage, by memory and numeric class: at the start, after a loss, when workers come and go."""

import pytest
from hand_made import OWNER, make_world

from phalanx.errors import ConfigError, NoHolderError
from phalanx.pipeline.assignment.rebalance import PaceMeter
from phalanx.pipeline.membership.admission import Admission
from phalanx.pipeline.membership.members import Members
from phalanx.pipeline.owner.placement import Placement
from phalanx.pipeline.processes.own_memory import ALONE

WORKERS = ["worker-1", "worker-2", "worker-3"]


def make_placement(model_cache, rooms=None, classes=None, **guard):
    plan = make_world(model_cache, **guard).plan
    members = Members(WORKERS, Admission(plan), addresses={}, certificates={})
    members.memory_by_party = {name: {ALONE: size} for name, size in (rooms or {}).items()}
    members.admission.classes = dict.fromkeys((OWNER, *WORKERS), OWNER) | (classes or {})
    return Placement(plan, members)


@pytest.fixture
def placement(model_cache):
    return make_placement(model_cache)


def test_middle_stages_go_to_workers_in_order_and_a_spare_shadows_first(placement):
    found = placement.assign_first(WORKERS, may_exceed=False)

    assert found.holders == {0: OWNER, 1: "worker-1", 2: "worker-2", 3: OWNER}
    assert found.shadows[1] == "worker-3"
    assert all(found.shadows[stage] != found.holders[stage] for stage in (1, 2))


def test_a_shadow_is_of_its_stages_class_where_a_worker_of_it_is_there(model_cache):
    placement = make_placement(model_cache, classes={"worker-1": "b", "worker-2": "b", "worker-3": "c"})

    found = placement.assign_first(WORKERS, may_exceed=False)

    assert found.shadows == {1: "worker-2", 2: "worker-1"}


def test_a_stage_of_a_class_of_its_own_keeps_the_shadow_that_it_would_have_had(model_cache, placement):
    alone = make_placement(model_cache, classes={"worker-1": "b"})

    assert (
        alone.assign_first(WORKERS, may_exceed=False).shadows[1]
        == placement.assign_first(WORKERS, may_exceed=False).shadows[1]
    )


def test_a_run_does_not_begin_with_more_than_there_is_room_for_and_goes_on_with_it(model_cache):
    nothing = dict.fromkeys((OWNER, *WORKERS), 1)
    placement = make_placement(model_cache, rooms=nothing)

    with pytest.raises(ConfigError, match="memory"):
        placement.assign_first(WORKERS, may_exceed=False)
    found = placement.assign_first(WORKERS, may_exceed=True)
    assert found.holders.keys() == {0, 1, 2, 3}
    assert placement.list_shortages(found)


def test_a_worker_without_room_gets_no_stage_where_others_have_some(model_cache):
    placement = make_placement(model_cache, rooms={"worker-1": 1})

    found = placement.assign_first(WORKERS, may_exceed=False)

    assert found.copies_of("worker-1") == ()
    assert placement.list_shortages(found) == []


def test_the_shadow_takes_over_and_another_one_shadows(placement):
    old = placement.assign_first(WORKERS, may_exceed=False)

    new = placement.assign_without(old, "worker-1", ["worker-2", "worker-3"])

    assert new.holders[1] == old.shadows[1]
    assert "worker-1" not in {*new.holders.values(), *new.shadows.values()}
    assert new.shadows[1] != new.holders[1]


def test_without_a_guard_nobody_shadows_and_a_loss_leaves_no_holder(model_cache):
    placement = make_placement(model_cache, mode="off")
    old = placement.assign_first(WORKERS, may_exceed=False)
    assert old.shadows == {}

    with pytest.raises(NoHolderError):
        placement.assign_without(old, "worker-1", ["worker-2", "worker-3"])


@pytest.mark.parametrize("rooms", [{}, {"worker-1": 1}], ids=["room", "none"])
def test_stages_move_away_from_a_worker_that_has_more_than_it_has_room_for(model_cache, placement, rooms):
    old = placement.assign_first(WORKERS, may_exceed=False)
    tight, balance = make_placement(model_cache, rooms=rooms), PaceMeter([1.0] * 4, 0)
    assert not tight.is_crowded(old, WORKERS, balance)

    assert bool(tight.list_shortages(old)) is bool(rooms)
    assert tight.is_crowded(old, WORKERS, balance) is bool(rooms)
    if rooms:
        assert tight.assign_regrouped(old, WORKERS, balance).copies_of("worker-1") == ()


def test_where_nobody_has_room_nothing_is_gained_by_moving(model_cache, placement):
    old = placement.assign_first(WORKERS, may_exceed=False)
    tight = make_placement(model_cache, rooms=dict.fromkeys((OWNER, *WORKERS), 1))

    assert tight.list_shortages(old)
    assert not tight.is_crowded(old, WORKERS, PaceMeter([1.0] * 4, 0))
