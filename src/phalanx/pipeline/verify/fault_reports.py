"""Reports of faults in each other's messages: they are logged, and only a wrong signed header convicts."""

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.forgery import NONSENSE, out_of_bounds
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Activation, Fault
from phalanx.pipeline.protocol.signed import Link, to_signed
from phalanx.pipeline.protocol.tensor_stream import announces_a_boundary
from phalanx.pipeline.verify.facts import Judgement, StepFacts
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
        number = self._facts.sample.number("fault", fault.about if sender == OWNER else sender)
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
