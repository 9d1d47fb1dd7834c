"""Reachability: the owner knocks where a machine wants to be reached, before it certifies it."""

import json
import socket
import threading
from datetime import timedelta

import pytest

from phalanx.errors import PeerRefusedError, TransportError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.security.invite import (
    EnrolmentServer,
    Invitations,
    JoinOffer,
    JoinTerms,
    ReachabilityListener,
    enrol_machine,
)
from phalanx.security.invite.reachability import probe_reachability

SECRET = "5" * 64


@pytest.fixture
def owner(tmp_path):
    """Invitations, endpoint and what it said."""
    keys, said = tmp_path / "keys", []
    create_authority(keys)
    issue_certificate(keys, "owner")
    invitations = Invitations(keys)
    terms = JoinTerms(7070, ("serve a stage",), 700)
    with EnrolmentServer(keys, invitations, terms, said.append) as server:
        server.start_listening("127.0.0.1", 0)
        yield invitations, server, said


def token_of(owner):
    return owner[0].invite_party("alice", f"127.0.0.1:{owner[1].port}", timedelta(days=1))


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


@pytest.fixture
def stranger():
    """A program that answers knocks without the token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b'{"answer":"' + b"0" * 64 + b'"}\n')

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_a_machine_that_answers_is_certified_and_told_what_is_asked_of_it(owner, tmp_path):
    token = token_of(owner)

    with ReachabilityListener("127.0.0.1", 0, token.secret) as door:
        told = enrol_machine(token, tmp_path / "alice", JoinOffer(door.port, None, 1234, 56))

    assert load_identity(tmp_path / "alice").name == "alice"
    assert (told.asks, told.needs_mib) == (("serve a stage",), 700)
    assert owner[2] == [
        "alice has made its keys at 127.0.0.1 and is certified; it says that it has 1,234 MiB free for stages and "
        "56 GFLOP/s on one stage's kernels"
    ]


def test_one_that_cannot_be_reached_learns_what_was_tried_and_from_where_and_keeps_its_token(
    owner, tmp_path, closed_port
):
    token = token_of(owner)

    with pytest.raises(PeerRefusedError) as refused:
        enrol_machine(token, tmp_path / "alice", JoinOffer(closed_port))

    for words in (f"127.0.0.1:{closed_port} cannot be reached", "the owner tried it from", "firewall", "--advertise"):
        assert words in str(refused.value)
    assert not (tmp_path / "alice" / "certificate.pem").exists()
    assert owner[0].open_names() == ["alice"]
    with ReachabilityListener("127.0.0.1", 0, token.secret) as door:
        enrol_machine(token, tmp_path / "alice", JoinOffer(door.port))
    assert (tmp_path / "alice" / "certificate.pem").exists()


def test_whatever_else_listens_there_is_told_apart_and_not_described(owner, tmp_path, stranger, closed_port):
    messages = []
    for port in (stranger, closed_port):
        with pytest.raises(PeerRefusedError) as refused:
            enrol_machine(token_of(owner), tmp_path / "alice", JoinOffer(port, "127.0.0.1"))
        messages.append(str(refused.value).replace(str(port), "PORT"))

    assert "no machine with this token answered" in messages[0]
    # a caller must not learn what listens in the owner's network
    assert messages[0] == messages[1]


def test_without_the_secret_of_an_invitation_the_owner_knocks_nowhere(owner, tmp_path):
    token, knocked = token_of(owner), threading.Event()
    wrong = type(token)(**{name: getattr(token, name) for name in token.__annotations__} | {"secret": SECRET})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        with pytest.raises(PeerRefusedError, match="is not valid here"):
            enrol_machine(wrong, tmp_path / "alice", JoinOffer(listener.getsockname()[1]))
        with pytest.raises(TimeoutError):
            listener.accept()
            knocked.set()

    assert not knocked.is_set()


def test_knocks_in_vain_are_counted_for_the_name_of_the_token_alone(owner, tmp_path, closed_port):
    token, bob = token_of(owner), owner[0].invite_party("bob", f"127.0.0.1:{owner[1].port}", timedelta(days=1))
    for _ in range(5):
        with pytest.raises(PeerRefusedError, match="cannot be reached"):
            enrol_machine(token, tmp_path / "alice", JoinOffer(closed_port))

    with pytest.raises(PeerRefusedError, match="too many tries in vain; wait a minute"):
        enrol_machine(token, tmp_path / "alice", JoinOffer(closed_port))
    # a neighbour behind the same router
    with ReachabilityListener("127.0.0.1", 0, bob.secret) as door:
        enrol_machine(bob, tmp_path / "bob", JoinOffer(door.port))


@pytest.mark.parametrize("claim", [-1, 10**9, 1.5, "12\x1b[2J", None, True])
def test_a_claim_that_is_no_plausible_number_is_not_repeated(owner, tmp_path, claim):
    token = token_of(owner)

    with ReachabilityListener("127.0.0.1", 0, token.secret) as door:
        enrol_machine(token, tmp_path / "alice", JoinOffer(door.port, None, claim, claim))

    assert owner[2] == ["alice has made its keys at 127.0.0.1 and is certified"]


def test_junk_at_the_door_keeps_nobody_out(owner, tmp_path):
    token = token_of(owner)
    with ReachabilityListener("127.0.0.1", 0, token.secret) as door:
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, json.dumps({"knock": 1}).encode() + b"\n"):
            with socket.create_connection(("127.0.0.1", door.port)) as caller:
                caller.sendall(junk)
        enrol_machine(token, tmp_path / "alice", JoinOffer(door.port))

    assert (tmp_path / "alice" / "certificate.pem").exists()


def test_idle_connections_at_the_door_keep_the_owner_not_out(owner, tmp_path):
    token = token_of(owner)
    with ReachabilityListener("127.0.0.1", 0, token.secret) as door:
        idle = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(100)]
        enrol_machine(token, tmp_path / "alice", JoinOffer(door.port))
    for connection in idle:
        connection.close()

    assert (tmp_path / "alice" / "certificate.pem").exists()


def test_a_port_that_is_taken_is_said_with_the_option_that_names_another(stranger):
    with pytest.raises(TransportError, match=r"is the port taken\? --port names another"):
        ReachabilityListener("127.0.0.1", stranger, SECRET)
    probe_reachability(f"127.0.0.1:{stranger}", SECRET)
