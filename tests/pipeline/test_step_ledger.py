import json
import math

import pytest

from phalanx.config import canonical_json
from phalanx.errors import FrameError
from phalanx.pipeline.ledger import StepLedger
from phalanx.pipeline.messages import Commit, Sent, Signed

BODY = {"epoch": 1, "step": 5, "source": 0, "target": 1, "direction": "forward", "microbatch": 2}
AA, BB = "aa" * 32, "bb" * 32


def header(digest=AA, **changes):
    fields = {
        "run": "run",
        "kind": "tensor",
        "sender": "worker-1",
        "receiver": "worker-2",
        "sequence": 0,
        "previous": AA,
        "payload_size": 4,
        "payload_digest": digest,
        "body": BODY | {"dtype": "float32", "shape": [1, 1, 1]} | changes,
    }
    return Signed(header=canonical_json(fields).decode(), signature="00")


def commit(stage=1, received=(), sent=(), norm_squared=1.0):
    return Commit(epoch=1, step=5, stage=stage, received=received, sent=sent, norm_squared=norm_squared, gradient="g")


def test_what_a_stage_received_is_known_by_sender_direction_and_microbatch():
    ledger = StepLedger(5, 1)

    ledger.add_commit(commit(received=(header(), header(BB, source=2, direction="backward"))), None)

    assert {key: known.digest for key, known in ledger.messages.items()} == {
        (0, "forward", 2): AA,
        (2, "backward", 2): BB,
    }


def test_what_a_stage_says_that_it_sent_is_found_again():
    ledger = StepLedger(5, 1)
    ledger.add_commit(commit(sent=(Sent(direction="forward", microbatch=2, digest="cc"),)), None)

    assert ledger.said_digest((1, "forward", 2)) == "cc"
    assert ledger.said_digest((1, "backward", 2)) is None
    assert ledger.said_digest((1, "forward", 3)) is None
    assert ledger.said_digest((2, "forward", 2)) is None


@pytest.mark.parametrize("field", ["epoch", "step", "target"])
def test_a_header_of_another_attempt_step_or_stage_is_refused_and_nothing_is_kept(field):
    ledger = StepLedger(5, 1)

    with pytest.raises(FrameError, match="header of another step or stage"):
        ledger.add_commit(commit(received=(header(), header(**{field: 9}))), None)

    assert (ledger.commits, ledger.messages) == ({}, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "7",
        '{"body": 7}',
        '{"body": {}}',
        json.dumps({"body": BODY}),
        json.dumps({"payload_digest": "aa", "body": BODY | {"source": "one"}}),
        json.dumps({"payload_digest": "aa", "body": BODY | {"microbatch": None}}),
    ],
)
def test_a_header_that_is_none_is_refused(text):
    with pytest.raises(FrameError):
        StepLedger(5, 1).add_commit(commit(received=(Signed(header=text, signature="00"),)), None)


def test_the_norm_of_the_model_adds_up_the_stages():
    ledger = StepLedger(5, 1)
    for stage, square in enumerate([9.0, 16.0, 144.0]):
        ledger.add_commit(commit(stage, norm_squared=square), None)

    assert ledger.total_norm() == 13.0


def test_the_norm_does_not_depend_on_who_commits_first():
    squares = {0: 1e16, 1: 1.0, 2: 1.0, 3: 1e-9}
    norms = set()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        ledger = StepLedger(5, 1)
        for stage in order:
            ledger.add_commit(commit(stage, norm_squared=squares[stage]), None)
        norms.add(ledger.total_norm())

    assert len(norms) == 1


def test_one_gradient_that_is_not_finite_makes_the_whole_norm_so():
    ledger = StepLedger(5, 1)
    ledger.add_commit(commit(0), None)
    ledger.add_commit(commit(1, norm_squared=None), None)

    assert math.isnan(ledger.total_norm())


def test_a_header_of_a_microbatch_that_another_party_serves_is_refused():
    ledger = StepLedger(5, 1)

    with pytest.raises(FrameError, match="microbatch 2, which is not the sender's to serve"):
        ledger.add_commit(commit(received=(header(),)), None, (1, 3))

    assert (ledger.commits, ledger.messages) == ({}, {})
