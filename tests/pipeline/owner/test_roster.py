"""The workers that the owner counts on: what happens once when one is given up."""

from types import SimpleNamespace

import pytest

from phalanx.pipeline.owner.roster import Roster


@pytest.fixture
def office():
    asked, events = [], []
    facts = SimpleNamespace(observe=lambda kind, body: events.append(kind), ledger=SimpleNamespace(step=3))
    members = SimpleNamespace(names=("north", "south"), ask_stacks=asked.append)
    roster = Roster(SimpleNamespace(facts=facts, members=members))
    return SimpleNamespace(roster=roster, asked=asked, events=events)


def test_a_worker_that_is_given_up_is_asked_for_its_stacks_once_and_before_it_is_shut_out(office):
    office.roster.suspect("north", "silent for a minute", "silent")
    office.roster.suspect("north", "its link broke")
    office.roster.suspect("a stranger", "its link broke")

    assert office.asked == ["north"]
    assert (list(office.roster.lost), office.events) == (["north"], ["link_broken", "replaced"])
    # it still counts as there, and has heard nothing yet
    assert office.roster.alive == ["north", "south"]
