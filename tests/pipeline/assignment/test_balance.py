"""Stages move away from a slow worker, when the step gets much faster by it, and stay otherwise."""

import math
from dataclasses import replace

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.assignment.assignment import first_assignment
from phalanx.pipeline.assignment.rebalance import PaceMeter, rebalance_assignment, worker_seconds
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import UpdateReport
from phalanx.telemetry import BUSY
from phalanx.testing import Actor, rewrite_only, tiny_run

WORKERS = ["worker-1", "worker-2", "worker-3"]
EVERY = 5


def held(assignment):
    return {worker: [s for s, who in assignment.holders.items() if who == worker] for worker in WORKERS}


def measured(balance, assignment, seconds, workers=WORKERS):
    """Let one measurement pass in which a step took each worker so many seconds."""
    for step in range(EVERY + 1):
        lopsided = balance.is_unbalanced(step, assignment, workers, {w: step * s for w, s in seconds.items()})
    return lopsided


@pytest.fixture
def even():
    """Six middle stages, two for each worker."""
    return first_assignment(8, WORKERS, guarded=True)


def test_where_all_are_as_fast_nothing_moves(even):
    assert not measured(PaceMeter([1.0] * 8, EVERY), even, {"worker-1": 1.0, "worker-2": 1.2, "worker-3": 0.9})


def test_a_slow_worker_keeps_what_it_can_do_in_time(even):
    balance = PaceMeter([1.0] * 8, EVERY)

    assert measured(balance, even, {"worker-1": 5.0, "worker-2": 1.0, "worker-3": 1.0})

    new = rebalance_assignment(even, WORKERS, guarded=True, costs=balance.costs, pace=balance.pace)
    assert {worker: len(stages) for worker, stages in held(new).items()} == {
        "worker-1": 0,
        "worker-2": 3,
        "worker-3": 3,
    }
    assert set(held(even)["worker-2"]) <= set(held(new)["worker-2"])
    assert not measured(balance, new, {"worker-1": 0.0, "worker-2": 1.5, "worker-3": 1.5})


def test_a_worker_that_holds_nothing_any_more_is_not_forgotten_to_be_slow(even):
    balance = PaceMeter([1.0] * 8, EVERY)
    measured(balance, even, {"worker-1": 5.0, "worker-2": 1.0, "worker-3": 1.0})

    again = rebalance_assignment(even, [*WORKERS, "worker-4"], guarded=True, costs=balance.costs, pace=balance.pace)

    assert "worker-1" not in again.holders.values()


def test_stages_count_by_their_work(even):
    costs = [1.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    new = rebalance_assignment(even, WORKERS, guarded=True, costs=costs)

    assert max(worker_seconds(new.holders, WORKERS, costs).values()) == 6.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_pace_that_makes_no_sense_moves_nothing(even, seconds):
    assert not measured(PaceMeter([1.0] * 8, EVERY), even, {"worker-1": seconds, "worker-2": 1.0, "worker-3": 1.0})


def test_nothing_is_measured_over_a_change_of_roles(even):
    balance, busy = PaceMeter([1.0] * 8, EVERY), {"worker-1": 50.0, "worker-2": 1.0, "worker-3": 1.0}
    other = rebalance_assignment(even, WORKERS[1:], guarded=True)

    assert not balance.is_unbalanced(0, even, WORKERS, dict.fromkeys(WORKERS, 0.0))
    assert not balance.is_unbalanced(EVERY, other, WORKERS, busy)


def test_zero_switches_it_off(even):
    assert not measured(PaceMeter([1.0] * 8, 0), even, {"worker-1": 50.0, "worker-2": 1.0, "worker-3": 1.0})


def slow(factor):
    """A worker that reports that it was busy so many times as long as it had to be."""

    def rewrite(outgoing, applied):
        changed = applied.model_copy(update={"usage": {**applied.usage, BUSY: factor * (1.0 + applied.step)}})
        return [replace(outgoing, message=changed)]

    return Actor(rewrite=rewrite_only(UpdateReport, rewrite))


def test_a_run_whose_stages_move_in_the_middle_has_the_same_bits(make_company, honest_digest):
    run = tiny_run(pipeline=PipelineConfig(stages=4, step_timeout_s=30.0), guard=GuardConfig())
    # nobody is believed to have been busy for longer than the run has lasted, and a step takes longer than this
    company = make_company(run, {1: slow(9e-3), 2: slow(1e-3)})
    company.engine._pace_meter = PaceMeter([1.0] * 4, 2)

    company.run(6)

    (moved,) = company.event_bodies("stages_moved")
    assert moved["to"] == {"1": "worker-2"}
    assert company.engine.stage_holders[1] == "worker-2"
    assert (company.verdicts, company.lost) == ([], [])
    assert company.engine.stage_holders[0] == OWNER
    assert company.weights_digest() == honest_digest(run, 6)
