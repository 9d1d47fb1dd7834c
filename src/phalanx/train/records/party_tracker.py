"""The tracker of a session's parties: it follows events, roles, checks and links, and makes a row of each party."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.config import printable_text
from phalanx.pipeline import OWNER, Incarnations, PipelineEngine, StageChecks
from phalanx.security.crypto import certified_name
from phalanx.telemetry.parties import LONGEST_TEXT, MAX_VERDICTS, PartiesStatus, PartyRow, PartyState
from phalanx.train.records.history import RunHistory
from phalanx.transport import Endpoint

_STATES: dict[str, PartyState] = {
    "party_joined": "connected",
    "lost": "lost",
    "left": "left",
    "not_let_in": "refused",
    "evicted": "evicted",
    "revoked": "revoked",
}
"""What a party is after an event."""
_FOR_GOOD = ("evicted", "revoked")
_AT_WORK = ("waiting", "connected", "serving", "shadowing")


@dataclass
class _Party:
    """A party under the name of its certificate, over all its incarnations in the session."""

    state: PartyState
    since: int
    since_step: int | None = None
    roles: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    steps: int = 0
    audits: Counter[str] = field(default_factory=Counter)
    bytes_from: int = 0
    heard: int | None = None
    verdicts: list[str] = field(default_factory=list)
    note: str = ""


class PartyTracker:
    """Tracks the parties; the owner's thread reports events to it, other threads read it.

    Args:
        clock: Seconds since 1970.

    Guarantees:
        A row holds the owner's observations and decisions, nothing that a party claims of itself.
    """

    def __init__(
        self,
        run: str,
        total_steps: int,
        parties: Collection[str],
        late: Collection[str],
        history: RunHistory,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._total, self._clock = run, total_steps, clock
        self._lock = threading.Lock()
        self._step: int | None = None
        self._endpoint: Endpoint | None = None
        self._incarnations: Incarnations | None = None
        self._engine: PipelineEngine | None = None
        self._told: dict[str, str] = {}
        now = int(clock())
        self._parties = {name: _Party("waiting", now) for name in parties}
        self._parties |= {name: _Party("certified", now) for name in late}
        for kind, body in history.decisions:
            if kind in ("evicted", "verdict"):
                self.observe(kind, body)
        for name in sorted(history.revoked):
            self.observe("revoked", {"party": name})

    # --- what is told -------------------------------------------------------------------------------

    def watch_links(self, endpoint: Endpoint, incarnations: Incarnations) -> None:
        """Follow received messages on the owner's links from now on."""
        self._endpoint, self._incarnations = endpoint, incarnations

    def watch_roles(self, engine: PipelineEngine) -> None:
        """Look from now on at which party has which stage."""
        self._engine = engine

    def observe(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event."""
        if "party" not in body or kind not in (*_STATES, "verdict", "link_broken"):
            return
        with self._lock:
            party = self._party_entry(str(body["party"]))
            reason = printable_text(str(body.get("reason", "")), LONGEST_TEXT)
            if kind == "verdict":
                verdict_text = f"step {body['step']}, stage {body['stage']}: {body['reason']}"
                party.verdicts = [*party.verdicts, printable_text(verdict_text, LONGEST_TEXT)][-MAX_VERDICTS:]
            elif kind == "link_broken":
                party.note = reason
            elif party.state not in _FOR_GOOD or kind in _FOR_GOOD:
                party.state, party.since = _STATES[kind], int(self._clock())
                party.since_step, party.roles = self._step, ((), ())
                party.note = reason if reason or kind == "party_joined" else party.note

    def count_checks(self, step: int, stages: Mapping[int, StageChecks]) -> None:
        """Count the checks of an applied step."""
        with self._lock:
            self._step = step + 1
            for name in {certified_name(checks.party) for checks in stages.values()}:
                made_checks = {
                    check
                    for stage_checks in stages.values()
                    if certified_name(stage_checks.party) == name
                    for check in stage_checks.made
                }
                self._party_entry(name).audits.update(made_checks)
            self._take_roles()
            for party in self._parties.values():
                party.steps += any(party.roles)

    # --- what is read -------------------------------------------------------------------------------

    def parties_status(self) -> PartiesStatus:
        """Return all rows as they are now; may be called from any thread."""
        with self._lock:
            self._refresh_times()
            sent = {} if self._endpoint is None else _by_certificate(self._endpoint.bytes_sent)
            rows = tuple(_make_party_row(name, party, sent.get(name, 0)) for name, party in self._parties.items())
            now = int(self._clock())
            return PartiesStatus(run=self._run, step=self._step or 0, steps=self._total, written=now, parties=rows)

    def party_rows(self) -> Sequence[PartyRow]:
        """Return the rows alone."""
        return self.parties_status().parties

    def changed_rows(self) -> Sequence[PartyRow]:
        """Return the rows with another state, or other stages, than when this was last asked."""
        changed_rows = [row for row in self.party_rows() if self._told.get(row.name) != row.state_text]
        self._told |= {row.name: row.state_text for row in changed_rows}
        return changed_rows

    def _refresh_times(self) -> None:
        now = int(self._clock())
        if self._endpoint is not None and self._incarnations is not None:
            for name, size_bytes in _by_certificate(self._endpoint.bytes_received).items():
                party = self._party_entry(name)
                if size_bytes != party.bytes_from:
                    party.bytes_from, party.heard = size_bytes, now
            for name in self._incarnations.present_names:
                party = self._party_entry(name)
                if party.state in ("waiting", "certified", "lost", "left"):
                    party.state, party.since = "connected", now
        self._take_roles()

    def _take_roles(self) -> None:
        engine = self._engine
        if engine is None:
            return
        holders, shadows = dict(engine.stage_holders), (dict(engine.stage_shadows), dict(engine.second_shadows))
        self._step = engine.next_step
        for name, party in self._parties.items():
            roles = (_stages_of(name, holders), _stages_of(name, *shadows))
            if party.state not in _AT_WORK or roles == party.roles:
                continue
            party.roles, party.since, party.since_step = roles, int(self._clock()), self._step
            party.state = "serving" if roles[0] else "shadowing" if roles[1] else "connected"

    def _party_entry(self, name: str) -> _Party:
        return self._parties.setdefault(certified_name(name), _Party("connected", int(self._clock())))


def _make_party_row(name: str, party: _Party, bytes_to: int) -> PartyRow:
    serves, shadows = party.roles
    return PartyRow(
        name=name,
        state=party.state,
        serves=serves,
        shadows=shadows,
        since=party.since,
        since_step=party.since_step,
        steps=party.steps,
        audits=dict(sorted(party.audits.items())),
        bytes_from=party.bytes_from,
        bytes_to=bytes_to,
        heard=party.heard,
        verdicts=tuple(party.verdicts),
        note=party.note,
    )


def _stages_of(name: str, *placed: Mapping[int, str]) -> tuple[int, ...]:
    return tuple(sorted(s for roles in placed for s, party in roles.items() if certified_name(party) == name))


def _by_certificate(sizes: Mapping[str, int]) -> dict[str, int]:
    bytes_by_name: Counter[str] = Counter()
    for name, size_bytes in sizes.items():
        if name != OWNER:
            bytes_by_name[certified_name(name)] += size_bytes
    return dict(bytes_by_name)
