"""A party sends without end: its reader still looks up, at deadlines and silences."""

import pytest

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.security.crypto import Peer
from phalanx.transport import Allowances, CheckedFrame, Endpoint, SignedHeader


class Flooded(Endpoint):
    """An endpoint at which another frame has always arrived."""

    party_name, session_name, public_peer = OWNER, "run", Peer(OWNER, bytes(32))

    def __init__(self, kind):
        self._kind = kind
        self.taken = 0
        self.allowances = Allowances()

    @property
    def known_peers(self):
        return {}

    def receive_item(self, timeout_s):
        self.taken += 1
        assert self.taken < 1_000_000, "nobody looks up any more"
        return CheckedFrame("worker-1", self._kind, {}, memoryview(b""), SignedHeader(b"{}", b""))


@pytest.mark.parametrize("kind", ["carry", "nonsense"])
def test_a_flood_does_not_keep_the_owner_from_looking_up(kind):
    mail = Mailbox(Flooded(kind))

    assert len(list(mail.drain_messages())) <= 1024


def test_frames_that_are_only_handed_on_do_not_either(monkeypatch):
    mail = Mailbox(Flooded("carry"))
    monkeypatch.setattr(Mailbox, "_take_item", lambda self, item: None)

    assert not mail.wait_for_mail(0.0)
