"""Ctrl-C and SIGTERM wait for what must be done wholly, and end a run right after it."""

import os
import signal
import threading

import pytest

from phalanx.interrupts import allow_interrupts, hold_interrupts
from phalanx.security.audit import AuditLog, verify_log
from phalanx.security.crypto import Identity

OWNER = Identity.without_certificate("owner")
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def _listens():
    """Python's own handler of Ctrl-C, also where the tests were started in the background and must not heed it."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def test_a_run_in_the_background_heeds_no_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with allow_interrupts():
        signal.raise_signal(signal.SIGINT)

        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@SIGNALS
def test_a_signal_ends_a_run_at_once_outside_of_a_block(number):
    done = []
    with pytest.raises(KeyboardInterrupt), allow_interrupts():
        signal.raise_signal(number)
        done.append("more")

    assert done == []


@SIGNALS
def test_a_signal_waits_for_the_end_of_the_outermost_block(number):
    done = []
    with allow_interrupts():
        with pytest.raises(KeyboardInterrupt), hold_interrupts():
            with hold_interrupts():
                signal.raise_signal(number)
                done.append("inner")
            done.append("outer")
        with hold_interrupts():
            done.append("no signal is told twice")

    assert done == ["inner", "outer", "no signal is told twice"]


def test_a_block_that_fails_lets_the_next_signal_through():
    with allow_interrupts():
        with pytest.raises(ValueError, match="broken"), hold_interrupts():
            raise ValueError("broken")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_callers_own_handlers_stay_or_come_back():
    taken = []
    old = signal.signal(signal.SIGINT, lambda *_: taken.append("mine"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with allow_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) is not before
    finally:
        signal.signal(signal.SIGINT, old)

    assert taken == ["mine"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_have_no_handlers_to_change():
    found = []

    def run():
        with allow_interrupts(), hold_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [before]


@SIGNALS
def test_an_interrupted_line_of_the_log_is_whole_and_the_next_one_follows_it(tmp_path, monkeypatch, number):
    path, write = tmp_path / "events.jsonl", os.write

    def interrupted(fd, data):
        written = write(fd, data)
        monkeypatch.undo()
        signal.raise_signal(number)
        return written

    with AuditLog(path, OWNER, "run") as log, allow_interrupts():
        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append_event("checkpoint", {"step": 3})
        log.append_event("run_stopped", {"status": "interrupted"})
        head = log.current_head

    assert verify_log(path, OWNER.public, head, "run").kinds == {"checkpoint": 1, "run_stopped": 1}
