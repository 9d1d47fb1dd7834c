"""Connections of strangers to one port: idle ones make room, known ones stay, and all end with the server."""

import socket
import threading
from contextlib import contextmanager

import pytest

from phalanx.security.invite.lobby import ConnectionServer, _address_block

PATIENCE_S = 600


class Visits:
    """Serves connections: a first byte of ``k`` makes a visitor known; then each byte is sent back."""

    def __init__(self) -> None:
        self.server: ConnectionServer | None = None

    def __call__(self, visitor) -> None:
        try:
            while data := visitor.connection.recv(1):
                if data == b"k" and self.server is not None:
                    self.server.mark_known(visitor)
                visitor.connection.sendall(data)
        except OSError:
            return


@contextmanager
def served(max_visitors: int, max_stay_s: float = PATIENCE_S):
    """A server on a loopback port, and a function that connects to it."""
    listener, visits, callers = socket.create_server(("127.0.0.1", 0)), Visits(), []
    server = ConnectionServer(listener, visits, max_visitors=max_visitors, max_stay_s=max_stay_s)
    visits.server = server

    def call() -> socket.socket:
        callers.append(socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE_S))
        return callers[-1]

    try:
        yield server, call
    finally:
        for caller in callers:
            caller.close()
        server.close()


def echo(caller: socket.socket, data: bytes) -> bytes:
    caller.sendall(data)
    return caller.recv(1)


def is_cut_off(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionError:
        return True


def test_each_caller_is_served_at_the_same_time():
    with served(3) as (_, call):
        callers = [call() for _ in range(3)]

        assert [echo(caller, bytes([number])) for number, caller in enumerate(callers)] == [b"\0", b"\1", b"\2"]


def test_the_oldest_stranger_makes_room_and_one_that_is_known_does_not():
    with served(2) as (_, call):
        known, stranger = call(), call()
        assert echo(known, b"k") == b"k"
        assert echo(stranger, b"s") == b"s"

        third = call()

        assert echo(third, b"3") == b"3"
        assert is_cut_off(stranger)
        assert echo(known, b"!") == b"!"


def test_where_all_are_known_a_new_one_is_closed():
    with served(1) as (_, call):
        known = call()
        assert echo(known, b"k") == b"k"

        assert is_cut_off(call())
        assert echo(known, b"!") == b"!"


def test_a_visitor_is_cut_off_after_its_longest_stay():
    with served(1, max_stay_s=0.05) as (_, call):
        assert is_cut_off(call())


def test_strangers_are_cut_off_when_the_server_closes_and_nobody_is_accepted_after():
    with served(2) as (server, call):
        stranger = call()
        assert echo(stranger, b"s") == b"s"
        address = stranger.getpeername()

        server.close()

        assert is_cut_off(stranger)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=PATIENCE_S)
    assert "lobby" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("host", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("name", "name", True),
        ("name", "10.0.0.1", False),
    ],
)
def test_addresses_of_one_household_count_as_one(host, other, is_same):
    assert (_address_block(host) == _address_block(other)) == is_same
