"""A worker hands over what it serves at the first SIGTERM or Ctrl-C, and ends at the second."""

import os
import signal

import pytest

from phalanx.pipeline.worker.process import _leaving_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_to_leave_and_the_second_one_counts(number, capsys):
    asked = []
    old = signal.signal(number, lambda *_: asked.append("ended"))
    try:
        with _leaving_on_signals(lambda: asked.append("leave")):
            os.kill(os.getpid(), number)
            assert asked == ["leave"]
            os.kill(os.getpid(), number)
            assert asked == ["leave", "ended"]
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, old)

    assert asked == ["leave", "ended", "ended"]
    assert ("Ctrl-C again" in capsys.readouterr().err) is (number == signal.SIGINT)


def test_a_worker_that_no_signal_meets_leaves_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    with _leaving_on_signals(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before[0]

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
