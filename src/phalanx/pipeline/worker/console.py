"""The lines that a worker prints for people: one for each turn of events, and now and then one for its steps."""

import itertools
import time
from collections.abc import Callable, Collection
from enum import Enum

from phalanx.config import printable_text
from phalanx.errors import PeerLostError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.security.crypto import certified_name
from phalanx.telemetry import PartyRow
from phalanx.transport import Endpoint

Say = Callable[[str], None]
_SECONDS_BETWEEN_STEPS = 15.0
_LONGEST_PAUSE_S = 60


class WorkerOutcome(Enum):
    """How a worker's part in a run came to a good end."""

    COMPLETE = "the run is complete"
    LEFT = "this worker left"


class WorkerConsole:
    """The console of one worker: its part in a run, for a terminal or a log.

    Args:
        say: Takes one line; what other parties chose in it is made harmless first. Left out, nothing is said.
        now: Seconds since 1970.
    """

    def __init__(
        self,
        say: Say | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._print_line = say
        self._clock = clock
        self._now = now
        self._roles = ""
        self._step = -1
        self._next_s = 0.0
        self._row = PartyRow(name="this worker", state="waiting")
        self._others: dict[str, PartyRow] = {}
        self._heard: dict[str, tuple[int, int]] = {}
        self._endpoint: Endpoint | None = None

    def own_row(self) -> PartyRow:
        """This worker as its terminal shows it; may be called from any thread."""
        endpoint = self._endpoint
        if endpoint is None:
            return self._row
        sent, received = sum(endpoint.bytes_sent.values()), sum(endpoint.bytes_received.values())
        return self._row.model_copy(update={"bytes_from": sent, "bytes_to": received})

    def table_rows(self) -> list[PartyRow]:
        """The rows of the owner's table as far as this worker knows them, in order of names; from any thread.

        Of the others it knows the stages, which the owner tells all parties, and what crossed its own links with them;
        which of them were audited, are lost or convicted, the owner alone knows.
        """
        others = [self._with_links(row) for row in self._others.values()]
        return sorted([self.own_row(), *others], key=lambda row: row.name)

    def _with_links(self, row: PartyRow) -> PartyRow:
        if self._endpoint is None:
            return row
        received, sent = (
            sum(size for name, size in sizes.items() if certified_name(name) == row.name)
            for sizes in (self._endpoint.bytes_received, self._endpoint.bytes_sent)
        )
        size, heard = self._heard.get(row.name, (0, 0))
        if received != size:
            heard = int(self._now())
            self._heard[row.name] = received, heard
        return row.model_copy(update={"bytes_from": received, "bytes_to": sent, "heard": heard or None})

    def watch_links(self, endpoint: Endpoint) -> None:
        """Count from now on what crosses this worker's links."""
        self._endpoint = endpoint

    def print_looking(self, owner: str, address: str) -> None:
        """This worker begins to look for its owner."""
        self._print_text(f"looking for the owner at {owner}; other parties reach this worker at {address}")

    def print_connected(self, owner: str, name: str, run: str) -> None:
        """The owner has answered."""
        self._row = PartyRow(name=certified_name(name), state="connected")
        self._print_text(f"connected to the owner at {owner} as {name}, run {run[:32]}; waiting to be admitted")

    def print_admitted(self, num_stages: int) -> None:
        """The owner has sent its plan."""
        self._print_text(f"admitted to a run of {num_stages} stages; waiting for a role")

    def print_roles(self, serves: Collection[int], shadows: Collection[int], step: int) -> None:
        """The roles of this worker from a step on; said when they are others than before."""
        roles = ", ".join(
            f"{verb} stage {' '.join(str(stage) for stage in sorted(stages))}"
            for verb, stages in (("serves", serves), ("shadows", shadows))
            if stages
        )
        if roles != self._roles:
            self._roles = roles
            state = "serving" if serves else "shadowing" if shadows else "connected"
            stages = {"serves": tuple(sorted(serves)), "shadows": tuple(sorted(shadows))}
            self._row = self._row.model_copy(update={"state": state, "since_step": step, **stages})
            self._print_text(f"from step {step} on this worker {roles or 'waits: it has no stage'}")

    def note_assignment(self, assignment: Assignment, step: int) -> None:
        """The roles of all parties from a step on, as the owner has assigned them; they are shown, not said."""
        others, placed = dict[str, PartyRow](), dict[str, tuple[list[int], list[int]]]()
        for stage in sorted(assignment.holders):
            for place, party in enumerate(assignment.parties_of(stage)):
                placed.setdefault(certified_name(party), ([], []))[min(place, 1)].append(stage)
        for name in sorted(placed.keys() - {OWNER, self._row.name}):
            serves, mirrors = map(tuple, placed[name])
            before = self._others.get(name)
            if before is None or (before.serves, before.shadows) != (serves, mirrors):
                steps = 0 if before is None else before.steps
                before = PartyRow(
                    name=name,
                    state="serving" if serves else "shadowing",
                    serves=serves,
                    shadows=mirrors,
                    since_step=step,
                    steps=steps,
                )
            others[name] = before
        self._others = others

    def print_step(self, step: int) -> None:
        """The step that begins; said of the first, and then every quarter of a minute at most."""
        if step == self._step:
            return
        first, self._step = self._step < 0, step
        if not first:
            self._row = _count_step(self._row)
            self._others = {name: _count_step(row) for name, row in self._others.items()}
        if first or self._clock() >= self._next_s:
            self._next_s = self._clock() + _SECONDS_BETWEEN_STEPS
            self._print_text(f"step {step} begins")

    def print_end(self, ending: WorkerOutcome, reason: str = "") -> None:
        """The part of this worker is over."""
        done = f" after step {self._step}" if self._step >= 0 else ""
        self._print_text(f"{ending.value}{done}" + (f" ({reason})" if reason and reason != ending.value else ""))

    def _print_text(self, text: str) -> None:
        if self._print_line is not None:
            self._print_line(printable_text(text))


def _count_step(row: PartyRow) -> PartyRow:
    return row.model_copy(update={"steps": row.steps + 1})


def keep_serving(
    serve: Callable[[], WorkerOutcome | None], say: Say, pause: Callable[[float], None]
) -> WorkerOutcome | None:
    """Serve again and again until the run is complete or this worker has left; an owner that is gone may come back.

    Args:
        pause: Waits for so many seconds: 1, then twice as long each time, at most a minute.

    Raises:
        PhalanxError: Anything but a lost owner, such as one that refuses this worker.
    """
    for attempt in itertools.count():
        try:
            return serve()
        except PeerLostError as exc:
            wait_s = float(min(2**attempt, _LONGEST_PAUSE_S))
            say(printable_text(f"{exc}; looking for the owner again in {wait_s:.0f} s; Ctrl-C stops"))
            pause(wait_s)
    return None
