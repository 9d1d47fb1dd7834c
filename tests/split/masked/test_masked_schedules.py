"""No pad is used twice by a module's layers, whatever happens to their process, its disk and its counter."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked_worlds import Spy, a_desk
from torch import nn
from torch.utils.checkpoint import checkpoint

from pad_worlds import MASTER, RUN, Counter, Disk, PowerCutError, stuck
from phalanx.errors import PadError
from phalanx.security.mask import PadLedger, begin_ledger
from phalanx.security.mask.fixed_point import encode_rows
from phalanx.security.mask.ring import subtract_mod_p
from phalanx.split.masked import mask_linears
from phalanx.split.masked.pad_sources import ledger_pads

CUTS = st.sampled_from(["before", "after"])
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["forward", "backward", "recompute", "idle"]), st.none()),
    st.tuples(st.just("kill"), st.none()),
    st.tuples(st.just("cut disk"), CUTS),
    st.tuples(st.just("cut counter"), CUTS),
    st.tuples(st.just("put back"), st.integers(0, 10)),
    st.tuples(st.just("open"), st.integers(1, 5)),
)
SCHEDULES = st.lists(EVENTS, min_size=4, max_size=30)
THOROUGH = settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = settings(max_examples=40, deadline=None)
SIZE = 6
X = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(1))


@dataclass
class World:
    """One machine on which a process with two masked layers comes and goes; the worker never forgets anything.

    Every activation and every gradient is the same each time, so two messages of one product are equal exactly where
    their pads are.
    """

    counter: Counter | None
    settings: dict
    disk: Disk = field(default_factory=Disk)
    module: nn.Module | None = None
    worker: Spy = field(default_factory=Spy)
    refusals: int = 0

    def __post_init__(self):
        begin_ledger(self.disk, MASTER, RUN, self.counter)

    def happens(self, event, detail):
        if event == "kill":
            self.module = None
        elif event == "cut disk":
            self.disk.cut = detail
        elif event == "cut counter" and self.counter is not None:
            self.counter.cut = detail
        elif event == "put back":
            self.disk.data = self.disk.past[-1 - detail % len(self.disk.past)]
        elif event == "open":
            self.surviving(lambda: self.open(detail))
        elif event in ("forward", "backward", "recompute", "idle"):
            self.surviving(lambda: self.compute(event))

    def surviving(self, act):
        try:
            act()
        except PowerCutError:
            self.module = None
        except PadError:
            self.refusals += 1

    def open(self, range_size):
        # the old process is gone: a lock keeps two from having one ledger
        self.module = None
        ledger = PadLedger(self.disk, MASTER, RUN, range_size=range_size, counter=self.counter, **self.settings)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).requires_grad_(False)
        self.offload = a_desk(self.worker, ledger_pads(ledger, MASTER, RUN), rows=1)
        mask_linears(module, self.offload)
        self.module = module

    def compute(self, event):
        if self.module is None:
            self.open(3)
        if event == "idle":
            self.offload.fill_pools(1)
            return
        x = X.clone().requires_grad_()
        y = checkpoint(self.module, x, use_reentrant=False) if event == "recompute" else self.module(x)
        if event != "forward":
            y.sum().backward()

    def messages(self):
        return [(str(one.product), one.values.tobytes()) for one in self.worker.seen]


def run_through(schedule, counter, **kept):
    world = World(counter, kept)
    for event in [*schedule, ("kill", None), ("backward", None)]:
        world.happens(*event)
    return world


def all_differ(messages):
    return len(set(messages)) == len(messages)


def check_random_bytes(schedule):
    assert all_differ(run_through(schedule, None).messages())


def check_counter(schedule):
    assert all_differ(run_through(schedule, Counter(), fresh=stuck).messages())


@QUICK
@given(SCHEDULES)
def test_no_message_repeats_through_crashes_restarts_rollbacks_and_recomputation(schedule):
    check_random_bytes(schedule)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@THOROUGH
@given(SCHEDULES)
def test_no_message_repeats_in_ten_thousand_schedules_of_a_module(schedule):
    check_random_bytes(schedule)


@QUICK
@given(SCHEDULES)
def test_with_a_counter_no_message_repeats_although_the_random_bytes_do(schedule):
    check_counter(schedule)


def test_the_same_module_without_either_defence_repeats_its_messages():
    # to the record that the first process began with
    put_back = [("backward", None), ("put back", 3), ("kill", None), ("backward", None)]

    assert not all_differ(run_through(put_back, None, fresh=stuck).messages())
    assert all_differ(run_through(put_back, None).messages())
    assert run_through(put_back, Counter(), fresh=stuck).refusals > 0


def test_no_two_layers_or_directions_share_a_pad():
    world = run_through([("backward", None), ("recompute", None)], None)

    pads = [subtract_mod_p(one.values, encode_rows(X.numpy()).values) for one in world.worker.requests("0")]
    assert len({pad.tobytes() for pad in pads}) == len(pads) == 4
    assert len({one.values.tobytes() for one in world.worker.seen}) == len(world.worker.seen)
    assert {str(one.product) for one in world.worker.seen} == {
        "0, forward",
        "0, backward",
        "2, forward",
        "2, backward",
    }
