"""A verified pipeline on paper: its wall time by stages, microbatches, line and guard."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.planner.cost.guarded_step import GuardedPipeline, Line, StageDurations

FAST = Line(bytes_per_s=1e12, latency_s=0.0)
MIDDLE = StageDurations(forward=1.0, backward=2.0, audit=2.5, update=0.5, digest=0.25, gradient_bytes=4e6)
END = StageDurations(forward=0.5, backward=1.0, update=0.25)


def pipeline(workers=2, microbatches=8, **changes):
    values = {"line": FAST, "boundary_bytes": 1e6, "is_guarded": False, "audits": 0}
    return GuardedPipeline([END, *[MIDDLE] * workers, END], microbatches, **(values | changes))


@settings(deadline=None)
@given(workers=st.integers(1, 6), microbatches=st.integers(1, 24), schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_without_a_guard_a_step_is_the_longest_stage_and_one_trip_through_the_others(workers, microbatches, schedule):
    # the owner's two ends together take as long as one middle stage
    found = pipeline(workers, microbatches, schedule=schedule).step_seconds()

    busy = microbatches * 3.0 + 0.5
    assert busy <= found <= busy + (workers + 1) * 3.0


def test_one_microbatch_of_one_worker_takes_all_work_one_after_the_other():
    assert pipeline(1, 1).step_seconds() == pytest.approx(0.5 + 1.0 + 0.5 + 1.0 + 2.0 + 1.0 + 0.5)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_guard_adds_at_least_its_audit_and_at_most_all_its_work(workers):
    plain = pipeline(workers).step_seconds()
    guarded = pipeline(workers, is_guarded=True, audits=1).step_seconds()

    # an audit of the last stage that ends is waited for; updates and digests may lie in the next step's bubble
    assert plain + 1.0 <= guarded <= plain + 2 * 2.5 + 2 * 0.5 + 4 * 0.25


@settings(deadline=None)
@given(rate=st.floats(1e5, 1e9), latency=st.floats(0.0, 0.5), workers=st.integers(1, 4))
def test_a_slower_line_never_makes_a_step_shorter(rate, latency, workers):
    line = Line(rate, latency, message_s=0.01)
    steps = [
        pipeline(workers, line=other, is_guarded=True, audits=1).step_seconds()
        for other in (FAST, line, replace(line, bytes_per_s=rate / 2), replace(line, latency_s=latency + 0.1))
    ]

    assert steps[0] <= steps[1] + 1e-9
    assert steps[1] <= min(steps[2:]) + 1e-9


def test_a_line_that_is_slower_than_the_stages_sets_the_pace():
    # 1 MB takes 10 s, a stage 3 s; between none of both ways at once and all of them
    found = pipeline(2, 32, line=Line(1e5, 0.0)).step_seconds()

    assert 32 * 10.0 <= found <= 2 * 32 * 10.0 + 60.0


@pytest.mark.parametrize("workers", [1, 2, 3, 6])
def test_a_second_shadow_makes_a_step_longer_by_its_gradient_and_update_at_most(workers):
    line = Line(4e6, 0.0)
    one, two = (
        pipeline(workers, line=line, is_guarded=True, audits=1, shadows=n).step_seconds(num_steps=8) for n in (1, 2)
    )

    assert all(len({stage, *pipeline(workers, shadows=2).shadows_of(stage)}) <= 3 for stage in range(1, workers + 1))
    # a gradient takes a second on this line, an update with its digest three quarters
    assert one <= two <= one + workers * (1.0 + 0.75)
