"""Spot traces have the published rates, and what is played through them is counted right."""

from dataclasses import replace

import pytest

from phalanx.lab.bench.chaos.goodput import checkpoint_interval
from phalanx.lab.bench.chaos.spot_play import SPOT_ARMS, SpotArm, SpotPlay, SpotWork
from phalanx.lab.bench.chaos.spot_traces import HOUR_S, SPOT_SHAPES, SpotEvent, draw_trace

SHAPE = SPOT_SHAPES["bamboo-10"]
WORK = SpotWork()
END_S = 2 * HOUR_S


def play(arm, events, machines=6, work=WORK):
    played = SpotPlay(work, arm, SHAPE, [f"worker-{n}" for n in range(1, machines + 1)])
    played.play_trace(events, END_S)
    return played


@pytest.mark.parametrize("name", SPOT_SHAPES)
def test_machines_are_taken_as_often_as_published(name):
    shape, taken, machine_s = SPOT_SHAPES[name], 0, 0.0
    for seed in range(20):
        there, last = 12, 0.0
        for event in draw_trace(shape, 12, 24.0, seed):
            machine_s += there * (event.at_s - last)
            there, last = there + (len(event.machines) if event.kind == "came" else -len(event.machines)), event.at_s
            taken += len(event.machines) if event.kind == "taken" else 0
        machine_s += there * (24.0 * HOUR_S - last)

    assert taken / (machine_s / HOUR_S) == pytest.approx(shape.hourly_share, rel=0.15)
    assert sum(shape.groups.values()) == pytest.approx(1.0)


def test_a_trace_is_drawn_again_from_its_seed_and_names_no_machine_twice():
    trace = draw_trace(SHAPE, 6, 200.0, 7)

    assert trace == draw_trace(SHAPE, 6, 200.0, 7) != draw_trace(SHAPE, 6, 200.0, 8)
    came = [event.machines[0] for event in trace if event.kind == "came"]
    gone = [machine for event in trace if event.kind == "taken" for machine in event.machines]
    assert len({*came}) == len(came)
    assert len({*gone}) == len(gone)


@pytest.mark.parametrize("arm", SPOT_ARMS.values())
def test_where_nobody_is_taken_every_step_counts(arm):
    played = play(arm, [])

    step_s = played.step_seconds(played.roles)
    every = checkpoint_interval(WORK.checkpoint_s, SHAPE.life_s(6), step_s)
    assert played.steps == pytest.approx(END_S / (step_s + WORK.checkpoint_s / every), rel=0.01)
    assert (played.lost_steps, played.num_fallbacks, played.num_takeovers) == (0, 0, 0)


def test_a_guard_and_a_second_shadow_make_steps_longer():
    free, one, two = (
        played.step_seconds(played.roles)
        for played in (SpotPlay(WORK, SpotArm(n, cuts=False), SHAPE, ["a", "b", "c"]) for n in range(3))
    )

    assert free < one <= two


def test_two_machines_of_a_stage_cost_a_step_with_two_shadows_and_the_way_to_the_checkpoint_with_one():
    both = [SpotEvent(1000.0, "taken", ("worker-1", "worker-2"))]
    one, two = (play(SpotArm(n, cuts=False), both) for n in (1, 2))

    assert (one.num_fallbacks, two.num_fallbacks, two.num_takeovers) == (1, 0, 1)
    assert one.lost_steps >= two.lost_steps == 0
    assert {*two.roles.holders.values()} == {"owner", *(f"worker-{n}" for n in range(3, 7))}


def test_a_restart_loses_what_no_checkpoint_has_and_its_own_time():
    taken = [SpotEvent(at_s, "taken", (f"worker-{n}",)) for n, at_s in enumerate((1000.0, 1777.0, 2555.0), start=1)]
    arm = SpotArm(0, cuts=True)
    fast, slow = (play(arm, taken, work=replace(WORK, restart_s=restart_s)) for restart_s in (60.0, 600.0))

    assert fast.num_fallbacks == slow.num_fallbacks == 3
    assert fast.lost_steps > 0
    assert fast.steps > slow.steps


def test_layers_are_cut_anew_once_for_a_loss_that_lasts():
    taken = [SpotEvent(1000.0, "taken", ("worker-1", "worker-2"))]
    cut, fixed = (play(SpotArm(2, cuts=cuts), taken) for cuts in (True, False))

    assert (cut.num_cuts, fixed.num_cuts) == (1, 0)
    assert (len(cut.roles.holders), len(fixed.roles.holders)) == (6, 8)
    assert cut.steps > fixed.steps


def test_whoever_comes_takes_stages_of_the_owner_again():
    everybody = tuple(f"worker-{n}" for n in range(1, 7))
    events = [SpotEvent(1000.0, "taken", everybody), SpotEvent(2000.0, "came", ("worker-7",))]
    played = play(SpotArm(2, cuts=False), events)

    assert played.num_fallbacks == 1
    assert {*played.roles.holders.values()} == {"owner", "worker-7"}
    assert played.steps > 0
