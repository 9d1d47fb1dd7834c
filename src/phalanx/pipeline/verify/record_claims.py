"""The record of what parties claim about a step, if the sender is one that may claim it."""

import time
from collections.abc import Collection, Mapping, Sequence

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.forgery import NONSENSE, out_of_bounds
from phalanx.pipeline.protocol.message import Message, ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Commit,
    Fault,
    GradientHeld,
    Ready,
    ScreenHit,
    StepAudited,
    StepMessage,
    UpdateReport,
    target_of,
)
from phalanx.pipeline.protocol.signed import Link, Statement, to_signed
from phalanx.pipeline.protocol.tensor_stream import announces_a_boundary
from phalanx.pipeline.verify.audits import Audits
from phalanx.pipeline.verify.facts import Judgement, StepFacts, StepLedger
from phalanx.pipeline.verify.state_judgement import StateJudgement
from phalanx.telemetry import BUSY, WALL
from phalanx.transport import SignedHeader


class FaultReports:
    """The reports that were not looked at yet."""

    def __init__(self, facts: StepFacts) -> None:
        self._facts = facts
        self._waiting: list[tuple[ReceivedMessage, Fault]] = []

    def add_fault(self, received: ReceivedMessage, fault: Fault) -> None:
        """Take a report."""
        self._waiting.append((received, fault))

    def weigh_faults(self) -> Judgement | None:
        """Write reports down; the first that proves something by its signatures ends it."""
        while self._waiting:
            received, fault = self._waiting.pop(0)
            self._log_fault(received.sender, fault)
            nonsense = self._find_nonsense(received.sender, fault)
            judgement = (
                self._judge_fault(received, fault) if nonsense is None else self._convict_signer(nonsense, fault)
            )
            if judgement is not None:
                return judgement
        return None

    def _log_fault(self, sender: str, fault: Fault) -> None:
        # what the owner finds itself is of its author's making, whatever a worker reports of the worker's
        number = self._facts.ledger.event_sampler.number_event("fault", fault.about if sender == OWNER else sender)
        if number is not None:
            details = {"about": fault.about, "error": fault.error, "reason": fault.reason}
            self._facts.observe("fault", {"party": sender, **details, "number": number})

    def _judge_fault(self, received: ReceivedMessage, fault: Fault) -> Judgement | None:
        """Name the sender of a tensor that is wrong whatever its bytes are, or the party that shows a forged header."""
        facts, sender = self._facts, received.sender
        if fault.evidence is None or fault.epoch != facts.ledger.epoch or fault.about == OWNER:
            return None

        def between(message: Activation) -> Link | None:
            link = facts.assignment.link_of(message)
            return link if link == (fault.about, sender) else None

        try:
            shown = facts.statements.open_statement(fault.evidence, Activation, fault.epoch, {}, between)
        except (FrameError, SignatureError) as exc:
            if received.header is None:
                # the owner's own word needs no signature, and convicts no party
                return None
            reason = f"{sender} complained about a message that {fault.about} did not send: {exc}"
            stage = next(iter(facts.assignment.copies_of(sender)), 0)
            return facts.make_judgement("forgery", sender, stage, reason, headers={"fault": to_signed(received.header)})
        if announces_a_boundary(shown, facts.plan):
            return None
        headers = {"message": fault.evidence}
        stage = shown.message.source
        return facts.make_judgement("shape", fault.about, stage, fault.reason, accuser=sender, headers=headers)

    def _find_nonsense(self, sender: str, fault: Fault) -> SignedHeader | None:
        """A header of this session that went from one party to the other with a value that nothing can have.

        What the owner was to carry went to whomever.
        """
        if fault.evidence is None or fault.about == OWNER:
            return None
        try:
            link = (fault.about, None if sender == OWNER else sender)
            header = self._facts.statements.open_frame_header(fault.evidence, link)
        except (FrameError, SignatureError):
            return None
        return None if out_of_bounds(header) is None else header

    def _convict_signer(self, nonsense: SignedHeader, fault: Fault) -> Judgement | None:
        if fault.about not in self._facts.present_parties:
            return None
        reason = f"{fault.about} signed an impossible value: {out_of_bounds(nonsense)}"
        stage = next(iter(self._facts.assignment.copies_of(fault.about)), 0)
        headers = {NONSENSE: to_signed(nonsense)}
        return self._facts.make_judgement("forgery", fault.about, stage, reason, headers=headers)


