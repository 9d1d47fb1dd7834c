"""What the signed parts of a transfer prove: the whole of one transfer, in order, or nothing."""

import pytest

from phalanx.errors import PeerRefusedError
from phalanx.pipeline.protocol.messages import Bulk
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.pipeline.protocol.tensor_stream import whole_transfer
from phalanx.security.crypto import Identity
from phalanx.transport import HeaderFields, sign_header

IDENTITIES = {name: Identity.without_certificate(name) for name in ("alice", "bob")}
ABOUT = Bulk.model_validate({"epoch": 2, "step": 5, "stage": 1, "purpose": "gradient", "offset": 0, "total": 0})
SIZE = 24


def peer(name):
    if name not in IDENTITIES:
        raise PeerRefusedError(f"{name}: is not a party")
    return IDENTITIES[name].public


def part(offset, total=2 * SIZE, **changes):
    """The header of one part of 24 bytes, signed by alice for bob."""
    fields = {
        "run": "run-1",
        "kind": "bulk",
        "sender": "alice",
        "receiver": "bob",
        "sequence": 7,
        "previous": "aa" * 32,
    }
    payload = {"payload_size": SIZE, "payload_digest": "bb" * 32}
    body = {**ABOUT.model_dump(mode="json"), "offset": offset, "total": total} | changes
    return to_signed(sign_header(IDENTITIES["alice"], HeaderFields(**fields, **payload, body=body)))


def is_whole(*shown):
    return whole_transfer(StatementReader("run-1", peer), shown, ABOUT, ("alice", "bob")) is not None


def test_all_parts_in_order_are_a_whole_transfer():
    assert is_whole(part(0), part(SIZE))


@pytest.mark.parametrize(
    "shown",
    [
        (),
        (part(0),),
        (part(SIZE), part(0)),
        (part(0), part(0)),
        (part(0), part(2 * SIZE)),
        (part(0), part(SIZE, total=3 * SIZE)),
        (part(0, total=SIZE), part(SIZE)),
        (part(0), part(SIZE, step=4)),
        (part(0), part(SIZE, epoch=1)),
        (part(0), part(SIZE, stage=2)),
        (part(0), part(SIZE, purpose="undo")),
    ],
    ids=[
        "none",
        "one missing",
        "order",
        "twice",
        "a gap",
        "two totals",
        "too much",
        "step",
        "epoch",
        "stage",
        "purpose",
    ],
)
def test_anything_else_proves_nothing(shown):
    assert not is_whole(*shown)
