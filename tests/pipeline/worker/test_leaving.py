"""A worker hands over what it serves at the first SIGTERM or Ctrl-C, and ends at the second."""

import os
import signal

import pytest

from phalanx.errors import PeerLostError
from phalanx.pipeline.worker.process import _leaving_on_signals
from phalanx.testing import tiny_run
from phalanx.transport import LinkFault


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
    assert ("a second Ctrl-C" in capsys.readouterr().err) is (number == signal.SIGINT)


def test_a_worker_that_no_signal_meets_leaves_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    with _leaving_on_signals(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before[0]

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("was_told_to", [True, False])
def test_a_worker_that_was_to_leave_has_left_when_its_owner_is_gone(make_company, was_told_to):
    company = make_company(tiny_run(3))
    if was_told_to:
        company.ask_to_leave("worker-1")

    company.worker_endpoint("worker-1")._inbox.put_fault(LinkFault("owner", PeerLostError("owner: is gone")))
    company.clock.threads["worker-1"].join(60.0)

    # one that nobody has told to leave looks for its owner again
    assert not company.is_worker_alive("worker-1")
    assert [type(error) for error in company.errors.values()] == ([] if was_told_to else [PeerLostError])
