"""No pad is made twice, whatever happens to the process, its disk and its counter, in whatever order."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pad_worlds import MASTER, RUN, Counter, Disk, PowerCutError, aes_pads, stuck
from phalanx.errors import PadError
from phalanx.security.mask import PadLedger, begin_ledger

CUTS = st.sampled_from(["before", "after"])
EVENTS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 7)),
    st.tuples(st.just("kill"), st.none()),
    st.tuples(st.just("cut disk"), CUTS),
    st.tuples(st.just("cut counter"), CUTS),
    st.tuples(st.just("put back"), st.integers(0, 10)),
    st.tuples(st.just("open"), st.integers(1, 5)),
)
SCHEDULES = st.lists(EVENTS, min_size=4, max_size=30)
THOROUGH = settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = settings(deadline=None)


@dataclass
class World:
    """One machine on which processes come and go; `made` holds key and number of every pad."""

    counter: Counter | None
    settings: dict
    disk: Disk = field(default_factory=Disk)
    ledger: PadLedger | None = None
    made: list = field(default_factory=list)
    refusals: int = 0

    def __post_init__(self):
        begin_ledger(self.disk, MASTER, RUN, self.counter)

    def happens(self, event, detail):
        if event == "kill":
            self.ledger = None
        elif event == "cut disk":
            self.disk.cut = detail
        elif event == "cut counter" and self.counter is not None:
            self.counter.cut = detail
        elif event == "put back":
            self.disk.data = self.disk.past[-1 - detail % len(self.disk.past)]
        elif event == "open":
            self.open(detail)
        elif event == "take" and (self.ledger is not None or self.open(3)):
            self.take(detail)

    def open(self, range_size):
        # the old process is gone: a lock keeps two from having one ledger
        self.ledger = None
        try:
            self.ledger = PadLedger(
                self.disk, MASTER, RUN, range_size=range_size, counter=self.counter, **self.settings
            )
        except PadError:
            self.refusals += 1
        return self.ledger is not None

    def take(self, count):
        pads = aes_pads(self.ledger)
        try:
            for _ in range(count):
                ticket = self.ledger.take_ticket()
                self.made.append((pads.range_key(ticket), ticket.number))
        except PowerCutError:
            self.ledger = None
        except PadError:
            self.refusals += 1


def run_through(schedule, counter, **kept):
    world = World(counter, kept)
    for event in [*schedule, ("kill", None), ("take", 3)]:
        world.happens(*event)
    return world


def check_random_bytes(schedule):
    world = run_through(schedule, None)

    assert len(set(world.made)) == len(world.made)


def check_counter(schedule):
    world = run_through(schedule, Counter(), fresh=stuck)

    assert len(set(world.made)) == len(world.made)


@QUICK
@given(SCHEDULES)
def test_no_pad_is_made_twice_through_crashes_restarts_and_rollbacks(schedule):
    check_random_bytes(schedule)


@pytest.mark.slow
@THOROUGH
@given(SCHEDULES)
def test_no_pad_is_made_twice_in_ten_thousand_schedules(schedule):
    check_random_bytes(schedule)


@QUICK
@given(SCHEDULES)
def test_with_a_counter_no_pad_is_made_twice_although_the_random_bytes_repeat(schedule):
    check_counter(schedule)


@pytest.mark.slow
@THOROUGH
@given(SCHEDULES)
def test_with_a_counter_no_pad_is_made_twice_in_ten_thousand_schedules(schedule):
    check_counter(schedule)


def test_the_same_world_without_either_defence_makes_pads_twice():
    put_back = [("take", 3), ("put back", 1), ("kill", None), ("take", 3)]

    assert len(set(run_through(put_back, None, fresh=stuck).made)) < 9
    assert len(set(run_through(put_back, None).made)) == 9
    assert run_through(put_back, Counter(), fresh=stuck).refusals > 0


def test_a_schedule_without_rollbacks_is_never_refused_and_makes_all_of_its_pads():
    schedule = [("take", 5), ("cut counter", "before"), ("take", 7), ("cut disk", "after"), ("take", 7), ("take", 4)]

    world = run_through(schedule, Counter(), fresh=stuck)

    assert world.refusals == 0
    assert len(world.made) >= 5 + 4 + 3
