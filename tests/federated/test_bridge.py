"""An engine that carries frames can read them, keep them back or end a conversation, and change nothing."""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest
from bridge_scene import LIMITS, BridgeScene, ForwardingEngine
from flower_scene import FlowerEngine
from rounds_scene import RUN

from phalanx.errors import FrameError, OrderError, PeerRefusedError, SignatureError, TransportError
from phalanx.federated.carriers import bridge, conversation, shim
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import CarriedReply, LostSite, SentOrder
from phalanx.federated.carriers.conversation import FrameSigner, OwnerConversation, SiteConversation
from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity

SITES = ("north", "south")
SESSION = f"{RUN[:16]}-1"
LONG_S = 30.0


@pytest.fixture
def home():
    path = Path(tempfile.mkdtemp(prefix="phx-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=[ForwardingEngine, FlowerEngine])
def scene(request, home, monkeypatch):
    monkeypatch.setattr(bridge, "_GREET_EVERY_S", 0.05)
    monkeypatch.setattr(bridge, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(bridge, "_END_S", 0.5)
    identities = {name: Identity.without_certificate(name) for name in ("owner", *SITES)}
    roster = {name: identities[name].public for name in SITES}
    terms = RunTerms("run-1", RUN, FederatedConfig(sites=SITES), 0, identities["owner"].public, roster, 10)
    made = BridgeScene(home, terms, identities, SESSION, request.param)
    yield made
    made.close()


def reply(order, payload):
    return m.MeasuredReply(ticket=order.ticket, loss=1.0, num_targets=3), bytes(payload)


def measure(ticket, payload=b"weights"):
    return SentOrder(m.MeasureOrder(ticket=ticket), payload)


def meet(scene, *names):
    for _ in range(600):
        if scene.carrier.present_sites() == frozenset(names):
            return
        scene.carrier.collect_reply(0.05)
    raise AssertionError(scene.said)


def answers_of(scene, count):
    return [scene.carrier.collect_reply(LONG_S) for _ in range(count)]


def altered(site, answer, frame):
    return answer[:-1] + bytes([answer[-1] ^ 1])


@pytest.mark.parametrize("lie", ["altered", "truncated", "grown", "empty", "echo", "too long"])
def test_an_answer_that_the_site_has_not_signed_costs_it_the_order_and_nothing_else(scene, lie):
    lies = {
        "altered": altered,
        "truncated": lambda site, answer, frame: answer[:-1],
        "grown": lambda site, answer, frame: answer + b"x",
        "empty": lambda site, answer, frame: b"",
        "echo": lambda site, answer, frame: frame,
        "too long": lambda site, answer, frame: answer + bytes(LIMITS.max_frame_bytes),
    }
    for name in SITES:
        scene.serve(name, reply)
    meet(scene, *SITES)
    scene.engine.touch = lambda site, answer, frame: lies[lie](site, answer, frame) if site == "north" else answer

    scene.carrier.broadcast_orders({name: measure(n) for n, name in enumerate(SITES)})
    got = {one.site: one for one in answers_of(scene, 2)}
    scene.engine.touch = lambda site, answer, frame: answer
    meet(scene, *SITES)
    scene.carrier.broadcast_orders({"north": measure(7)})
    again = scene.carrier.collect_reply(LONG_S)

    assert got["north"] == LostSite("north", "gone" if lie == "too long" else "refused")
    assert isinstance(got["south"], CarriedReply)
    assert isinstance(again, CarriedReply) and again.body["ticket"] == 7


def test_an_answer_of_another_site_or_of_an_earlier_order_is_refused(scene):
    for name in SITES:
        scene.serve(name, reply)
    meet(scene, *SITES)
    kept = {}
    scene.engine.touch = lambda site, answer, frame: kept.setdefault(site, answer)
    scene.carrier.broadcast_orders({name: measure(n) for n, name in enumerate(SITES)})
    honest = answers_of(scene, 2)
    assert all(isinstance(one, CarriedReply) for one in honest)

    # north's earlier answer again, and north's for south's
    scene.engine.touch = lambda site, answer, frame: kept["north"]
    scene.carrier.broadcast_orders({name: measure(5 + n) for n, name in enumerate(SITES)})

    assert {one.site: one.reason for one in answers_of(scene, 2)} == dict.fromkeys(SITES, "refused")


def test_with_the_checks_off_a_stolen_answer_is_believed(scene, monkeypatch):
    def unchecked(self, raw, place):
        return conversation.parse_frame(raw, self.limits)

    monkeypatch.setattr(conversation.FrameSigner, "check_frame", unchecked)
    scene.serve("north", lambda order, payload: (reply(order, payload)[0], b"of north"))
    scene.serve("south", lambda order, payload: (reply(order, payload)[0], b"of south"))
    meet(scene, *SITES)
    stolen = {}
    scene.engine.touch = lambda site, answer, frame: stolen.setdefault("first", answer)
    scene.carrier.broadcast_orders({"north": measure(1)})
    scene.carrier.collect_reply(LONG_S)
    scene.carrier.broadcast_orders({"south": measure(1)})

    assert bytes(scene.carrier.collect_reply(LONG_S).payload) == b"of north"


def test_a_repeated_answer_is_handed_out_once(scene):
    scene.serve("north", reply)
    meet(scene, "north")
    line, last = scene.engine._line, scene.carrier._last_number + 1

    def again(site, answer, frame):
        # of this order and of all before; none after it, for the owner goes on as soon as it has this one
        for number in range(last + 1):
            line.send_answer(number, site, answer)
        return answer

    scene.engine.touch = again
    scene.carrier.broadcast_orders({"north": measure(1)})
    first = scene.carrier.collect_reply(LONG_S)
    scene.engine.touch = lambda site, answer, frame: answer
    scene.carrier.broadcast_orders({"north": measure(2)})
    second = scene.carrier.collect_reply(LONG_S)

    assert [first.body["ticket"], second.body["ticket"]] == [1, 2]
    assert scene.carrier.collect_reply(0.0) is None


def test_an_engine_that_hands_in_answers_without_end_has_one_of_each_order_kept(scene):
    scene.serve("north", reply)
    meet(scene, "north")
    line = scene.engine._line
    number = scene.carrier._last_number + 1

    def again(site, answer, frame):
        for _ in range(40):
            line.send_answer(number, site, bytes(LIMITS.max_frame_bytes - 1))
            line.send_answer(number + 7, site, bytes(LIMITS.max_frame_bytes - 1))
        line.tell_sites(["north", "the-last-word"])
        return answer

    scene.engine.touch = again
    scene.carrier.broadcast_orders({"north": measure(1)})
    waiting = scene.carrier._messages.queue
    for _ in range(3000):
        if any(message is not None and b"the-last-word" in message.data for _, message in list(waiting)):
            break
        time.sleep(0.01)

    # nobody has read one of them, as while an owner sums or measures
    assert sum(len(message.data) for _, message in list(waiting)) < 2 * LIMITS.max_frame_bytes
    scene.engine.touch = lambda site, answer, frame: answer
    assert scene.carrier.collect_reply(LONG_S) == LostSite("north", "refused")


def test_an_order_that_is_delivered_again_gets_the_same_answer_and_is_done_once(scene):
    done = []

    def counted(order, payload):
        done.append(order.ticket)
        return reply(order, payload)

    scene.serve("north", counted)
    meet(scene, "north")
    scene.carrier.broadcast_orders({"north": measure(1)})
    scene.carrier.collect_reply(LONG_S)
    order = scene.engine.frames["north"][-1]

    twice = [shim.ask_site(str(scene.socket("north")), order) for _ in range(2)]

    assert twice[0] == twice[1] and done == [1]


def test_an_engine_that_begins_anew_is_taken_up_and_its_open_orders_are_lost(scene):
    scene.serve("north", reply)
    meet(scene, "north")
    scene.engine.touch = lambda site, answer, frame: scene.engine.close() or answer
    scene.carrier.broadcast_orders({"north": measure(1)})

    assert scene.carrier.collect_reply(LONG_S) == LostSite("north", "gone")
    scene.engine = type(scene.engine)(scene.carrier.path, {"north": scene.socket("north")})
    meet(scene, "north")
    scene.carrier.broadcast_orders({"north": measure(2)})
    assert scene.carrier.collect_reply(LONG_S).body["ticket"] == 2


def test_rubbish_on_the_owners_socket_ends_that_line_and_no_run(scene):
    scene.serve("north", reply)
    meet(scene, "north")
    with shim.connect_to(str(scene.carrier.path)) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        # the engine that was there has been parted from, and this one too; what it wrote is not read to its end
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(1) == b""
    scene.engine.close()
    scene.engine = type(scene.engine)(scene.carrier.path, {"north": scene.socket("north")})
    meet(scene, "north")


def test_a_site_that_is_revoked_is_parted_from_and_not_greeted_again(scene):
    for name in SITES:
        scene.serve(name, reply)
    meet(scene, *SITES)

    scene.revoked.add("north")

    assert scene.carrier.present_sites() == {"south"}
    assert scene.carrier.collect_reply(0.3) is None and scene.carrier.present_sites() == {"south"}
    assert "north: its certificate was revoked" in scene.said


def test_the_end_of_the_run_ends_sites_and_the_engine(scene, monkeypatch):
    monkeypatch.setattr(bridge, "_END_S", LONG_S)
    scene.serve("north", reply)
    meet(scene, "north")

    scene.carrier.broadcast_orders({"north": SentOrder(m.EndOrder(ticket=0))})
    scene.carrier.close()
    scene.threads["north"].join(LONG_S)
    scene.engine._thread.join(LONG_S)

    assert not scene.threads["north"].is_alive() and not scene.engine._thread.is_alive()
    assert not scene.carrier.path.exists()


def test_an_order_larger_than_the_run_allows_is_not_sent(scene):
    scene.serve("north", reply)
    meet(scene, "north")

    scene.carrier.broadcast_orders({"north": measure(1, bytes(LIMITS.max_frame_bytes))})

    assert scene.carrier.collect_reply(LONG_S) == LostSite("north", "FrameError")


class Talk:
    """The owner and one site without sockets."""

    def __init__(self):
        self.owner, self.site, self.other = (Identity.without_certificate(n) for n in ("owner", "north", "south"))
        self.asked = OwnerConversation(FrameSigner(self.owner, self.site.public, LIMITS), SESSION)
        self.heard = self.process()

    def process(self, session=RUN[:16]):
        return SiteConversation(FrameSigner(self.site, self.owner.public, LIMITS), session)

    def greet(self):
        header, raw = self.asked.sign_greeting()
        self.asked.receive_answer(self.heard.sign_welcome(self.heard.receive_order(raw)), header)
        return raw

    def order(self, ticket):
        return self.asked.sign_order("measure", m.MeasureOrder(ticket=ticket), b"weights")[1]


def test_orders_that_are_left_out_reordered_or_of_an_earlier_life_are_refused():
    talk = Talk()
    greeting = talk.greet()
    first, second = talk.order(1), talk.order(2)

    with pytest.raises(OrderError):
        talk.heard.receive_order(second)
    talk.heard.sign_reply(talk.heard.receive_order(first), "measured", m.SiteFault(ticket=1, reason="failed"))
    with pytest.raises(OrderError):
        talk.heard.receive_order(first)
    # all that was ever sent, to a process that began anew: its word is another one
    later = talk.process()
    later.sign_welcome(later.receive_order(greeting))
    for frame in (first, second):
        with pytest.raises(OrderError):
            later.receive_order(frame)
    with pytest.raises(OrderError):
        talk.process().receive_order(first)


def test_frames_of_another_party_run_or_key_are_refused():
    talk = Talk()
    _, greeting = talk.asked.sign_greeting()
    with pytest.raises(PeerRefusedError):
        talk.process("2" * 16).receive_order(greeting)
    # another party's key under the owner's name, as an engine could make one
    forged = OwnerConversation(FrameSigner(Identity.without_certificate("owner"), talk.site.public, LIMITS), SESSION)
    with pytest.raises(SignatureError):
        talk.heard.receive_order(forged.sign_greeting()[1])
    with pytest.raises(PeerRefusedError):
        SiteConversation(FrameSigner(talk.other, talk.owner.public, LIMITS), RUN[:16]).receive_order(greeting)
    with pytest.raises(FrameError):
        talk.heard.receive_order(greeting[:-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PHXB",
        b"XXXX" + bytes(15),
        shim._HEAD.pack(b"PHXB", 9, 0, 0, 0),
        shim._HEAD.pack(b"PHXB", 1, 0, 300, 0),
        shim._HEAD.pack(b"PHXB", 1, 0, 0, 2**40),
        shim._HEAD.pack(b"PHXB", 2, 0, 0, 2**40),
        shim._HEAD.pack(b"PHXB", 4, 0, 0, 2**21),
        shim._HEAD.pack(b"PHXB", 1, 0, 2, 0) + b"\xff\xff",
        shim._HEAD.pack(b"PHXB", 1, 0, 0, 10) + b"short",
    ],
)
def test_what_is_no_message_within_the_bounds_is_refused(data):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(shim.SocketLostError):
            shim.read_message(here)


def test_a_directory_that_others_can_enter_and_a_socket_in_use_are_refused(home, scene):
    (home / "open").mkdir(mode=0o755)
    (home / "open").chmod(0o755)
    with pytest.raises(shim.SocketLostError, match="chmod 700"):
        shim.listen_at(str(home / "open" / "owner.sock"))
    with pytest.raises(shim.SocketLostError, match="another process listens"):
        shim.listen_at(str(scene.carrier.path))
    with pytest.raises(shim.SocketLostError, match="at most 107 bytes"):
        shim.listen_at(str(home / ("x" * 100) / "s"))
    assert os.stat(scene.carrier.path).st_mode & 0o777 == 0o600
    with pytest.raises(TransportError):
        BridgeScene(home, scene.terms, scene.identities, SESSION)
