"""A worker's place is manned again only as the rules of membership allow."""

import signal

import pytest

from phalanx.launch.rendezvous import FileRendezvous, FixedRendezvous
from phalanx.launch.worker_slot import Substitutes, Supervisor
from phalanx.pipeline import WorkerConfig


class Place:
    """Remembers which workers were started, and says what it is told to say."""

    def __init__(self):
        self.started = []
        self.code = None

    def start(self, name, config):
        self.started.append((name, config.owner))
        self.code = None

    def poll(self, name):
        assert name == self.started[-1][0]
        return self.code


def configure(name, owner):
    return WorkerConfig(identity=f"keys/{name}", owner=owner)


@pytest.fixture
def place():
    return Place()


def keeper_of(place, *substitutes):
    return Supervisor("alice", Substitutes(substitutes), place, configure)


def test_a_worker_starts_when_the_owner_listens(place):
    keeper = keeper_of(place)

    keeper.check_worker(None)
    assert place.started == []
    for _ in range(3):
        keeper.check_worker("here:1")

    assert place.started == [("alice", "here:1")]


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, 1])
def test_in_the_place_of_a_dead_worker_comes_another_name(place, code):
    keeper = keeper_of(place, "alice-2")
    keeper.check_worker("here:1")

    for _ in range(2):
        place.code = code
        keeper.check_worker("here:1")
        keeper.check_worker("here:1")

    assert [name for name, _ in place.started] == ["alice", "alice-2"]
    assert keeper.name is None


@pytest.mark.parametrize("code", [0, 2, 4, 5])
def test_who_ended_by_itself_may_have_been_convicted_and_is_not_replaced(place, code):
    keeper = keeper_of(place, "alice-2")
    keeper.check_worker("here:1")

    place.code = code
    keeper.check_worker("here:1")
    keeper.check_worker("here:1")

    assert place.started == [("alice", "here:1")]
    assert (keeper.name, keeper.code) == (None, code)


def test_a_new_session_of_the_owner_begins_with_the_first_name_even_at_the_same_address(place):
    keeper = keeper_of(place, "alice-2")
    keeper.check_worker("here:1")
    place.code = -signal.SIGKILL
    keeper.check_worker("here:1")

    keeper.check_worker(None)
    keeper.check_worker("here:1")

    assert [name for name, _ in place.started] == ["alice", "alice-2", "alice"]


def test_a_worker_is_brought_to_an_owner_that_moved(place):
    keeper = keeper_of(place)

    keeper.check_worker("here:1")
    keeper.check_worker("there:2")

    assert place.started == [("alice", "here:1"), ("alice", "there:2")]


def test_nobody_gets_a_name_that_another_one_uses():
    names = Substitutes(["carol", "dave"])

    assert [names.next_name() for _ in range(3)] == ["carol", "dave", None]

    names.refill_names()
    assert names.next_name() == "carol"


def test_what_is_published_is_read_until_the_owner_is_gone(tmp_path):
    writer, reader = FileRendezvous(tmp_path), FileRendezvous(tmp_path)
    assert (reader.read_address(), reader.has_ended(), reader.read_exit_code()) == (None, False, 0)

    writer.publish_address("127.0.0.1:7")
    assert reader.read_address() == "127.0.0.1:7"

    writer.publish_address(None)
    writer.publish_address(None)
    assert writer.announce_end(6)
    assert (reader.read_address(), reader.has_ended(), reader.read_exit_code()) == (None, True, 6)


def test_an_owner_that_somebody_else_started_never_ends_for_us():
    rendezvous = FixedRendezvous("head:7070")

    assert not rendezvous.announce_end(0)
    assert (rendezvous.read_address(), rendezvous.has_ended()) == ("head:7070", False)
