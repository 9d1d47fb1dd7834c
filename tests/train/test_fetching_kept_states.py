"""Which workers an owner that was killed asks for the states that they have kept."""

import pytest

from phalanx.errors import CheckpointError
from phalanx.train.sessions import cluster as company
from phalanx.train.sessions.cluster import JoinedWorkers


@pytest.fixture
def joined():
    """Only `north` has come; nothing but its address is looked at."""
    found = object.__new__(JoinedWorkers)
    members = type("Present", (), {"addresses": {"north": "127.0.0.1:1"}})()
    for name, value in {"members": members, "workers": None, "wire": None, "endpoint": "the owner's"}.items():
        object.__setattr__(found, name, value)
    return found


def test_who_has_not_come_back_is_named(joined):
    with pytest.raises(CheckpointError, match="stage 2: south, which has its state, did not come back"):
        joined.fetch_kept("south", 2, 7, {})


@pytest.mark.parametrize("party", ["north", "north.2"])
def test_whoever_came_back_in_the_last_session_is_asked_under_its_certificates_name(joined, monkeypatch, party):
    asked = []
    monkeypatch.setattr(company, "fetch_kept", lambda *arguments: asked.append(arguments) or {})

    joined.fetch_kept(party, 2, 7, {})

    assert asked == [("the owner's", "north", 2, 7, {})]