class ClaimRecorder:
    """A recorder of messages to the coordinator; conclusions are drawn elsewhere.

    Attributes:
        ready: Parties that have taken their roles of this epoch.
        usage: Running costs by party, as each claims them.
        busy: Claimed working seconds of each party since its start, at most those of the run.
        phases: The last step of each party, and its wall seconds by phase as the party claims them.
        bytes_sent: Bytes by party and receiver, as each claims them.
        convictions: Judgements that a message alone proves against its sender.
        has_news: Whether anything was recorded since this was last set to False.
    """

    def __init__(self, facts: StepFacts, audits: Audits, updates: StateJudgement, faults: FaultReports) -> None:
        self.ready: dict[str, Ready] = {}
        self.usage: dict[str, dict[str, float]] = {}
        self.busy: dict[str, float] = {}
        self.phases: dict[str, tuple[int, dict[str, float]]] = {}
        self.bytes_sent: dict[str, Mapping[str, int]] = {}
        self.convictions: list[Judgement] = []
        self.has_news = True
        self._facts = facts
        self._audits = audits
        self._updates = updates
        self._faults = faults
        self._since = time.monotonic()

    def record_message(self, received: ReceivedMessage) -> bool:
        """Record a message to the coordinator; False when it is not for it.

        Raises:
            FrameError: The sender has no part in the reported matter.
        """
        message, sender = received.message, received.sender
        match message:
            case UpdateReport():
                self._add_applied(received, message)
            case Ready():
                self._add_ready(received, message)
            case Fault():
                self._faults.add_fault(received, message)
            case AuditReport() | StepAudited():
                # of a step that lags, only its audits are still awaited
                if any(_is_about(message, ledger) for ledger in self._facts.open_ledgers):
                    self._add_audit(received, message)
            case Commit() if _is_about(message, self._facts.ledger):
                self._add_commit(received, message)
            case GradientHeld() if _is_about(message, self._facts.ledger):
                # record what a shadow has received
                _expect_sender(sender, self._facts.assignment.shadows_of(message.stage), message.kind)
                if (message.stage, sender) in self._facts.ledger.held:
                    self._refuse_repetition(received, f"stage {message.stage}, step {message.step}")
                elif self._store_statements(received):
                    self._facts.ledger.held[message.stage, sender] = message
            case ScreenHit() if _is_about(message, self._facts.ledger):
                self._add_screen_hit(sender, message)
            case Commit() | GradientHeld() | ScreenHit():
                pass
            case _:
                return False
        self.has_news = True
        return True

    def _store_statements(self, received: ReceivedMessage, message: Message | None = None) -> bool:
        """Store a message's statements; False where its author has signed another statement of the same identity."""
        message = received.message if message is None else message
        first = self._facts.record.add_message(received.sender, message, received.header)
        if first is None or received.header is None:
            return True
        headers = {"first": first, "second": to_signed(received.header)}
        reason = f"{received.sender} signed two different {message.kind!r} messages about one thing"
        stage = next(iter(self._facts.assignment.copies_of(received.sender)), 0)
        judgement = self._facts.make_judgement("equivocation", received.sender, stage, reason, headers=headers)
        self.convictions.append(judgement)
        return False

    def _refuse_repetition(self, received: ReceivedMessage, where: str) -> None:
        """Refuse a repeated message; convict its author where it contradicts the first."""
        if self._store_statements(received):
            raise FrameError(f"{received.sender!r} sent {received.message.kind!r} of {where} twice")

    def _add_applied(self, received: ReceivedMessage, message: UpdateReport) -> None:
        sender, assignment = received.sender, self._facts.assignment
        self._take_costs(sender, message)
        for name in message.states:
            if sender not in assignment.parties_of(int(name)):
                raise FrameError(f"{sender!r} reported the state of stage {name}, which it does not hold")
        if message.epoch != self._facts.ledger.epoch:
            return
        due = {name: state for name, state in message.states.items() if state.step == self._facts.ledger.step}
        if not self._store_statements(received, message.model_copy(update={"states": due})):
            return
        for name, state in due.items():
            stage = int(name)
            self._updates.reported_states.setdefault(stage, {}).setdefault(sender, state)

    def _take_costs(self, sender: str, message: UpdateReport) -> None:
        """Take the costs that a party claims.

        Bytes count for links to parties of this run and never fall; no party has worked longer than the run lasts.
        Apart from that seconds and bytes are claims: no check of the guard rests on them.
        """
        parties = {party for party in (OWNER, *self._facts.classes) if party != sender}
        before, now = self.bytes_sent.get(sender, {}), message.bytes_sent
        self.bytes_sent[sender] = {
            party: max(now.get(party, 0), before.get(party, 0)) for party in parties & {*now, *before}
        }
        usage = dict(message.usage)
        seconds = {
            name.removesuffix(WALL): usage.pop(name) for name in message.usage if name.endswith(WALL) and name != BUSY
        }
        if seconds and message.step:
            # it reports after its update, when its copies have taken one step more
            self.phases[sender] = (message.step - 1, seconds)
        self.busy[sender] = min(usage.pop(BUSY, 0.0), time.monotonic() - self._since)
        self.usage[sender] = usage

    def _add_ready(self, received: ReceivedMessage, message: Ready) -> None:
        sender = received.sender
        if message.epoch != self._facts.ledger.epoch:
            return
        stray = sorted(message.states.keys() - {str(stage) for stage in self._facts.assignment.copies_of(sender)})
        if stray:
            raise FrameError(f"{sender!r} reported ready with stage {stray[0]}, which it does not hold")
        # a state of another step is not what the party was asked for, and is not stored
        due = {name: state for name, state in message.states.items() if state.step == self._facts.ledger.step}
        is_consistent = self._store_statements(received, message.model_copy(update={"states": due}))
        if sender in self.ready and is_consistent:
            raise FrameError(f"{sender!r} reported ready for epoch {message.epoch} twice")
        self.ready.setdefault(sender, message)

    def _add_screen_hit(self, sender: str, message: ScreenHit) -> None:
        """Take note that the receiver of a message finds it odd."""
        assignment = self._facts.assignment
        _expect_sender(sender, (assignment.holders.get(target_of(message.key)),), message.kind)
        if message.source not in assignment.shadows or self._facts.holder_of(message.source) == OWNER:
            raise FrameError(f"{sender!r} screened a message of the owner, which needs no audit")
        self._audits.note_doubt(message)
        party = self._facts.holder_of(message.source)
        self._facts.observe("screen_hit", {**message.model_dump(mode="json"), "party": party})
        self._audits.ask_urgently(message)

    def _add_commit(self, received: ReceivedMessage, commit: Commit) -> None:
        """Open every header that a stage shows; it has signed for all of them itself."""
        facts, sender = self._facts, received.sender
        _expect_sender(sender, (facts.assignment.holders.get(commit.stage),), commit.kind)
        if commit.stage in self._facts.ledger.commits:
            self._refuse_repetition(received, f"stage {commit.stage}, step {commit.step}")
            return
        if not self._store_statements(received):
            return

        def link_of(message: Activation) -> Link | None:
            # its receiver holds the stage that is committed to, and so is the sender
            return facts.assignment.link_of(message) if message.microbatch < facts.plan.microbatches else None

        place = {"step": commit.step, "target": commit.stage}
        opened: list[Statement[Activation]] = []
        for signed in commit.received:
            try:
                opened.append(facts.statements.open_statement(signed, Activation, commit.epoch, place, link_of))
                _refuse_repeated_input(opened)
            except (FrameError, SignatureError) as exc:
                # without a valid commitment the step could never end
                headers = {"message": signed}
                headers |= {} if received.header is None else {"commit": to_signed(received.header)}
                reason = f"stage {commit.stage}: {sender} committed to an input that no party sent it: {exc}"
                self.convictions.append(facts.make_judgement("forgery", sender, commit.stage, reason, headers=headers))
                return
        self._facts.ledger.add_commit(commit, received.header, opened)

    def _add_audit(self, received: ReceivedMessage, message: AuditReport | StepAudited) -> None:
        sender, ledger = received.sender, self._facts.ledger_of(message.step)
        if isinstance(message, AuditReport):
            self._audits.check_asked(sender, message)
            place = f"stage {message.stage}, microbatch {message.microbatch}, order {message.order}"
            if self._audits.has_report(sender, message):
                self._refuse_repetition(received, place)
            elif self._store_statements(received):
                self._audits.add_report(sender, message)
            return
        key = (message.stage, sender)
        if key not in ledger.awaited_step_audits or message.order != ledger.orders.get(key):
            raise FrameError(
                f"{sender!r} recomputed the whole step {message.step} of stage {message.stage}: not requested"
            )
        if key in ledger.step_audits:
            self._refuse_repetition(received, f"stage {message.stage}, step {message.step}")
        elif self._store_statements(received):
            ledger.step_audits[key] = message


def _refuse_repeated_input(opened: Sequence[Statement[Activation]]) -> None:
    """Refuse a commitment with two headers for one input."""
    if any(earlier.message.key == opened[-1].message.key for earlier in opened[:-1]):
        raise FrameError("it has one input twice")


def _is_about(message: StepMessage, ledger: StepLedger) -> bool:
    return (message.epoch, message.step) == (ledger.epoch, ledger.step)


def _expect_sender(sender: str, expected: Collection[str | None], kind: str) -> None:
    if sender not in expected:
        raise FrameError(f"{sender!r} sent {kind!r}; expected it from {' or '.join(map(repr, expected)) or None}")
