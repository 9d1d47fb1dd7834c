"""The proof of a run by its audit log: which steps were audited as their draws demand, and what cannot be shown."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.errors import AuditLogError
from phalanx.pipeline import OWNER, AuditDraw, GuardConfig, SessionRules, ShownWork, check_step, read_leaves
from phalanx.security.audit import (
    LEAVES_FILE,
    PUBLIC_KINDS,
    LeafBatch,
    LogEntry,
    LogHead,
    LogSummary,
    describe_missing_entry,
    read_batch,
    read_public_head,
    verify_log,
)
from phalanx.security.crypto import Peer, certificate_facts, peer_from_certificate
from phalanx.train.records.audit_trail import LEAVES_FORMAT, LOG_FILE
from phalanx.train.records.history import KEY_REVEALED, ROUND_BEGUN
from phalanx.train.records.log_heads import SUMMARY_FILE, head_in_summary, known_heads
from phalanx.train.records.owner_key import owner_of
from phalanx.train.records.run_directory import owner_certificate
from phalanx.train.records.trust import LoggedDoubts
from phalanx.train.records.unstarted import MIDDLE

_OPENINGS = ("run_started", "run_resumed")
_MAX_MICROBATCHES = 2**20


@dataclass(frozen=True)
class RunProof:
    """The findings about a run's audit log.

    Attributes:
        steps: Steps that have a root in the log; redone ones count once.
        proven: Those of them with audits that were drawn again and found to be done.
        audits: Recomputed microbatches in them, under the signatures of stage and auditor.
        owners_audits: The same on the owner's word.
        unlike_audits: The same between numeric classes, where the distance is the owner's word.
        rates: Shares of the work that the last guarded session audited, by name.
        remarks: Facts that hold and prove less than one may think, one sentence each.
        unproven: Facts that should be there and could not be shown, one sentence each.
        in_doubt: Work of a convicted party that remains in the weights, one sentence a stage, by the log's last word on
            it.
        own_log: Directory of the log of an enclave that owns the run's pipeline; empty where the owner of the run does.
    """

    log: LogSummary
    owner: Peer
    key_from: str
    is_guarded: bool
    steps: int
    proven: int
    audits: int
    owners_audits: int
    unlike_audits: int
    rates: Mapping[str, float]
    remarks: tuple[str, ...]
    unproven: tuple[str, ...]
    in_doubt: tuple[str, ...] = ()
    own_log: str = ""

    @property
    def conclusion(self) -> str:
        """Describe the steps that the log proves, in one sentence."""
        if self.own_log:
            return f"only reports to the owner: the enclave that guards the steps signs its own log, {self.own_log}"
        if not self.is_guarded:
            return "no step was verified: the guard was off"
        if not self.steps:
            return "verdicts only: the log has no record of a step"
        drawn = f"{self.proven} of {self.steps} steps: each drawn audit was drawn again and was done"
        # that no audit was left out says nothing about work that none was drawn for
        return f"{drawn}; NOT that they are right: {'; '.join(self.in_doubt)}" if self.in_doubt else drawn


@dataclass
class _Session:
    """The lines of a session, from one opening to the next."""

    opening: Mapping[str, Any]
    number: int
    steps: list[tuple[LogEntry, LeafBatch]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def is_guarded(self) -> bool:
        return self.opening.get("audit_key_commitment") is not None

    @property
    def steps_a_round(self) -> int | None:
        """Steps of a federated round, where the session is of the pipeline of a site."""
        steps_a_round = self.opening.get("steps_a_round")
        return steps_a_round if isinstance(steps_a_round, int) and steps_a_round > 0 else None

    @property
    def has_leaves(self) -> bool:
        return self.is_guarded and self.opening.get("leaves_format") == LEAVES_FORMAT

    @property
    def place(self) -> str:
        """Its name in messages."""
        return f"the session that begins in line {self.number}"


def verify_run(run_dir: Path, certificate: Path | None = None, heads: Sequence[Path] = ()) -> RunProof:
    """Check a run's audit log and everything that it names, offline.

    Args:
        run_dir: The run directory, finished or not; ``events.jsonl`` and ``steps.jsonl`` are enough.
        certificate: The owner's certificate, kept by the caller; that of the directory when left out.
        heads: Files in which workers have kept how far the log had come.
    """
    path = run_dir / LOG_FILE
    key_from = certificate or owner_certificate(run_dir)
    owner = owner_of(key_from)
    end_mark, is_signed = _stated_end(run_dir, owner)
    reader = _LogReader()
    log = verify_log(path, owner, expected=end_mark, known=known_heads(run_dir, owner), visit=reader.read_line)
    # before there were leaves summaries were not signed
    is_told = is_signed or (end_mark is not None and not any(session.has_leaves for session in reader.sessions))
    unproven = [*_missing_lines(heads, owner, log.run, reader.public), *reader.order.unfinished_end(is_told)]
    work, proven, remarks, names = ShownWork(), set[int](), [*reader.order.remarks], set[str]()
    for session in _list_audited(reader.sessions, unproven, remarks):
        place = session.place
        rules = _read_rules(session, owner, reader.keys, log.run or "")
        if session.steps_a_round is not None:
            remarks.append(f"{place} is the log of a site: it proves its rounds, but not that there were no others")
        if rules.draw is None:
            unproven.append(f"{place}: the key of its audits is not revealed, so the audits cannot be drawn again")
        elif not rules.guard.is_enabled:
            remarks.append(f"{place} recomputes nothing: its steps are recorded and not verified")
        for entry, batch in session.steps:
            done = _check_shown(run_dir / LEAVES_FILE, entry, batch, rules)
            work = ShownWork(work.signed + done.signed, work.owners + done.owners, work.unlike + done.unlike)
            session.names.add(done.session)
            # of a step that was done again the last record counts
            is_proven, step = rules.draw is not None and rules.guard.is_enabled, {entry.body["step"]}
            proven = proven | step if is_proven else proven - step
        if len(session.names) > 1 or session.names & names:
            raise AuditLogError(
                f"{place}: its steps are signed for {len(session.names)} sessions, or for an earlier session"
            )
        names |= session.names
    if work.unlike:
        remarks.append(
            f"{work.unlike} audits are between numeric classes: the distance of their results is the owner's word"
        )
    return RunProof(
        log=log,
        owner=owner,
        key_from="the run directory itself" if certificate is None else str(certificate),
        is_guarded=any(session.is_guarded for session in reader.sessions),
        steps=len({entry.body["step"] for session in reader.sessions for entry, _ in session.steps}),
        proven=len(proven),
        audits=work.signed,
        owners_audits=work.owners,
        unlike_audits=work.unlike,
        rates=_audit_rates(reader.sessions),
        remarks=tuple(remarks),
        unproven=tuple(unproven),
        in_doubt=reader.doubts.doubt_sentences(),
        own_log=str(run_dir / MIDDLE) if any(session.opening.get("middle") for session in reader.sessions) else "",
    )


def _list_audited(sessions: Sequence[_Session], unproven: list[str], remarks: list[str]) -> list[_Session]:
    """Return the sessions whose records of steps can be checked, and say of each other one what that leaves open."""
    audited: list[_Session] = []
    for session in sessions:
        if session.has_leaves:
            audited.append(session)
        elif session.is_guarded:
            # earlier versions wrote no records, and no step lines; no later session loses them
            sentences = unproven if audited or session.steps else remarks
            sentences.append(f"{session.place} has no records of steps and proves verdicts only")
        elif any(other.is_guarded for other in sessions):
            unproven.append(f"{session.place} had no guard, so none of its steps was verified")
    return audited


class _EventOrder:
    """The order of steps that must have a record: none is left out, and none goes back without a reason."""

    def __init__(self) -> None:
        # None within and behind a session without records
        self._next: int | None = 0
        self._total: int | None = None
        self._last = ""
        self._begun = self._ended = False
        self.remarks: list[str] = []

    def follow_line(self, line: LogEntry, session: _Session | None) -> None:
        body, self._last = line.body, line.kind
        if line.kind in _OPENINGS:
            self._begun, self._ended = True, False
            self._begin_session(line, session)
        elif line.kind == "adopted":
            if session is not None:
                raise AuditLogError(f"line {line.head.num_events}: another run's state in the middle of this one")
            self._next = body["step"]
            self.remarks.append(f"it began with the state of run {body['run']} at step {self._next}")
        elif line.kind in ("rolled_back", "fell_back") and self._next is not None:
            self._next = min(self._next, body["to" if line.kind == "rolled_back" else "to_step"])
        elif line.kind == "stopped_early":
            self._total = body["step"]
        elif line.kind == ROUND_BEGUN:
            self._begin_round(line, session)
        elif line.kind == "step":
            if body["step"] != self._next:
                raise AuditLogError(
                    f"line {line.head.num_events}: step {self._next} has no record, but step {body['step']} follows"
                )
            self._next = body["step"] + 1
        elif line.kind == "run_completed":
            self._ended = True
            if session is not None and session.has_leaves and self._next != self._total:
                raise AuditLogError(
                    f"line {line.head.num_events}: the run is complete, but step {self._next} has no record"
                )

    def _begin_round(self, line: LogEntry, session: _Session | None) -> None:
        """Go on where a federated round begins: a site has no steps of rounds that it took no part in."""
        step, round_steps = line.body["step"], None if session is None else session.steps_a_round
        if round_steps is None or step % round_steps:
            raise AuditLogError(
                f"line {line.head.num_events}: a round begins at step {step}, but rounds of the session have "
                f"{round_steps} steps"
            )
        self._next = step

    def _begin_session(self, line: LogEntry, session: _Session | None) -> None:
        step, last = line.body.get("step", 0), self._next
        if last is not None and step > last:
            raise AuditLogError(f"line {line.head.num_events}: begins with step {step}, but step {last} has no record")
        self._next = step if session is not None and session.has_leaves else None
        self._total = line.body.get("steps")

    def unfinished_end(self, is_told: bool) -> Iterator[str]:
        """Describe why lines may be missing at the end; empty where none can be.

        Args:
            is_told: Whether the owner has signed, outside of the log, that it ends here.
        """
        if not self._begun:
            yield "the log's beginning: no session of a run has started in it"
        if self._ended or is_told:
            return
        why = "the last session was stopped" if self._last in ("run_stopped", KEY_REVEALED) else "the run has not ended"
        yield f"the log's end: {why}, and no {SUMMARY_FILE} with a signed head proves that no line follows"


class _LogReader:
    """A reader that takes the lines of a log apart into sessions."""

    def __init__(self) -> None:
        self.sessions: list[_Session] = []
        self.keys: dict[str, bytes] = {}
        """Revealed keys by commitment."""
        self.order = _EventOrder()
        self.public: list[str] = []
        """Digests of the lines that workers know of."""
        self.doubts = LoggedDoubts()

    def read_line(self, line: LogEntry) -> None:
        try:
            self._read_event(line)
        except (KeyError, TypeError, ValueError) as exc:
            raise AuditLogError(f"line {line.head.num_events}: {line.kind!r} is malformed ({exc})") from exc

    def _read_event(self, line: LogEntry) -> None:
        if line.kind in PUBLIC_KINDS:
            self.public.append(line.head.digest)
        if line.kind in _OPENINGS:
            self.sessions.append(_Session(line.body, line.head.num_events))
        elif line.kind == KEY_REVEALED:
            key = bytes.fromhex(line.body["key"])
            if hashlib.sha256(key).hexdigest() != line.body["commitment"]:
                raise AuditLogError(f"line {line.head.num_events}: the revealed key differs from the committed one")
            self.keys[line.body["commitment"]] = key
        elif line.kind == "step":
            if not self.sessions:
                raise AuditLogError(f"line {line.head.num_events}: a step before the run began")
            if self.sessions[-1].opening.get("audit_key_commitment") in self.keys:
                raise AuditLogError(f"line {line.head.num_events}: a step after the key of its audits was revealed")
            if type(line.body["epoch"]) is not int:
                raise TypeError("its epoch")
            self.sessions[-1].steps.append((line, LeafBatch.from_log_entry(line)))
        self.order.follow_line(line, self.sessions[-1] if self.sessions else None)
        self.doubts.read_event(line.kind, line.body)


def _missing_lines(paths: Sequence[Path], owner: Peer, run: str | None, public: Sequence[str]) -> Iterator[str]:
    """Describe the lines that a crash of the owner's machine may have taken from the log, and that workers know of."""
    for path in paths:
        head = read_public_head(path, owner)
        if head.run != run:
            raise AuditLogError(f"{path}: belongs to the log of run {head.run}, but this is the log of {run}")
        cut = describe_missing_entry(public, head.forced, str(path))
        if cut is not None:
            raise AuditLogError(
                f"the log {cut}, which was certainly on the owner's disk: the log was truncated or replaced"
            )
        gap = describe_missing_entry(public, head.last, str(path))
        if gap is not None:
            yield f"the log {gap}: the only honest cause is a crash of the owner's machine"


