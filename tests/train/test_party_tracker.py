"""The book of parties: rows follow what the owner saw and decided."""

from types import SimpleNamespace

import pytest

from phalanx.pipeline import StageChecks
from phalanx.train.records.history import RunHistory
from phalanx.train.records.party_tracker import PartyTracker


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(clock):
    return PartyTracker("first", 10, ["alice", "bob"], ["carol"], RunHistory(), clock)


def rows(book):
    return {row.name: row for row in book.parties_status().parties}


def states(book):
    return {name: row.state for name, row in rows(book).items()}


def at_work(book, holders, shadows, step=0):
    book.watch_roles(SimpleNamespace(stage_holders=holders, stage_shadows=shadows, second_shadows={}, next_step=step))


def links(book, received=(), sent=(), present=()):
    book.watch_links(
        SimpleNamespace(bytes_received=dict(received), bytes_sent=dict(sent)),
        SimpleNamespace(present_names=tuple(present)),
    )


def test_before_a_party_comes_it_is_waited_for_and_one_that_may_come_is_not(book):
    assert states(book) == {"alice": "waiting", "bob": "waiting", "carol": "certified"}


def test_a_party_that_has_said_hello_is_connected_and_heard(book, clock):
    clock.now = 1005.0
    links(book, received={"alice": 300}, sent={"alice": 50, "owner": 9}, present=["alice"])

    alice = rows(book)["alice"]

    assert (alice.state, alice.heard, alice.bytes_from, alice.bytes_to) == ("connected", 1005, 300, 50)
    assert "owner" not in rows(book)
    clock.now = 1009.0
    assert rows(book)["alice"].heard == 1005


def test_roles_are_told_with_the_step_from_which_they_hold(book, clock):
    at_work(book, {0: "owner", 1: "alice", 2: "bob"}, {1: "bob", 2: "owner"}, step=4)
    clock.now = 1060.0

    found = rows(book)

    assert (found["alice"].state, found["alice"].serves, found["alice"].since_step) == ("serving", (1,), 4)
    assert (found["bob"].serves, found["bob"].shadows, found["bob"].since) == ((2,), (1,), 1060)
    at_work(book, {1: "bob", 2: "bob"}, {1: "alice"}, step=6)
    assert (states(book)["alice"], rows(book)["alice"].since_step) == ("shadowing", 6)


def test_all_incarnations_of_a_certificate_are_one_row(book):
    links(book, received={"alice": 5, "alice.2": 7})
    at_work(book, {1: "alice.2"}, {})

    assert (rows(book)["alice"].bytes_from, rows(book)["alice"].serves) == (12, (1,))
    assert set(rows(book)) == {"alice", "bob", "carol"}


def test_checks_and_steps_are_counted_by_party(book):
    at_work(book, {1: "alice", 2: "bob"}, {2: "alice"})
    one = StageChecks(frozenset({"messages", "state"}), "alice", None)
    two = StageChecks(frozenset({"messages"}), "bob", None)

    book.count_checks(0, {1: one, 2: two})
    book.count_checks(1, {1: one, 2: two})

    found = rows(book)
    assert (found["alice"].audits, found["alice"].steps) == ({"messages": 2, "state": 2}, 2)
    assert (found["bob"].audits, found["carol"].steps) == ({"messages": 2}, 0)


def test_one_check_of_two_stages_of_a_party_counts_once_a_step(book):
    check = StageChecks(frozenset({"messages"}), "alice", None)

    book.count_checks(0, {1: check, 2: check})

    assert rows(book)["alice"].audits == {"messages": 1}


@pytest.mark.parametrize(
    ("kind", "state"),
    [("lost", "lost"), ("left", "left"), ("evicted", "evicted"), ("revoked", "revoked"), ("not_let_in", "refused")],
)
def test_an_event_ends_the_part_of_a_party(book, kind, state):
    at_work(book, {1: "alice"}, {})
    assert states(book)["alice"] == "serving"

    book.observe(kind, {"party": "alice", "step": 3, "stages": [1]})

    assert (states(book)["alice"], rows(book)["alice"].serves) == (state, ())


def test_a_revoked_party_is_not_merely_lost_and_comes_back_in_no_row(book):
    book.observe("revoked", {"party": "alice", "reason": "the keys were copied"})
    book.observe("lost", {"party": "alice.2", "stages": []})
    links(book, present=["alice"])

    assert (states(book)["alice"], rows(book)["alice"].note) == ("revoked", "the keys were copied")


def test_one_that_was_lost_says_why_and_is_connected_when_it_comes_back(book):
    book.observe("link_broken", {"party": "alice", "reason": "its process has \x1b[2Jended"})
    book.observe("lost", {"party": "alice", "stages": [1]})
    assert (states(book)["alice"], rows(book)["alice"].note) == ("lost", "its process has ?[2Jended")

    links(book, present=["alice.2"])

    assert states(book)["alice"] == "connected"


def test_verdicts_are_kept_and_bounded(book):
    for step in range(20):
        book.observe("verdict", {"party": "bob", "step": step, "stage": 1, "reason": "x" * 1000})

    verdicts = rows(book)["bob"].verdicts
    assert len(verdicts) == 8
    assert verdicts[-1].startswith("step 19, stage 1: xxx")
    assert max(map(len, verdicts)) == 200


def test_what_earlier_sessions_decided_is_there_from_the_beginning():
    verdict = {"party": "bob.2", "step": 3, "stage": 1, "reason": "another result"}
    history = RunHistory(
        decisions=[("verdict", verdict), ("evicted", {"party": "bob.2"}), ("lost", {"party": "alice"})]
    )
    history.revoked.add("dave")

    book = PartyTracker("first", 10, ["alice"], [], history)

    assert states(book) == {"alice": "waiting", "bob": "evicted", "dave": "revoked"}
    assert rows(book)["bob"].verdicts == ("step 3, stage 1: another result",)


def test_news_are_told_once(book):
    assert [row.name for row in book.changed_rows()] == ["alice", "bob", "carol"]
    assert book.changed_rows() == []

    at_work(book, {1: "alice"}, {})

    assert [(row.name, row.state_text) for row in book.changed_rows()] == [("alice", "serving 1")]
    assert book.changed_rows() == []
