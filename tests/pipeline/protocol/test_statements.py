"""The one door for what parties pass on: this session, this epoch, this sender, this receiver, or nothing."""

import json
import re
from pathlib import Path

import pytest

from phalanx.config import canonical_json
from phalanx.errors import FrameError, PeerRefusedError, SignatureError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import Activation, Commit, PassedOnHeader
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.security.crypto import Identity
from phalanx.transport import HeaderFields, sign_header

PIPELINE = Path(__file__).parents[3] / "src" / "phalanx" / "pipeline"
SESSION = "run-1"
IDENTITIES = {name: Identity.without_certificate(name) for name in ("owner", "alice", "bob", "eve")}
BODY = {
    "epoch": 2,
    "step": 5,
    "microbatch": 1,
    "direction": "forward",
    "source": 1,
    "target": 2,
    "dtype": "float32",
    "shape": [1, 2, 3],
}
PLACE = {"step": 5, "microbatch": 1, "direction": "forward", "source": 1}
# alice holds stage 1, bob stage 2
ASSIGNMENT = Assignment({0: "owner", 1: "alice", 2: "bob", 3: "owner"}, {1: "bob", 2: "alice"})


def peer(name):
    if name not in IDENTITIES:
        raise PeerRefusedError(f"{name}: is not a party")
    return IDENTITIES[name].public


STATEMENTS = StatementReader(SESSION, peer)


def header(signer="alice", body=BODY, kind="tensor", **changes):
    fields = {
        "run": SESSION,
        "kind": kind,
        "sender": signer,
        "receiver": "bob",
        "sequence": 7,
        "previous": "aa" * 32,
        "payload_size": 24,
        "payload_digest": "bb" * 32,
        "body": body,
    }
    return to_signed(sign_header(IDENTITIES[signer], HeaderFields(**fields | changes)))


def opened(signed, epoch=2, place=None, link=ASSIGNMENT.link_of):
    return STATEMENTS.open_statement(signed, Activation, epoch, PLACE if place is None else place, link)


def test_what_the_neighbour_said_to_the_stage_opens():
    said = opened(header())

    assert (said.message.step, said.payload_digest, said.size_bytes) == (5, "bb" * 32, 24)
    assert said.header.fields.sender == "alice"


@pytest.mark.parametrize(
    ("signed", "complaint"),
    [
        (header(run="run-0"), "belongs to another session: 'run-0'"),
        (header(run="run-1-and-more"), "another session"),
        (header(receiver="eve"), "from alice to eve, expected from alice to bob"),
        (header(signer="eve"), "from eve to bob, expected from alice to bob"),
        (header(body=BODY | {"epoch": 1}), "'epoch': 1"),
        (header(body=BODY | {"epoch": 3}), "'epoch': 3"),
        (header(body=BODY | {"step": 4}), "'step': 4"),
        (header(body=BODY | {"microbatch": 0}), "'microbatch': 0"),
        (header(body=BODY | {"direction": "backward"}), "'direction': 'backward'"),
        (header(body=BODY | {"source": 0}), "'source': 0"),
        (header(body=BODY | {"target": 3}), "no link"),
        (header(body=BODY | {"target": 1}), "no link"),
        (header(kind="commit"), "commit"),
        (header(kind="leave", body={"epoch": 2}), "has kind 'leave', expected 'tensor'"),
        (header(kind="no-such"), "no-such"),
    ],
)
def test_a_genuine_header_of_anything_else_opens_nothing(signed, complaint):
    with pytest.raises(FrameError, match=re.escape(complaint)):
        opened(signed)


def test_a_header_that_its_sender_did_not_sign_opens_nothing():
    genuine = header()
    fields = json.loads(genuine.header)
    altered = PassedOnHeader(
        header=canonical_json(fields | {"payload_digest": "cc" * 32}).decode(), signature=genuine.signature
    )
    by_another = header(signer="eve")
    renamed = PassedOnHeader(
        header=canonical_json(json.loads(by_another.header) | {"sender": "alice"}).decode(),
        signature=by_another.signature,
    )

    for forged in (altered, renamed, genuine.model_copy(update={"signature": "00" * 64})):
        with pytest.raises(SignatureError):
            opened(forged)


def test_a_header_of_who_takes_no_part_opens_nothing():
    stranger = Identity.without_certificate("mallory")
    fields = HeaderFields(**json.loads(header().header) | {"sender": "mallory"})

    with pytest.raises(SignatureError, match="mallory as its sender, which is not in the run"):
        opened(to_signed(sign_header(stranger, fields)), link=lambda message: (None, "bob"))


@pytest.mark.parametrize(
    "signed",
    [
        PassedOnHeader(header="", signature=""),
        PassedOnHeader(header="no JSON", signature="00"),
        PassedOnHeader(header="7", signature="00"),
        PassedOnHeader(header="{}", signature="00" * 64),
        PassedOnHeader(header=header().header, signature="no hex"),
        PassedOnHeader(header=header().header + " ", signature=header().signature),
        PassedOnHeader(header='{"body": {}}', signature="00" * 64),
        header(body=BODY | {"microbatch": None}),
        header(body=BODY | {"surprise": 1}),
        header(body={}),
    ],
)
def test_a_malformed_header_opens_nothing(signed):
    with pytest.raises(FrameError):
        opened(signed)


@pytest.mark.parametrize("signature", ["", "00", "00" * 63, "00" * 65])
def test_a_signature_of_another_length_is_none(signature):
    with pytest.raises((FrameError, SignatureError)):
        opened(header().model_copy(update={"signature": signature}))


def test_a_carried_frame_is_bound_as_well():
    assert STATEMENTS.open_frame_header(header(), ("alice", "bob")).fields.kind == "tensor"
    for signed, link in ((header(run="run-0"), (None, None)), (header(), ("eve", None)), (header(), (None, "eve"))):
        with pytest.raises(FrameError):
            STATEMENTS.open_frame_header(signed, link)


def test_another_kind_of_message_is_bound_the_same_way():
    body = {"epoch": 2, "step": 5, "stage": 1, "received": [], "sent": [], "norm_squared": 1.0, "gradient": "ab" * 32}
    signed = header(kind="commit", body=body, receiver="owner")

    said = STATEMENTS.open_statement(signed, Commit, 2, {"step": 5, "stage": 1}, lambda commit: ("alice", "owner"))

    assert said.message.gradient == "ab" * 32


def test_nothing_else_in_the_pipeline_opens_what_was_passed_on():
    """A header becomes an object, is verified and is read as a message in one file, and nowhere beside it."""
    patterns = (
        r"SignedHeader\(",
        r"\.verify_(sender|signature)\(",
        r"parse_message\([a-z_.]*fields\.kind",
        r"json\.loads\([a-z_.]*header",
    )
    found = {
        path.name: [pattern for pattern in patterns if re.search(pattern, path.read_text(encoding="utf-8"))]
        for path in PIPELINE.rglob("*.py")
    }

    assert found.pop("signed.py") == [patterns[0], patterns[1], patterns[2]]
    # a frame out of the owner's hands, and a header of evidence, which the door has opened before
    assert found.pop("mailbox.py") == found.pop("checked.py") == [patterns[2]]
    # the same header once more: whether its values are within their bounds
    assert found.pop("forgery.py") == [patterns[2]]
    assert {name for name, uses in found.items() if uses} == set()