def _check_shown(path: Path, line: LogEntry, batch: LeafBatch, rules: SessionRules) -> ShownWork:
    try:
        leaves = read_leaves(read_batch(path, batch))
        return check_step(line.body["step"], line.body["epoch"], leaves, rules)
    except AuditLogError as exc:
        raise AuditLogError(f"step {line.body['step']} (line {line.head.num_events}): {exc}") from exc


def _read_rules(session: _Session, owner: Peer, keys: Mapping[str, bytes], run: str) -> SessionRules:
    """Read a session's rules from its opening, as far as the parties' certificates hold together."""
    body, where = session.opening, f"line {session.number}"
    try:
        guard, key = GuardConfig.model_validate(body["guard"]), keys.get(body["audit_key_commitment"])
        microbatches = body["microbatches"]
        if type(microbatches) is not int or not 0 < microbatches <= _MAX_MICROBATCHES:
            raise ValueError(f"{microbatches!r:.40} microbatches")  # noqa: TRY301
        draw = None if key is None else AuditDraw.from_guard(key, bytes.fromhex(body["audit_nonce"]), guard)
        return SessionRules(
            run=run,
            num_stages=len(body["stages"]),
            microbatches=microbatches,
            guard=guard,
            peers=_read_peers(body["certificates"], body["authority"], owner, where),
            draw=draw,
        )
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, ("guard", *first["loc"])))
        raise AuditLogError(f"{where}: its guard is from another version: {place}: {first['msg']}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise AuditLogError(f"{where}: has no valid rules for the audits of its steps ({exc})") from exc


def _read_peers(certificates: Mapping[str, str], authority: str, owner: Peer, where: str) -> dict[str, Peer]:
    peers = {}
    for name, pem in certificates.items():
        # as of the day on which it began: the log must stay readable long after
        facts = certificate_facts(pem.encode(), f"{where}, certificate of {name}")
        peer = peer_from_certificate(
            pem.encode(), authority.encode(), facts.not_before, f"{where}, certificate of {name}"
        )
        if peer.name != name or (name == OWNER and peer != owner):
            raise AuditLogError(f"{where}: the certificate of {name} belongs to another party")
        peers[name] = peer
    return peers


def _stated_end(run_dir: Path, owner: Peer) -> tuple[LogHead | None, bool]:
    """Where ``summary.json`` says that the log ends, and whether the owner has signed that."""
    path = run_dir / SUMMARY_FILE
    if not path.exists():
        return None, False
    signed = head_in_summary(run_dir, owner)
    if signed is not None:
        return signed, True
    try:
        head = json.loads(path.read_bytes())["audit_log_head"]
        return LogHead(int(head["num_events"]), str(head["digest"])), False
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise AuditLogError(
            f"{path}: has no readable audit_log_head, so a truncated log could not be detected"
        ) from exc


def _audit_rates(sessions: Sequence[_Session]) -> Mapping[str, float]:
    guards = [session.opening.get("guard") for session in sessions if session.is_guarded]
    guard = guards[-1] if guards and isinstance(guards[-1], dict) else {}
    return {name: rate for name, rate in sorted(guard.items()) if name.endswith("_rate") and isinstance(rate, float)}
