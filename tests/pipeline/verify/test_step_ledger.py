import json
import math

from phalanx.config import canonical_json
from phalanx.pipeline.protocol.messages import Activation, Commit, SentDigest
from phalanx.pipeline.protocol.signed import Statement
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.transport import SignedHeader

BODY = {"epoch": 1, "step": 5, "source": 0, "target": 1, "direction": "forward", "microbatch": 2}
AA, BB = "aa" * 32, "bb" * 32


def said(digest=AA, **changes):
    body = BODY | {"dtype": "float32", "shape": [1, 1, 1]} | changes
    fields = {
        "run": "run",
        "kind": "tensor",
        "sender": "worker-1",
        "receiver": "worker-2",
        "sequence": 0,
        "previous": AA,
        "payload_size": 4,
        "payload_digest": digest,
        "body": body,
    }
    return Statement(Activation.model_validate_json(json.dumps(body)), SignedHeader(canonical_json(fields), bytes(64)))


def commit(stage=1, sent=(), norm_squared=1.0):
    return Commit(epoch=1, step=5, stage=stage, received=(), sent=sent, norm_squared=norm_squared, gradient="ab" * 32)


def test_what_a_stage_received_is_known_by_sender_direction_and_microbatch():
    ledger = StepLedger(5, 1)

    ledger.add_commit(commit(), None, [said(), said(BB, source=2, direction="backward")])

    assert {known.shown_by for known in ledger.messages.values()} == {"worker-2"}
    assert {key: known.digest for key, known in ledger.messages.items()} == {
        (0, "forward", 2): AA,
        (2, "backward", 2): BB,
    }


def test_what_a_stage_says_that_it_sent_is_found_again():
    ledger = StepLedger(5, 1)
    ledger.add_commit(commit(sent=(SentDigest(direction="forward", microbatch=2, digest="cc" * 32),)), None)

    assert ledger.said_digest((1, "forward", 2)) == "cc" * 32
    assert ledger.said_digest((1, "backward", 2)) is None
    assert ledger.said_digest((1, "forward", 3)) is None
    assert ledger.said_digest((2, "forward", 2)) is None


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
