"""The signed messages of the last steps, kept until no verdict can rest on them any more."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.engine import Verdict
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.files import VerdictBasis
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    AuditReport,
    Commit,
    GradientHeld,
    PassedOnHeader,
    Ready,
    StepAudited,
    UpdateReport,
    WeightsHeld,
)
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers

_STEPS_KEPT = 2
_DIRECTIONS = 2


@dataclass(frozen=True)
class _Said:
    """One signed message about one stage; `step` is that of the state when it is about a state."""

    kind: str
    party: str
    stage: int
    step: int
    header: PassedOnHeader
    report: AuditReport | None = None


@dataclass
class SignedHistory:
    """Signed commitments, audit reports and state digests of the present and the last steps.

    Frames that the owner sends to itself are not signed: the owner is trusted, and its word is
    named as such where evidence is explained.
    """

    _said: dict[tuple[object, ...], _Said] = field(default_factory=dict)
    """By kind, party, stage, step and microbatch: a party that repeats itself takes no more room."""

    def hear(self, received: ReceivedMessage) -> None:
        """Keep the header of a message that a verdict may rest on; anything else is let go."""
        message, party = received.message, received.sender
        if received.header is None:
            return
        if isinstance(message, AuditReport):
            header = to_signed(received.header)
            self._keep(_Said(message.kind, party, message.stage, message.step, header, report=message))
        elif isinstance(message, Commit | GradientHeld | StepAudited):
            header = to_signed(received.header)
            self._keep(_Said(message.kind, party, message.stage, message.step, header))
        elif isinstance(message, WeightsHeld):
            self._keep(_Said("state", party, message.stage, message.state.step, to_signed(received.header)))
        elif isinstance(message, UpdateReport | Ready):
            header = to_signed(received.header)
            states = [(int(name), state.step) for name, state in message.states.items() if _is_stage(name)]
            for stage, step in states:
                self._keep(_Said("state", party, stage, step, header))

    def forget_before(self, step: int) -> None:
        """Let go of what is older than the step before `step`."""
        self._said = {key: said for key, said in self._said.items() if said.step >= step - _STEPS_KEPT}

    def _keep(self, said: _Said) -> None:
        report = said.report
        about = None if report is None else (report.microbatch, report.urgent)
        self._said[(said.kind, said.party, said.stage, said.step, about)] = said

    def said(
        self, kind: str, party: str, stage: int, step: int, microbatch: int | None = None
    ) -> PassedOnHeader | None:
        """The header of what a party said last of this kind; with a microbatch, of its report on a drawn audit."""
        about = None if microbatch is None else (microbatch, False)
        found = self._said.get((kind, party, stage, step, about))
        return None if found is None else found.header

    def case(
        self, judgement: Judgement, facts: StepFacts, certificates: Mapping[str, str], authority: str
    ) -> VerdictBasis:
        """Put a judgement together with everything that was signed about it.

        Args:
            judgement: What was decided.
            facts: The facts at that moment, before any party is replaced.
            certificates: PEM of all parties: what a party showed may be signed by any of them.
            authority: PEM of the certificate that vouches for them.
        """
        verdict, compared = judgement.verdict, judgement.compared
        claim = compared.tensors.get("accuser")
        digest = None if claim is None else digest_hex(tensor_buffers(claim.contiguous()))
        server, shadow, auditor = _sides(judgement, facts.assignment)
        said = self.about(verdict, server, shadow, auditor, claim=digest, shown=judgement.headers.get("input"))
        headers = {**said, **judgement.headers}
        return VerdictBasis(verdict, compared, headers, certificates, authority, facts.plan, facts.statements.session)

    def about(
        self,
        verdict: Verdict,
        holder: str,
        shadow: str | None,
        auditor: str | None,
        *,
        claim: str | None = None,
        shown: PassedOnHeader | None = None,
    ) -> Mapping[str, PassedOnHeader]:
        """Return what holder and shadow signed about the stage and the step of a verdict.

        Args:
            verdict: The guilty party and its offence.
            holder: The stage's holder.
            shadow: The stage's shadow.
            auditor: The author of the report that it is about: a third party or the shadow.
            claim: Digest of the tensor that the accuser brought; picks the report that committed to it.
            shown: An input that a report showed; picks that report.

        Returns:
            Headers by role: "commit", "gradient_held", "step_audited", "report", and "state_holder", "state_shadow" for
            the state at the beginning of the step. What was never signed is missing.
        """
        roles = {
            ("commit", holder): "commit",
            ("gradient_held", shadow): "gradient_held",
            ("step_audited", auditor): "step_audited",
            ("state", shadow): "state_shadow",
            ("state", holder): "state_holder",
        }
        found: dict[str, PassedOnHeader] = {}
        for said in self._said.values():
            if (said.stage, said.step) != (verdict.stage, verdict.step):
                continue
            if said.report is not None:
                wanted = shown in said.report.inputs if shown else _is_about(said.report, verdict, claim)
                if wanted and said.party == auditor:
                    found["report"] = said.header
            elif (said.kind, said.party) in roles:
                found[roles[(said.kind, said.party)]] = said.header
        return found


def _is_about(report: AuditReport, verdict: Verdict, claim: str | None) -> bool:
    if verdict.offence == "forgery":
        # it leaves out what was asked for
        return report.microbatch == verdict.microbatch and (report.urgent or len(report.digests) < _DIRECTIONS)
    said = {str(direction): digest for direction, digest in report.digests.items()}
    digest = said.get(verdict.direction or "")
    return report.microbatch == verdict.microbatch and digest is not None and claim in (None, digest)


def _sides(judgement: Judgement, assignment: Assignment) -> tuple[str, str | None, str | None]:
    """Name the server of what a judgement is about, the holder of the other copy, and the party that recomputed it."""
    verdict, stage = judgement.verdict, judgement.verdict.stage
    holder = assignment.holders.get(stage, OWNER)
    if verdict.offence == "collusion":
        # an accomplice is named after the culprit, and has inherited the culprit's stage by then
        return holder, verdict.party, verdict.party
    other = assignment.shadows.get(stage)
    return (
        holder,
        other,
        next((name for name in (verdict.party, verdict.accuser) if name not in (holder, OWNER)), other),
    )


def _is_stage(name: str) -> bool:
    """Whether a peer's text can be a stage's number; thousands of digits would stop their reader."""
    return name.isdecimal() and len(name) < 6
