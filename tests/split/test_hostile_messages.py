"""A client that sends, at every point of a session, every kind of message with neighbouring, absent and huge values."""

import random
import threading
import time

import pytest
from remote_house import CLIENTS, RemoteHouse, Texts

from machine_patience import patience_s
from phalanx.split import ENCLAVE
from phalanx.split.channel.messages import _KINDS
from phalanx.split.channel.turn_messages import AwaitedClients

NEIGHBOURS = [
    *(None, True, -1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**53, 2**63 - 1, -0.0, 0.5, 1e308, "", "a", "x" * 501, "00" * 32),
    *("train", "held_out", "north", "owner", "enclave", [], [1], [[]], {}, {"north": "00" * 32}),
]
PAYLOADS = (b"", b"\0" * 10, b"PHSF" + b"\0" * 60)
PLAUSIBLE = {"what": "train", "nonce": "00" * 32, "digest": "00" * 32, "tokenizer": "ab" * 32, "data": "cd" * 32}
POINTS = ("not met", "met", "ready", "train", "between", "held_out", "concluding")
# what a client may do: leave, be ready, be done, agree; and have frames of its own turn refused
OWN = {"client_left", "client_ready", "turn_done", "concluded"}


def hostile_messages(draw):
    """Kinds with bodies: each field by some neighbouring values, then without it; one field more; and a payload."""
    for kind, message in sorted(_KINDS.items()):
        fields = list(message.model_fields)
        plausible = {field: PLAUSIBLE.get(field, 0) for field in fields}
        bodies = [{**plausible, field: value} for field in fields for value in draw.sample(NEIGHBOURS, 6)]
        bodies += [{name: value for name, value in plausible.items() if name != field} for field in fields]
        bodies += [{**plausible, "more": 1}, *([] if kind in OWN else [plausible])]
        yield from ((kind, body, draw.choice(PAYLOADS)) for body in bodies if kind != "client_left")


class HostileClient:
    """The last client, which is honest but for what it sends at one point; it passes refusals over.

    Attributes:
        refused: Refusals that it was told.
    """

    def __init__(self, session, point):
        self.session, self.point, self.refused = session, point, 0
        self._endpoint, self._kept = session.endpoints[CLIENTS[-1]], []
        self._receive = self._endpoint.receive_item
        self._endpoint.receive_item = lambda timeout_s: self._kept.pop(0) if self._kept else self._receive(timeout_s)

    def attack(self, point):
        """Send all, then wait until the enclave has answered all."""
        if point != self.point:
            return
        draw = random.Random(48)
        messages = list(hostile_messages(draw))
        draw.shuffle(messages)
        for kind, body, payload in messages:
            in_turn = point in ("ready", "train", "between", "held_out") and kind == "upload"
            if not in_turn:
                self._endpoint.send_frame(ENCLAVE, kind, body, (payload,))
        self._endpoint.send_frame(ENCLAVE, "the-last-one", {})
        limit = time.monotonic() + patience_s(60.0)
        while time.monotonic() < limit:
            item = self._receive(1.0)
            if item is not None and item.kind in ("ready", "turn", "conclude"):
                self._kept.append(item)
            self.refused += item is not None and item.kind == "refused"
            if item is not None and item.kind == "refused" and "the-last-one" in item.body["detail"]:
                return
        raise AssertionError("the enclave answers no more")

    def work(self):
        session = self.session
        try:
            self.attack("not met")
            taker, party = session.client(CLIENTS[-1], Texts(len(CLIENTS) - 1))
            self.attack("met")
            party.connection.send_message(session.ready())
            self.attack("ready")
            take_turn = taker._take_turn

            def attacked_turn(turn):
                self.attack(turn.what)
                take_turn(turn)
                self.attack("between")
                # once is enough
                self.point = "" if self.point in (turn.what, "between") else self.point

            taker._take_turn = attacked_turn
            taker.take_turns()
            self.attack("concluding")
            taker.conclude_session(session.house.identities[ENCLAVE].public)
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            session.failures.append(exc)


def play(source, directory, point):
    """What the owner is told in a session: two steps, held-out scores, one step more; and the refusals."""
    with RemoteHouse(source, directory).open() as session:
        for name in CLIENTS[:-1]:
            session.join(name)
        client = HostileClient(session, point)
        session.threads.append(threading.Thread(target=client.work, daemon=True))
        session.threads[-1].start()
        lead = session.lead(lambda message: isinstance(message, AwaitedClients))
        seen = [lead.train_step(step, step) for step in range(2)]
        scores = lead.request_scores(2)
        seen.append(lead.train_step(2, 2))
        lead.compare_transcripts(session.house.identities[ENCLAVE].public)
        lead.end_session()
        session.wait()
        assert not session.failures
    return [(one.loss, one.norm, one.num_targets) for one in seen], (scores.loss, scores.classes), client.refused


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    return play(source, tmp_path_factory.mktemp("undisturbed"), "")


@pytest.mark.parametrize("point", POINTS)
def test_no_message_of_a_client_ends_the_enclave_or_changes_a_bit_of_what_others_are_told(
    source, tmp_path, undisturbed, point
):
    *seen, refused = play(source, tmp_path, point)

    assert (*seen,) == undisturbed[:2]
    assert refused > 200
