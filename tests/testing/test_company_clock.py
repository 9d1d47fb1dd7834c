"""A simulation's time: a party that computes, or gets no CPU, is not silent; one with nothing to say is, at once."""

import threading

import pytest

from phalanx.pipeline import PipelineConfig
from phalanx.pipeline.protocol.messages import Assign, Commit, Fault
from phalanx.testing import Actor, CompanyClock, MemoryCompany, Stall, rewrite_only, tiny_run
from phalanx.testing.endpoint import MemoryWire

LONG_S = 0.25
"""Longer than the patience of these runs."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def company(tmp_path, cache):
    """Make a company of two workers, with an owner of very little or of very much patience."""

    def make(actors=None, patience_s=0.05):
        pipeline = PipelineConfig(stages=4, patience_s=patience_s, step_timeout_s=86400.0)
        return MemoryCompany(tiny_run(pipeline=pipeline), tmp_path, actors, cache=cache)

    return make


def in_step(number, act):
    """Do something before the commitment of one step is sent, or instead."""
    return rewrite_only(Commit, lambda outgoing, commit: act(outgoing) if commit.step == number else [outgoing])


def slowly(outgoing):
    # any blocking but a stall: what a thread that is not scheduled looks like from outside
    threading.Event().wait(LONG_S)
    return [outgoing]


def test_where_nobody_is_silent_no_time_passes(company):
    with company() as honest:
        honest.run(3)

        assert honest.clock.awake_seconds() == 0.0
        assert honest.lost == []


def test_a_party_that_gets_no_cpu_for_longer_than_patience_is_not_missed(company):
    with company({"worker-1": Actor(rewrite=in_step(1, slowly))}) as slow:
        slow.run(2)

        assert (slow.lost, slow.clock.awake_seconds()) == ([], 0.0)


def test_no_time_passes_while_a_frame_is_under_way(company, monkeypatch):
    deliver, frames = MemoryWire.deliver_frame, []

    def sometimes_slowly(self, receiver, raw, timeout_s):
        frames.append(receiver)
        if len(frames) % 20 == 0:
            threading.Event().wait(LONG_S)
        return deliver(self, receiver, raw, timeout_s)

    with company() as honest:
        monkeypatch.setattr(MemoryWire, "deliver_frame", sometimes_slowly)
        honest.run(1)

        assert (honest.lost, honest.clock.awake_seconds()) == ([], 0.0)
        assert len(frames) >= 20


def test_patience_is_at_its_end_at_once_where_nobody_has_anything_to_do(company):
    with company({"worker-1": Actor(rewrite=in_step(1, lambda outgoing: []))}, patience_s=30.0) as company:
        company.run(2)

        assert company.lost == ["worker-1"]
        assert 30.0 < company.clock.awake_seconds() < 4 * 30.0


def test_a_stall_is_silence_wherever_it_is(company):
    stall = Stall()

    def hang(outgoing):
        stall.wait_until_over(60.0)
        return [outgoing]

    with company({"worker-2": Actor(rewrite=in_step(1, hang))}, patience_s=30.0) as company:
        company.run(2)
        stall.release_party()

        assert company.lost == ["worker-2"]
        assert company.clock.awake_seconds() > 30.0


def test_a_stall_that_is_over_is_no_silence_even_before_its_party_is_awake(company):
    stall = Stall()
    stall.release_party()

    def hang(assign: Assign):
        stall.wait_until_over(60.0)

    with company({"worker-2": Actor(hear=hang)}) as honest:
        honest.run(1)

        assert (honest.lost, honest.clock.awake_seconds()) == ([], 0.0)


def test_the_clock_tells_before_it_passes():
    clock, seen = CompanyClock(), []
    clock.on_tick.append(lambda: seen.append(clock.awake_seconds()))

    clock.pass_time(0.5)
    clock.pass_time(0.25)

    assert seen == [0.0, 0.5]
    assert clock.awake_seconds() == clock.wall_seconds() == 0.75


def test_whoever_talks_at_every_tick_is_heard_at_every_tick(company):
    complaint = Fault(epoch=0, about="worker-2", error="FrameError", reason="so slow").model_dump(mode="json")
    with company({"worker-1": Actor(rewrite=in_step(0, lambda outgoing: []))}, patience_s=64 * 0.05) as company:
        company.clock.on_tick.append(
            lambda: company.worker_endpoint("worker-2").send_frame("owner", "fault", complaint)
        )
        company.run(1)

        assert company.lost == ["worker-1"]
        # all are counted, and the sixty-fourth is written down, as is every power of two
        numbers = [body["number"] for body in company.event_bodies("fault")]
        assert max(numbers) >= 64
