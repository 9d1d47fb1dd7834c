"""Who waits says who is missing: at each change and every quarter of a minute, whatever names a peer has chosen."""

import pytest

from phalanx.telemetry import MissingNotice


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def notice(clock, lines, expected=()):
    return MissingNotice(lines.append, 600.0, expected, clock)


def test_what_was_said_is_said_again_when_it_changes_or_a_quarter_of_a_minute_later(clock):
    lines = []
    told = notice(clock, lines, ("alice", "bob"))

    for moment, missing in ((0, ("alice", "bob")), (5, ("bob",)), (6, ("bob",)), (20, ("bob",)), (21, ("bob",))):
        clock.now = 1000.0 + moment
        told.waits_for(missing)

    assert lines == [
        "still waiting for bob; at most 595 s more",
        "still waiting for bob; at most 580 s more",
    ]


def test_nobody_missing_is_nothing_to_say_and_one_that_is_gone_again_is_named_again(clock):
    lines = []
    told = notice(clock, lines)

    for missing in ((), ("bob",), (), ("bob",), ("alice", "bob")):
        told.waits_for(missing)

    assert [line.split(";")[0] for line in lines] == ["still waiting for bob", "still waiting for alice, bob"]


def test_a_host_that_names_others_in_each_answer_does_not_fill_the_terminal(clock):
    lines = []
    told = notice(clock, lines)

    for number in range(1000):
        told.waits_for((f"party-{number}",))

    assert len(lines) == 100


def test_names_cannot_steer_a_terminal_nor_fill_it(clock):
    lines = []

    notice(clock, lines).waits_for([f"\x1b[2J{number:03}" + "x" * 200 for number in range(100)])

    assert "\x1b" not in lines[0] and len(lines[0]) < 2000
    assert "and 80 more" in lines[0]
