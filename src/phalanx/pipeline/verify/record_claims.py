"""The record of what parties claim about a step, if the sender is one that may claim it."""

import time
from collections import Counter
from collections.abc import Mapping

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.forgery import NONSENSE, out_of_bounds
from phalanx.pipeline.protocol.message import ReceivedMessage
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
    WeightsHeld,
)
from phalanx.pipeline.protocol.signed import Link, Statement, to_signed
from phalanx.pipeline.protocol.tensor_stream import announces_a_boundary
from phalanx.pipeline.tolerance.screen import NOT_FINITE
from phalanx.pipeline.verify.audits import Audits, target_of
from phalanx.pipeline.verify.facts import Judgement, StepFacts, StepLedger
from phalanx.pipeline.verify.state_judgement import StateJudgement
from phalanx.telemetry import BUSY
from phalanx.transport import SignedHeader


class FaultReports:
    """The reports that were not looked at yet."""

    def __init__(self, facts: StepFacts) -> None:
        self._facts = facts
        self._waiting: list[tuple[ReceivedMessage, Fault]] = []

    def add(self, received: ReceivedMessage, fault: Fault) -> None:
        """Take a report."""
        self._waiting.append((received, fault))

    def weigh(self) -> Judgement | None:
        """Write reports down; the first that proves something by its signatures ends it."""
        while self._waiting:
            received, fault = self._waiting.pop(0)
            self._note(received.sender, fault)
            nonsense = self._find_nonsense(received.sender, fault)
            judgement = self._judge(received, fault) if nonsense is None else self._convict(nonsense, fault)
            if judgement is not None:
                return judgement
        return None

    def _note(self, sender: str, fault: Fault) -> None:
        # what the owner finds itself is of its author's making, whatever a worker reports of the worker's
        number = self._facts.ledger.sample.number("fault", fault.about if sender == OWNER else sender)
        if number is not None:
            said = {"about": fault.about, "error": fault.error, "reason": fault.reason}
            self._facts.observe("fault", {"party": sender, **said, "number": number})

    def _judge(self, received: ReceivedMessage, fault: Fault) -> Judgement | None:
        """Name the sender of a tensor that is wrong whatever its bytes are, or the party that shows a forged header."""
        facts, sender = self._facts, received.sender
        if fault.evidence is None or fault.epoch != facts.ledger.epoch or fault.about == OWNER:
            return None

        def between(message: Activation) -> Link | None:
            link = facts.assignment.link_of(message)
            return link if link == (fault.about, sender) else None

        try:
            shown = facts.statements.open(fault.evidence, Activation, fault.epoch, {}, between)
        except (FrameError, SignatureError) as exc:
            if received.header is None:
                # the owner's own word needs no signature, and convicts no party
                return None
            reason = f"{sender} complained of a message that {fault.about} did not send it: {exc}"
            stage = next(iter(facts.assignment.copies_of(sender)), 0)
            return facts.judgement("forgery", sender, stage, reason, headers={"fault": to_signed(received.header)})
        if announces_a_boundary(shown, facts.plan):
            return None
        headers = {"message": fault.evidence}
        stage = shown.message.source
        return facts.judgement("shape", fault.about, stage, fault.reason, accuser=sender, headers=headers)

    def _find_nonsense(self, sender: str, fault: Fault) -> SignedHeader | None:
        """A header of this session that went from one party to the other with a value that nothing can have."""
        if fault.evidence is None or fault.about == OWNER:
            return None
        try:
            header = self._facts.statements.frame(fault.evidence, (fault.about, sender))
        except (FrameError, SignatureError):
            return None
        return None if out_of_bounds(header) is None else header

    def _convict(self, nonsense: SignedHeader, fault: Fault) -> Judgement | None:
        if fault.about not in self._facts.present:
            return None
        reason = f"{fault.about} signed a value that nothing can have: {out_of_bounds(nonsense)}"
        stage = next(iter(self._facts.assignment.copies_of(fault.about)), 0)
        headers = {NONSENSE: to_signed(nonsense)}
        return self._facts.judgement("forgery", fault.about, stage, reason, headers=headers)


