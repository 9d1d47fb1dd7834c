"""The clock of a simulation: it advances only while every party waits."""

import threading
import time
from collections.abc import Callable, Mapping

from phalanx.pipeline.protocol.requests import AwakeClock
from phalanx.security.crypto import Identity, Peer
from phalanx.transport import CheckedFrame, Endpoint, LinkFault, TransportConfig, Wire

_LOOK_EVERY_S = 0.002

Signs = dict[str, int]
"""Parties that wait, each with the number of its wait: equal numbers in two rounds show that none of them acted in
between.
"""


class CompanyClock(AwakeClock):
    """A clock that its owner moves on; it jumps, so that a simulated silence takes no real time.

    Attributes:
        on_tick: Called before each jump, in the owner's thread; for a test in which a party acts now and then without
            a message to answer. A jump is as long as the owner waits for mail: 0.05 s in a run.
        threads: Workers by name; more may be added. Time passes while all of them rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed_s = 0.0
        self.on_tick: list[Callable[[], None]] = []
        self.threads: dict[str, PartyThread] = {}

    def awake_seconds(self) -> float:
        """Seconds so far in which every party waited."""
        return self._passed_s

    def wall_seconds(self) -> float:
        """The same: a simulation on a slow machine takes no longer."""
        return self._passed_s

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        for act in self.on_tick:
            act()
        self._passed_s += seconds


class Stall:
    """A stall makes a party do nothing, inside any of its hooks, until another thread ends the stall.

    To its company this is silence, and time passes. A hook that computes, or gets no CPU, is at work, however long it
    takes; so is one that blocks in any other way.
    """

    def __init__(self) -> None:
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether the stall has ended, so that the stalled party has something to do again."""
        return self._over.is_set()

    def wait_until_over(self, limit_s: float) -> None:
        """Do nothing until the stall ends, at most `limit_s` real seconds."""
        thread = threading.current_thread()
        if isinstance(thread, PartyThread):
            thread.begin_stall(self)
        self._over.wait(limit_s)
        if isinstance(thread, PartyThread):
            thread.end_stall()

    def release_party(self) -> None:
        """Let the stalled party go on."""
        self._over.set()


class PartyThread(threading.Thread):
    """A worker of a simulation."""

    def __init__(self, name: str, endpoint: Endpoint, work: Callable[[str], None]) -> None:
        super().__init__(target=work, args=(name,), name=name, daemon=True)
        self.endpoint = endpoint
        self._num_stalls = 0
        self._stall: Stall | None = None

    def begin_stall(self, stall: Stall) -> None:
        """From now on it does nothing on purpose."""
        self._num_stalls += 1
        self._stall = stall

    def end_stall(self) -> None:
        """It goes on."""
        self._stall = None

    @property
    def wait_number(self) -> int | None:
        """Number of its present wait, below 0 for a stall; None while it works."""
        stall = self._stall
        if stall is not None:
            return None if stall.is_over else -self._num_stalls
        return self.endpoint.waiting_call


class OwnersEndpoint(Endpoint):
    """The owner's end of a simulation's links: it waits for mail, and moves its clock on where none can come.

    Args:
        clock: Moved on here, while all of its threads wait.

    Guarantees:
        No time passes while a worker computes or waits for CPU, while a frame is under way to a party that would act
        on it, or while the owner itself is at work.
    """

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, Peer],
        run: str,
        wire: Wire,
        limits: TransportConfig,
        *,
        clock: CompanyClock,
    ) -> None:
        super().__init__(identity, peers, run, wire, limits)
        self._clock = clock

    def receive_item(self, timeout_s: float) -> CheckedFrame | LinkFault | None:
        """As any endpoint; where nothing can come any more, None at once and `timeout_s` on the clock."""
        item = super().receive_item(0.0)
        until = time.monotonic() + timeout_s
        while item is None and (left_s := until - time.monotonic()) > 0:
            # whether there was an instant, while this looked, in which every party waited
            signs = self._wait_numbers()
            # a party may have woken another one between the looks at the two: only a second round finds it awake
            is_quiet = signs is not None and signs == self._wait_numbers()
            # what a party sent before all came to rest lies here by now
            item = super().receive_item(0.0 if is_quiet else min(left_s, _LOOK_EVERY_S))
            if is_quiet and item is None:
                self._clock.pass_time(timeout_s)
                return super().receive_item(0.0)
        return item

    def _wait_numbers(self) -> Signs | None:
        """Look at every party once; None where one of them has something to do."""
        living = {name: thread for name, thread in list(self._clock.threads.items()) if thread.is_alive()}
        signs: dict[str, int] = {}
        for name, thread in living.items():
            sign = thread.wait_number
            if sign is None:
                return None
            signs[name] = sign
        # a dead or stalled party does nothing about what is sent to it, so it is not waited for
        awake = {self.party_name, *(name for name, sign in signs.items() if sign > 0)}
        ends = (self, *(thread.endpoint for thread in living.values()))
        return None if any(endpoint.sending_to & awake for endpoint in ends) else signs
