"""Waiting: what is left of a thread's time when its work is taken away."""

import threading
import time

import pytest

from phalanx.lab.bench.measure.resident import ThreadSample


def told() -> ThreadSample:
    before = ThreadSample.sample_thread()
    if before.taken_s is None:
        pytest.skip("this system does not tell the scheduler's figures of a thread")
    return before


def test_a_thread_that_waits_for_another_has_waited():
    before, event = told(), threading.Event()

    def set_later():
        while not event._cond._waiters:
            time.sleep(0.001)
        time.sleep(0.1)
        event.set()

    other = threading.Thread(target=set_later)
    other.start()
    event.wait()
    after = ThreadSample.sample_thread()
    other.join()

    # how much longer, the scheduler decides
    assert 0.09 < after.waited_since(before) <= after.wall_s - before.wall_s


def test_a_thread_that_works_has_not_waited_however_busy_the_machine_is():
    before, used = told(), time.thread_time()
    while time.thread_time() - used < 0.05:
        pass

    after = ThreadSample.sample_thread()
    assert after.waited_since(before) <= 0.2 * (after.wall_s - before.wall_s) + 0.01


def test_what_the_system_does_not_tell_is_none():
    assert ThreadSample(2.0, None).waited_since(ThreadSample(1.0, 0.5)) is None
    assert ThreadSample(2.0, 0.5).waited_since(ThreadSample(1.0, None)) is None
    assert ThreadSample(2.0, 1.0).waited_since(ThreadSample(1.0, 0.75)) == 0.75
