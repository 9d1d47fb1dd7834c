"""Plays a schedule in a whole company, and says which invariants did not hold."""

import contextlib
import gc
import re
import shutil
import threading
import types
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from acts import Act, Schedule
from companies import CERTIFIED, COMPANIES
from generating import JOINING
from lean import SharedParts
from liar import Forecast, Liar, LyingCompany
from neighbours import Seen
from turns import EndlessError, Turns

from phalanx.errors import (
    AuditLogError,
    EvidenceError,
    FrameError,
    NoHolderError,
    OutOfBoundsError,
    PeerRefusedError,
    PhalanxError,
)
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.proof.step_proof import SessionRules, check_step
from phalanx.pipeline.proof.step_record import read_leaves
from phalanx.pipeline.protocol.messages import parse_message
from phalanx.security.crypto import certified_name, create_authority, issue_certificate
from phalanx.testing import CompanyClock, CompanySession, MemoryCompany, MemoryNetwork
from phalanx.transport import HeaderFields

MAX_KEPT_BYTES = 2**20
"""More than an honest owner keeps of words, whatever an insider says."""
MANY_BYTES = 2**18
"""That an insider must have said before it is asked what the owner keeps."""
MAX_EVIDENCE_BYTES = 2**23
"""In the evidence of one run."""
MAX_FALLS = 5


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        ended: The error that ended the owner's run.
        weights: Digest of the final weights.
        evicted: Parties that were convicted.
        lost: Parties that were replaced.
        doubts: Stages and steps that the summary says are in doubt.
        events: Of the audit log.
        offline: By evidence file: the guilty party, and what it says offline; "refused:" before what does not hold.
        unproven: Steps with records that do not hold, and the reason.
        kept_bytes: Of texts and bytes that the owner keeps at the end; 0 where no party has said much.
        evidence_bytes: On disk.
        fired: Acts that were carried out, of each party.
        points: That each party with acts came by.
        beyond: Parties that have sent a value that nothing can have, where anybody was left to read it.
        lied: Parties that have sent a tensor that is not what they computed.
        coverage: As the company's.
        trace: Digest of what the owner said, heard and noted: two runs with the same one went alike.
    """

    ended: BaseException | None = None
    weights: str | None = None
    evicted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    doubts: list = field(default_factory=list)
    crashes: dict[str, BaseException] = field(default_factory=dict)
    errors: dict[str, PhalanxError] = field(default_factory=dict)
    events: list = field(default_factory=list)
    offline: dict[str, tuple[str, str]] = field(default_factory=dict)
    unproven: dict[int, str] = field(default_factory=dict)
    kept_bytes: int = 0
    evidence_bytes: int = 0
    passed_s: float = 0.0
    has_begun: bool = False
    fired: dict[str, set[int]] = field(default_factory=dict)
    points: dict[str, list] = field(default_factory=dict)
    beyond: set[str] = field(default_factory=set)
    lied: set[str] = field(default_factory=set)
    coverage: set = field(default_factory=set)
    trace: str = ""


class Theatre:
    """Everything that schedules share: certificates, models, and the outcomes of honest runs.

    Args:
        parts: What companies share beside that; nothing when left out.
    """

    def __init__(self, directory: Path, parts: SharedParts | None = None) -> None:
        self.directory = directory
        self._parts = parts
        self.num_played = 0
        self._pki = directory / "pki"
        create_authority(self._pki)
        for name in CERTIFIED:
            issue_certificate(self._pki, name)
        self._honest: dict[tuple[str, int], str] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._earlier: dict[str, dict[str, list]] = {}
        self._kept: dict[tuple[str, int], int] = {}

    def honest_weights(self, company: str, num_steps: int) -> str:
        """The digest of the weights of an honest and unguarded run."""
        if (company, num_steps) not in self._honest:
            run = COMPANIES[company].run(self._pki)
            guard = GuardConfig(mode="off", shadow=run.guard.shadow, classes=run.guard.classes)
            with self._open(run.model_copy(update={"guard": guard}), {}) as opened:
                opened.run(num_steps)
                self._honest[company, num_steps] = opened.weights_digest()
        return self._honest[company, num_steps]

    def honest_kept_bytes(self, company: str, num_steps: int) -> int:
        """What an owner among honest parties keeps of words."""
        if (company, num_steps) not in self._kept:
            self._kept[company, num_steps] = self.play(Schedule(company, steps=num_steps)).kept_bytes
        return self._kept[company, num_steps]

    def earlier(self, company: str, name: str) -> list:
        """What a worker saw in an honest session on other batches, with the same certificates."""
        if company not in self._earlier:
            kind = COMPANIES[company]
            run = kind.run(self._pki)
            other = run.model_copy(update={"train": run.train.model_copy(update={"seed": run.train.seed + 1})})
            watchers = {each: Liar(each, (), Seen(None, kind.names, kind.stages)) for each in kind.names}
            for watcher in watchers.values():
                watcher.goes_on = True
            with self._open(other, watchers, session=CompanySession("an-earlier-session")) as opened:
                opened.run(kind.steps)
            self._earlier[company] = {each: watcher.host_view.headers for each, watcher in watchers.items()}
        return self._earlier[company][name]

    def forecast(self, company: str, number: int, acts: Iterable[Act]) -> dict[Act, object]:
        """The effect of each act of a party in an honest run; an act without one changes nothing."""
        kind = COMPANIES[company]
        run = kind.run(self._pki)
        watchers = {name: Liar(name, (), Seen(None, kind.names, kind.stages)) for name in kind.names}
        name = f"worker-{number}"
        earlier = self.earlier(company, name)
        watchers[name] = Forecast(name, acts, Seen(None, kind.names, kind.stages, earlier=earlier))
        draw = kind.draw.from_guard(bytes(32), bytes(32), run.guard)
        opened = self._open(run, watchers, draw=draw)
        watchers[name].host_view.identity = opened.party_identity(name)
        with opened:
            opened.run(kind.steps)
            opened.weights_digest()
        for ended in (opened.crashes, opened.errors):
            if name in ended:
                raise ended[name]
        return watchers[name].effects

    def play_once(self, schedule: Schedule) -> Outcome:
        """Play it, unless it was played before."""
        if repr(schedule) not in self._outcomes:
            self._outcomes[repr(schedule)] = self.play(schedule)
        return self._outcomes[repr(schedule)]

    def play(self, schedule: Schedule) -> Outcome:
        """Play it to its end, whatever that is."""
        self.num_played += 1
        kind = COMPANIES[schedule.company]
        run = kind.run(self._pki)
        parties = run.pipeline.worker_names
        liars: dict[str, Liar] = {}
        company = None
        for number, acts in schedule.acts.items():
            name = f"worker-{number}"
            earlier = self.earlier(schedule.company, name) if schedule.looks_back else ()
            liars[name] = Liar(name, acts, Seen(None, parties, kind.stages, earlier=earlier))
        draw = kind.draw.from_guard(schedule.order.to_bytes(32, "big"), bytes(32), run.guard)
        company = self._open(run, liars, order=schedule.order, draw=draw)
        for name, liar in liars.items():
            liar.host_view.identity = company.party_identity(name)
        outcome, has_checkpoint = Outcome(), False
        num_words: dict[str, int] = {}

        def note_end() -> None:
            num_words.update({name: len(liar.host_view.headers) for name, liar in liars.items()})

        try:
            with company:
                if schedule.victims:
                    # a session has the state before its first step without asking anybody
                    company.save_step()
                has_checkpoint = True
                outcome.weights = _train(company, schedule, note_end)
                if sum(liar.num_sent_bytes for liar in liars.values()) > MANY_BYTES or not schedule.liars:
                    outcome.kept_bytes = kept_bytes(company.engine)
        except EndlessError:
            raise
        except Exception as exc:  # noqa: BLE001 - how it ended is what is judged
            outcome.ended = exc
        outcome.evicted, outcome.lost = company.evicted, company.lost
        outcome.crashes, outcome.errors, outcome.events = company.crashes, company.errors, company.events
        outcome.passed_s, outcome.has_begun = company.clock.awake_seconds(), company.has_begun and has_checkpoint
        outcome.doubts = company.checks.list_doubts()
        outcome.fired = {name: liar.fired for name, liar in liars.items()}
        outcome.points = {name: liar.points for name, liar in liars.items()}
        outcome.coverage, outcome.trace = company.coverage, company.trace.hexdigest()
        outcome.lied = {name for name, liar in liars.items() if liar.has_lied}
        outcome.beyond = {
            name
            for name, liar in liars.items()
            if any(map(_is_beyond, _sent(liar, num_words.get(name), company.heard_headers)))
        }
        outcome.offline, outcome.evidence_bytes = self._explained(company)
        outcome.unproven = self._unproven(company, run)
        return outcome

    def faults(self, schedule: Schedule, outcome: Outcome) -> list[str]:
        """Which invariants do not hold."""
        kind, liars, victims = COMPANIES[schedule.company], schedule.liars, schedule.victims
        found = []
        if outcome.ended is not None and not _may_end(outcome, liars | victims):
            found.append(f"the run ended: {outcome.ended!r}"[:400])
        guilty = {certified_name(name) for name in outcome.evicted}
        if guilty - liars:
            found.append(f"honest and convicted: {sorted(guilty - liars)}")
        gone = {certified_name(name) for name in outcome.lost}
        if gone - liars - victims:
            found.append(f"honest and replaced: {sorted(gone - liars - victims)}")
        found += [
            f"{name} is honest and crashed: {exc!r}" for name, exc in outcome.crashes.items() if name not in liars
        ]
        if outcome.ended is None:
            ended = {name: exc for name, exc in outcome.errors.items() if certified_name(name) not in liars | victims}
            found += [f"{name} is honest and ended: {exc!r}" for name, exc in ended.items()]
        for path, (party, conclusion) in outcome.offline.items():
            refused = conclusion.startswith("refused:")
            if certified_name(party) not in liars and conclusion.startswith("holds"):
                found.append(f"honest and convicted offline: {party} in {path}: {conclusion}")
            if refused and "/refused/" not in path:
                found.append(f"a verdict does not hold offline: {path}: {conclusion}")
        left = {certified_name(str(body["party"])) for kind, body in outcome.events if kind == "left"} | gone
        if outcome.ended is None:
            found += [f"{name} asked to leave and is still there" for name in sorted(schedule.leavers - liars - left)]
        found += self._faults_of_weights(schedule, outcome)
        found += _faults_of_evidence(outcome)
        found += [f"the record of step {step} does not hold: {why}" for step, why in outcome.unproven.items()]
        if outcome.kept_bytes > MAX_KEPT_BYTES + self.honest_kept_bytes(schedule.company, schedule.steps):
            found.append(f"the owner keeps {outcome.kept_bytes} bytes of words")
        if outcome.evidence_bytes > MAX_EVIDENCE_BYTES:
            found.append(f"{outcome.evidence_bytes} bytes of evidence")
        if outcome.passed_s > (schedule.steps + 2) * kind.step_timeout_s:
            found.append(f"{outcome.passed_s:.0f} s passed")
        return found

    def _faults_of_weights(self, schedule: Schedule, outcome: Outcome) -> list[str]:
        kind = COMPANIES[schedule.company]
        if kind.tolerates:
            # a change below the tolerance is none; a lie of these is far beyond it
            gone = {certified_name(name) for name in (*outcome.evicted, *outcome.lost)}
            return [f"{name} lied and is still there" for name in sorted(outcome.lied - gone)]
        is_same = outcome.ended is not None or outcome.weights == self.honest_weights(schedule.company, schedule.steps)
        if is_same or not (kind.is_exact or outcome.evicted):
            return []
        if outcome.doubts and not kind.leaves_no_doubt:
            return []
        return [f"the weights are not those of the honest run; in doubt: {outcome.doubts}"]

    def _explained(self, company) -> tuple[dict[str, tuple[str, str]], int]:
        directory, found, size = company.run_dir / "evidence", {}, 0
        authority = self._pki / "authority.pem"
        for path in sorted(directory.rglob("*.json")):
            where = str(path.relative_to(company.run_dir))
            size += path.stat().st_size
            party = re.search(r"worker-[\d.]+\d|worker-\d+", path.name)
            try:
                conclusion = str(explain_evidence(path, authority, company.session)["conclusion"])
            except EvidenceError as exc:
                conclusion = f"refused: {str(exc).removeprefix(str(path))}"
            found[where] = (party.group() if party else path.name, conclusion)
        return found, size

    def _unproven(self, company, run) -> dict[int, str]:
        """Check the record of every applied step as a reader of the audit log does."""
        rules = SessionRules(
            run=company.session.partition("-")[0],
            num_stages=run.pipeline.stages,
            microbatches=run.train.microbatches,
            guard=run.guard,
            peers={name: company.party_identity(name).public for name in ("owner", *run.pipeline.worker_names)},
            draw=company.draw,
        )
        found = {}
        for record in company.records:
            try:
                check_step(record.step, record.epoch, read_leaves(record.leaves), rules)
            except AuditLogError as exc:
                found[record.step] = str(exc)
        return found

    def _open(self, run, liars, **kwargs) -> LyingCompany:
        directory = self.directory / "company"
        if self._parts is not None:
            self._parts.take_back()
        # nothing of the last one is read again
        shutil.rmtree(directory, ignore_errors=True)
        return LyingCompany(run, directory, liars, cache=self.directory / "models", **kwargs)


def _sent(liar: Liar, num_words: int | None, heard: Container[bytes]) -> list[HeaderFields]:
    """What a party has sent to others: until the last step ended all, and behind it what the owner has heard.

    A word that comes when the owner has all that it asked for is read by nobody.

    Args:
        num_words: Those of `liar.host_view` until then; None where the last step did not end.
        heard: Bytes of the headers of what the owner has heard.
    """
    headers = [header for header, _ in liar.host_view.headers]
    behind = len(headers) if num_words is None else num_words
    mine = [header.fields for n, header in enumerate(headers) if n < behind or header.header_bytes in heard]
    return [each for each in mine if certified_name(each.sender) == liar.name and each.sender != each.receiver]


def _is_beyond(fields: HeaderFields) -> bool:
    if fields.kind in JOINING:
        # whoever has no role yet is not let in
        return False
    try:
        parse_message(fields.kind, fields.body)
    except OutOfBoundsError:
        return True
    except FrameError:
        return False
    return False


def _faults_of_evidence(outcome: Outcome) -> list[str]:
    """Whatever was refused is kept, and a party that sends a value that nothing can have is convicted or contained.

    A frame that is too long to be shown to the owner is one party's word against another's: its author's link then
    leads through the owner, which sees the next one itself.
    """
    refusals = [body["evidence"] for kind, body in outcome.events if kind == "verdict_refused" and body["evidence"]]
    found = ["evidence of one refusal has overwritten that of another"] if len({*refusals}) < len(refusals) else []
    gone = {certified_name(name) for name in (*outcome.evicted, *outcome.lost)}
    faults = [body for kind, body in outcome.events if kind == "fault" and "cannot be shown to" in body["reason"]]
    disputed = {(body["party"], body["about"]) for body in faults}
    gone |= {
        certified_name(body["party"])
        for kind, body in outcome.events
        if kind == "link_led" and (body["party"], body["to"]) in disputed
    }
    return found + [f"{name} sent what nothing can have and is still there" for name in sorted(outcome.beyond - gone)]


def _may_end(outcome: Outcome, parties: set[str]) -> bool:
    """A run that has not begun may refuse to, if its error names parties in the way, dead or lying, and no other."""
    named = set(re.findall(r"worker-\d+", str(outcome.ended)))
    return isinstance(outcome.ended, PhalanxError) and not outcome.has_begun and bool(named) and named <= parties


def _train(company, schedule: Schedule, note_end: Callable[[], None]) -> str:
    """Every step and the end, as a session has it; where all copies of a stage are gone, again from the checkpoint.

    Args:
        note_end: Called behind the last step, before the weights are fetched.
    """
    falls, step, done = 0, 0, set()
    while True:
        for move in schedule.moves:
            if move[0] == step and move not in done:
                done.add(move)
                _move(company, move[1], f"worker-{move[2]}")
        try:
            if step == schedule.steps:
                note_end()
                return company.weights_digest()
            company.run(1)
            step += 1
        except NoHolderError:
            falls += 1
            if not schedule.victims or falls > MAX_FALLS:
                raise
            step = company.fall_back()


def _move(company, what, name):
    match what:
        case "leave":
            company.ask_to_leave(name)
        case "return":
            # whoever was convicted, or comes too often, may not
            with contextlib.suppress(PeerRefusedError):
                company.come_back(name)
        case "kill":
            company.kill_worker(name)


_ATOMS = frozenset({int, float, bool, type(None), type, torch.Tensor, torch.dtype, torch.nn.Parameter})
_ATOMS |= {types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType}
# what hangs on an error that was kept is the wire's, and the liar's
_ATOMS |= {types.TracebackType, types.FrameType}
_FOREIGN = (torch.nn.Module, threading.Thread, MemoryCompany, MemoryNetwork, CompanyClock, Turns)


def kept_bytes(root: object) -> int:
    """Bytes of all texts and byte strings that can be reached from an object; each counts once."""
    seen, waiting, size = set(), [root], 0
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind in _ATOMS or id(each) in seen:
            continue
        seen.add(id(each))
        if kind in (str, bytes, bytearray):
            size += len(each)
        elif kind is memoryview:
            size += each.nbytes
        elif not issubclass(kind, _FOREIGN) and kind is not type:
            waiting += gc.get_referents(each)
    return size
