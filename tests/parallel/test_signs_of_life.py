"""A rank that hangs is told from a slow one, from one that has ended, and from a listener that was stopped itself."""

import os
import threading
from datetime import timedelta

import pytest
from torch import distributed as dist

from phalanx.parallel.groups.heartbeat import FileHeartbeat, HeartbeatThreads, SilenceClock, StoreHeartbeat

LIMIT = 30.0


@pytest.fixture
def patience():
    return SilenceClock(LIMIT, now=0.0)


def look(patience, counts, *times):
    """Hear the same numbers at each of these times; return the ranks that are overdue at the last of them."""
    found = {}
    for now in times:
        patience.note_counts(counts, now)
        found = patience.overdue_ranks(now)
    return found


def test_a_rank_whose_number_stands_still_is_overdue_after_the_limit(patience):
    look(patience, {1: 5, 2: 7}, 0.0)

    found = {}
    for now in range(1, 32):
        patience.note_counts({1: 5, 2: 7 + now}, float(now))
        found = patience.overdue_ranks(float(now))

    assert found == {1: 31.0}


def test_at_the_limit_itself_nobody_is_overdue(patience):
    assert look(patience, {1: 5}, *range(31)) == {}


def test_a_rank_that_never_gave_a_sign_is_not_awaited(patience):
    assert look(patience, {}, *range(100)) == {}


def test_a_rank_that_has_ended_in_good_order_is_not_awaited_any_more(patience):
    look(patience, {1: 5}, *range(20))

    assert look(patience, {}, *range(20, 80)) == {}


def test_time_in_which_nobody_looked_is_held_against_nobody(patience):
    look(patience, {1: 5}, *range(20))

    assert look(patience, {1: 5}, 500.0) == {}
    assert look(patience, {1: 5}, *range(501, 530)) == {}
    assert look(patience, {1: 5}, 531.0) == {1: 31.0}


def test_files_tell_of_every_beat_and_of_the_end(tmp_path):
    one, lead = FileHeartbeat(tmp_path, 1, range(1)), FileHeartbeat(tmp_path, 0, range(2))
    assert lead.read_counts() == {}

    one.give_beat()
    # some time ago: a file system's clock may have moved by less than a step since
    os.utime(tmp_path / "beat-1", ns=(1, 1))
    first = lead.read_counts()
    one.give_beat()

    assert list(first) == [1]
    assert lead.read_counts() != first
    one.end_beats()
    assert lead.read_counts() == {}


def test_what_an_earlier_start_left_is_forgotten(tmp_path):
    FileHeartbeat(tmp_path, 1, range(1)).give_beat()

    lead = FileHeartbeat(tmp_path, 0, range(2))
    lead.remove_files()

    assert lead.read_counts() == {}


def test_a_store_tells_the_same():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    one, lead = StoreHeartbeat(store, 1, range(1)), StoreHeartbeat(store, 0, range(3))
    assert lead.read_counts() == {}

    one.give_beat()
    one.give_beat()

    assert lead.read_counts() == {1: 2}
    one.end_beats()
    assert lead.read_counts() == {}


class Stuck:
    """A store that is kept by a hung process: it answered once, and then does not."""

    def __init__(self):
        self.asked = 0
        self.released = threading.Event()

    def give_beat(self):
        return None

    def read_counts(self):
        self.asked += 1
        if self.asked > 1:
            self.released.wait(60)
        return {0: 1}

    def end_beats(self):
        return None


def test_a_store_that_does_not_answer_does_not_hide_that_its_keeper_hangs():
    heartbeat, named, told = Stuck(), [], threading.Event()

    def act(rank, seconds):
        named.append(rank)
        told.set()

    with HeartbeatThreads(heartbeat, 1.5, act):
        assert told.wait(120.0)
        heartbeat.released.set()

    assert named == [0]


def test_a_rank_that_hangs_at_once_has_given_a_sign(tmp_path):
    listener = FileHeartbeat(tmp_path, 0, range(2))

    with HeartbeatThreads(FileHeartbeat(tmp_path, 1, range(2)), LIMIT, None):
        assert set(listener.read_counts()) == {1}
