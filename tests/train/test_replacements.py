"""A worker that is gone is replaced, and so is a replacement that ends on its way, as long as there are names."""

import pytest

from phalanx.train.sessions.cluster import Replacements


class Place:
    def __init__(self, names):
        self.started = []
        self.alive = set()
        self.joined = set()
        self.told = []
        self.replacements = Replacements(
            names,
            start=self.start,
            is_alive=self.alive.__contains__,
            has_joined=self.joined.__contains__,
            observe=lambda kind, body: self.told.append((kind, body["party"], body["in_place_of"])),
        )

    def start(self, name):
        self.started.append(name)
        self.alive.add(name)


@pytest.fixture
def place():
    return Place(["worker-3", "worker-4"])


def test_a_replacement_that_ends_before_it_joined_is_replaced(place):
    place.replacements.start_replacement("worker-1")
    place.replacements.replace_stillborn()
    assert place.started == ["worker-3"]

    place.alive.discard("worker-3")
    place.replacements.replace_stillborn()
    place.replacements.replace_stillborn()

    assert place.told == [("respawned", "worker-3", "worker-1"), ("respawned", "worker-4", "worker-3")]


def test_one_that_has_joined_is_missed_by_the_company_and_not_twice(place):
    place.replacements.start_replacement("worker-1")
    place.joined.add("worker-3")
    place.alive.discard("worker-3")

    place.replacements.replace_stillborn()

    assert place.started == ["worker-3"]


def test_without_names_nobody_is_started(place):
    for _ in range(3):
        place.replacements.start_replacement("worker-1")
    place.alive.clear()
    place.replacements.replace_stillborn()

    assert place.started == ["worker-3", "worker-4"]
