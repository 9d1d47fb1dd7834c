"""Parties that call the owner: each is told of once, and strangers are turned away by name."""

import pytest

from phalanx.errors import PeerRefusedError
from phalanx.pipeline import Callers


def named(certified, begins):
    return {"alice": "alice", "bob": "bob.2", "carol": None}[certified]


def test_each_party_that_calls_is_told_of_once():
    said = []
    callers = Callers(named, ("alice", "bob", "carol"), said.append)

    names = [callers.name_caller(name, True) for name in ("alice", "bob", "carol", "alice")]

    assert names == ["alice", "bob.2", None, "alice"]
    assert said == ["alice has called", "bob.2 has called: it came back"]


def test_a_party_that_only_asks_whether_the_owner_lives_is_not_told_of():
    said = []

    assert Callers(named, ("alice",), said.append).name_caller("alice", False) == "alice"

    assert said == []


def test_a_stranger_is_refused_before_it_gets_a_name_and_cannot_fill_the_terminal():
    said = []
    callers = Callers(named, ("bob",), said.append)

    for _ in range(3):
        with pytest.raises(PeerRefusedError, match="alice is not a party of this session"):
            callers.name_caller("alice", True)

    assert len(said) == 1
    assert said[0].startswith("refused a caller: alice is not a party")


def test_at_most_a_thousand_things_are_said():
    said = []
    callers = Callers(lambda name, begins: name, [f"w{number}" for number in range(1200)], said.append)

    for number in range(1200):
        callers.name_caller(f"w{number}", True)

    assert len(said) == 1000