_STRIKES = 3
"""Odd messages of one party that are believed to be chance when nothing but statistics can tell."""

_MAX_DIGITS = 6
"""Digits of a stage's number in a message; a longer one is no stage's and costs time to read."""


class ClaimRecorder:
    """A recorder of messages to the coordinator; conclusions are drawn elsewhere.

    Attributes:
        ready: Parties that have taken their roles of this epoch.
        usage: Running costs by party, as each claims them.
        busy: Seconds in which each party claims to have worked since it was started, at most those of the run.
        bytes_sent: Bytes by party and receiver, as each claims them.
        convictions: What a message alone proves against its sender.
        has_news: Whether anything was recorded since this was last set to False.
    """

    def __init__(self, facts: StepFacts, audits: Audits, updates: StateJudgement, faults: FaultReports) -> None:
        self.ready: dict[str, Ready] = {}
        self.usage: dict[str, dict[str, float]] = {}
        self.busy: dict[str, float] = {}
        self.bytes_sent: dict[str, Mapping[str, int]] = {}
        self.convictions: list[Judgement] = []
        self.has_news = True
        self._facts = facts
        self._audits = audits
        self._updates = updates
        self._faults = faults
        self._strikes: Counter[str] = Counter()
        self._since = time.monotonic()

    @property
    def _ledger(self) -> StepLedger:
        return self._facts.ledger

    def handle(self, received: ReceivedMessage) -> bool:
        """Record a message to the coordinator; False when it is not for it.

        Raises:
            FrameError: The sender has no part in what it reports.
        """
        message, sender = received.message, received.sender
        match message:
            case UpdateReport():
                self._add_applied(sender, message)
            case Ready():
                self._add_ready(sender, message)
            case Fault():
                self._faults.add(received, message)
            case AuditReport() | StepAudited():
                # of a step that lags, only its audits are still awaited
                if any(_is_about(message, ledger) for ledger in self._facts.open_ledgers):
                    self._add_audit(sender, message)
            case Commit() if _is_about(message, self._ledger):
                self._add_commit(received, message)
            case GradientHeld() | WeightsHeld() | ScreenHit() if _is_about(message, self._ledger):
                self._add_shadows_word(sender, message)
            case Commit() | GradientHeld() | WeightsHeld() | ScreenHit():
                pass
            case _:
                return False
        self.has_news = True
        return True

    def _add_applied(self, sender: str, message: UpdateReport) -> None:
        self._take_costs(sender, message)
        assignment = self._facts.assignment
        for name, state in message.states.items():
            stage = int(name) if name.isdecimal() and len(name) < _MAX_DIGITS else -1
            if sender not in (assignment.holders.get(stage), assignment.shadows.get(stage)):
                raise FrameError(f"{sender!r} reported the state of stage {name}, which it does not have")
            follows = self._facts.plan.guard.one_optimizer and sender != assignment.holders.get(stage)
            if (state.step, message.epoch) == (self._ledger.step, self._ledger.epoch) and not follows:
                self._updates.said.setdefault(stage, {})[sender] = state

    def _take_costs(self, sender: str, message: UpdateReport) -> None:
        """Take what a party claims to have cost.

        Bytes count for links to parties of this run and never fall; no party has worked longer than the run lasts.
        Apart from that seconds and bytes are claims: no check of the guard rests on them.
        """
        known = {party for party in (OWNER, *self._facts.classes) if party != sender}
        before, now = self.bytes_sent.get(sender, {}), message.bytes_sent
        self.bytes_sent[sender] = {
            party: max(now.get(party, 0), before.get(party, 0)) for party in known & {*now, *before}
        }
        usage = dict(message.usage)
        self.busy[sender] = min(usage.pop(BUSY, 0.0), time.monotonic() - self._since)
        self.usage[sender] = usage

    def _add_ready(self, sender: str, message: Ready) -> None:
        if message.epoch != self._ledger.epoch:
            return
        present = (self._facts.assignment, self._facts.resting)
        held = [item for roles in present for item in (*roles.holders.items(), *roles.shadows.items())]
        stray = sorted(message.states.keys() - {str(stage) for stage, party in held if party == sender})
        if stray:
            raise FrameError(f"{sender!r} got ready with stage {stray[0][:_MAX_DIGITS]}, which it does not have")
        self.ready[sender] = message

    def _add_shadows_word(self, sender: str, message: GradientHeld | WeightsHeld | ScreenHit) -> None:
        """Record what a shadow has received, or what the receiver of a message finds odd about it."""
        assignment = self._facts.assignment
        if isinstance(message, ScreenHit):
            _expect(sender, assignment.holders.get(target_of(message)), message.kind)
            if message.source not in assignment.shadows or self._facts.holder(message.source) == OWNER:
                raise FrameError(f"{sender!r} finds a message of the owner odd, which needs no audit")
            self._audits.doubt(message)
            self._ask_for_urgent_audit(message)
            return
        _expect(sender, assignment.shadows.get(message.stage), message.kind)
        if isinstance(message, WeightsHeld):
            self._updates.take(sender, message)
        elif message.stage in self._ledger.held:
            raise FrameError(f"{message.kind!r} of stage {message.stage} came twice in step {message.step}")
        else:
            self._ledger.held[message.stage] = message

    def _add_commit(self, received: ReceivedMessage, commit: Commit) -> None:
        """Open every header that a stage shows; it has signed for all of them itself."""
        facts, sender = self._facts, received.sender
        _expect(sender, facts.assignment.holders.get(commit.stage), commit.kind)
        if commit.stage in self._ledger.commits:
            raise FrameError(f"{sender!r} committed stage {commit.stage} twice in step {commit.step}")

        def link_of(message: Activation) -> Link | None:
            # its receiver holds the stage that is committed to, and so is the sender
            return facts.assignment.link_of(message) if message.microbatch < facts.plan.microbatches else None

        place = {"step": commit.step, "target": commit.stage}
        opened: list[Statement[Activation]] = []
        for signed in commit.received:
            try:
                opened.append(facts.statements.open(signed, Activation, commit.epoch, place, link_of))
            except (FrameError, SignatureError) as exc:
                # without a valid commitment the step could never end
                headers = {"message": signed}
                headers |= {} if received.header is None else {"commit": to_signed(received.header)}
                reason = f"stage {commit.stage}: {sender} committed to an input that no party sent it: {exc}"
                self.convictions.append(facts.judgement("forgery", sender, commit.stage, reason, headers=headers))
                return
        self._ledger.add_commit(commit, received.header, opened)

    def _add_audit(self, sender: str, message: AuditReport | StepAudited) -> None:
        if isinstance(message, AuditReport):
            self._audits.add(sender, message)
            return
        key, ledger = (message.stage, sender), self._facts.ledger_of(message.step)
        if key not in ledger.awaited_step_audits or key in ledger.step_audits:
            raise FrameError(
                f"{sender!r} recomputed the whole step {message.step} of stage {message.stage}: not asked, or again"
            )
        ledger.step_audits[key] = message

    def _ask_for_urgent_audit(self, hit: ScreenHit) -> None:
        party = self._facts.holder(hit.source)
        self._facts.observe("screen_hit", {**hit.model_dump(mode="json"), "party": party})
        if not self._facts.plan.guard.audits:
            self._count_strike(party, hit)
            return
        self._audits.ask_urgently(hit)

    def _count_strike(self, party: str, hit: ScreenHit) -> None:
        """Count an odd message in mode `statistics`, which cannot recompute: it is used, but several convict."""
        self._strikes[party] += 1
        if self._strikes[party] < _STRIKES and hit.reason != NOT_FINITE:
            self._audits.release(hit)
            return
        reason = f"stage {hit.source}, microbatch {hit.microbatch}, {hit.direction}: {hit.reason}"
        self.convictions.append(self._facts.judgement("statistics", party, hit.source, reason))


def _is_about(message: StepMessage, ledger: StepLedger) -> bool:
    return (message.epoch, message.step) == (ledger.epoch, ledger.step)


def _expect(sender: str, expected: str | None, kind: str) -> None:
    if sender != expected:
        raise FrameError(f"{sender!r} sent {kind!r}; expected it from {expected!r}")
