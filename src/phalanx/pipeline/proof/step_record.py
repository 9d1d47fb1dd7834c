"""The record that proves an applied step: commitments, draws, signed audits, agreed states and decision, as leaves."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AuditLogError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.pipeline.verify.facts import StepFacts, StepLedger
from phalanx.planner.schedules import Direction

Stage = Annotated[int, Field(ge=0)]


class AttemptLeaf(StrictModel):
    """The attempt that was applied.

    Attributes:
        session: Name of the session, which every signed header has.
        epoch: The attempt's epoch, which the draws depend on.
        stages: Holder and shadow of each stage, by its number.
        classes: Numeric class of each party that is not of the owner's, as a number from 1: the bits of two classes
            cannot be compared.
        clip: Clip coefficient of every gradient.
    """

    leaf: Literal["attempt"] = "attempt"
    session: str
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    stages: dict[str, tuple[str, str | None]]
    classes: dict[str, int]
    clip: float


class CommitLeaf(StrictModel):
    """A commitment: digest of the signed header, None where the owner committed to itself."""

    leaf: Literal["commit"] = "commit"
    stage: Stage
    party: str
    header: str | None
    gradient: str
    norm_squared: float | None


class StateLeaf(StrictModel):
    """The state of a stage at the beginning of the step, as holder and shadow agreed on it."""

    leaf: Literal["state"] = "state"
    stage: Stage
    weights: str
    moments: str


class DrawLeaf(StrictModel):
    """A draw: the work that one auditor was asked to recompute; `whole`: the weight gradient as well."""

    leaf: Literal["draw"] = "draw"
    stage: Stage
    auditor: str
    microbatches: tuple[Stage, ...]
    whole: bool


class OwnerAuditLeaf(StrictModel):
    """The owner redid all of a stage's step."""

    leaf: Literal["owner_audit"] = "owner_audit"
    stage: Stage


class AuditLeaf(StrictModel):
    """One recomputed microbatch.

    Attributes:
        auditor: The party that recomputed it.
        report: The header that the auditor signed; None where it was the owner.
        digests: The owner's digests by direction; None where `report` has them.
        outputs: Headers under which the stage sent its activation and its gradient; None where it sent none.
    """

    leaf: Literal["audit"] = "audit"
    stage: Stage
    microbatch: Stage
    auditor: str
    report: PassedOnHeader | None
    digests: dict[Direction, str] | None
    outputs: tuple[PassedOnHeader | None, PassedOnHeader | None]


class StepAuditLeaf(StrictModel):
    """One recomputed weight gradient, beside the commitment that it was compared with; else as `AuditLeaf`."""

    leaf: Literal["step_audit"] = "step_audit"
    stage: Stage
    auditor: str
    report: PassedOnHeader | None
    gradient: str | None
    norm_squared: float | None
    commit: PassedOnHeader | None


Leaf = AttemptLeaf | CommitLeaf | StateLeaf | DrawLeaf | OwnerAuditLeaf | AuditLeaf | StepAuditLeaf

_LEAF: TypeAdapter[Leaf] = TypeAdapter(Annotated[Leaf, Field(discriminator="leaf")])


def write_leaf(leaf: Leaf) -> bytes:
    """Encode one leaf."""
    return canonical_json(leaf.model_dump(mode="json"))


def read_leaves(leaves: Sequence[bytes]) -> list[Leaf]:
    """Read the leaves of one step."""
    try:
        return [_LEAF.validate_json(leaf) for leaf in leaves]
    except ValidationError as exc:
        first = exc.errors(include_input=False)[0]
        raise AuditLogError(f"a leaf is malformed: {'.'.join(map(str, first['loc']))}: {first['msg']}") from exc


_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class StepRecord:
    """One applied step with all its audits in.

    Attributes:
        leaves: Canonical JSON objects; `docs/audit_log.md` has their fields.
    """

    step: int
    epoch: int
    leaves: tuple[bytes, ...]


@dataclass(frozen=True)
class _PendingStep:
    ledger: StepLedger
    assignment: Assignment
    classes: dict[str, int]


class StepRecords:
    """The records of applied steps: leaves are gathered, and handed on as soon as a step's audits are in.

    Args:
        session: Name of the session, which every signed header has.
        note: Takes the records; None where they are not kept, and then nothing is gathered.
    """

    def __init__(
        self,
        facts: StepFacts,
        session: str,
        note: Callable[[StepRecord], None] | None,
    ) -> None:
        self._facts = facts
        self._session = session
        self._note = note
        self._pending: deque[_PendingStep] = deque()

    def note_applied(self) -> None:
        """The decision about the present step is on its way to the optimizers."""
        facts = self._facts
        if self._note is None or not facts.plan.guard.is_enabled:
            return
        self._pending.append(_PendingStep(facts.ledger, facts.assignment, self._number_classes()))
        self.release_complete()

    def release_complete(self) -> None:
        """Hand on the steps with all their audits in."""
        while self._note is not None and self._pending and self._pending[0].ledger.is_audited:
            past = self._pending.popleft()
            leaves = tuple(write_leaf(leaf) for leaf in self._step_leaves(past))
            self._note(StepRecord(past.ledger.step, past.ledger.epoch, leaves))

    def forget_pending(self) -> None:
        """Forget the steps that are undone, since their audits are not in."""
        self.release_complete()
        self._pending.clear()

    def _number_classes(self) -> dict[str, int]:
        """Numeric classes of the present parties, as numbers; a party with the owner's bits is not listed."""
        facts, by_party = self._facts, dict[str, int]()
        numbers = {facts.classes.get(OWNER, ""): 0}
        for party in sorted(facts.present_parties):
            number = numbers.setdefault(facts.classes.get(party, ""), len(numbers))
            by_party |= {party: number} if number else {}
        return by_party

    def _step_leaves(self, past: _PendingStep) -> Iterator[Leaf]:
        ledger, assignment = past.ledger, past.assignment
        yield AttemptLeaf(
            session=self._session,
            step=ledger.step,
            epoch=ledger.epoch,
            stages={str(s): (holder, assignment.shadows.get(s)) for s, holder in assignment.holders.items()},
            classes=past.classes,
            clip=ledger.clip_coefficient,
        )
        for stage, commit in sorted(ledger.commits.items()):
            header = ledger.commit_headers[stage]
            yield CommitLeaf(
                stage=stage,
                party=assignment.holders[stage],
                header=None if header is None else header.header_digest,
                gradient=commit.gradient,
                norm_squared=commit.norm_squared,
            )
        for stage, state in sorted(ledger.agreed.items()):
            yield StateLeaf(stage=stage, weights=state.weights, moments=state.moments)
        drawn: dict[tuple[int, str], list[int]] = {}
        for stage, microbatch, auditor in sorted(ledger.awaited_audits):
            drawn.setdefault((stage, auditor), []).append(microbatch)
        for (stage, auditor), microbatches in drawn.items():
            is_whole = (stage, auditor) in ledger.awaited_step_audits
            yield DrawLeaf(stage=stage, auditor=auditor, microbatches=tuple(microbatches), whole=is_whole)
        for stage in sorted(ledger.owner_audited):
            yield OwnerAuditLeaf(stage=stage)
        yield from self._audit_leaves(ledger)

    def _audit_leaves(self, ledger: StepLedger) -> Iterator[Leaf]:
        record = self._facts.record
        for (stage, microbatch, auditor), report in sorted(ledger.reports.items(), key=lambda item: item[0]):
            report_header = record.header_of(auditor, report)
            sent = [ledger.messages.get((stage, way, microbatch)) for way in _DIRECTIONS]
            # the owner sends itself nothing under a header
            forward, backward = (None if message is None else message.header for message in sent)
            yield AuditLeaf(
                stage=stage,
                microbatch=microbatch,
                auditor=auditor,
                report=report_header,
                digests=report.digests if report_header is None else None,
                outputs=(forward, backward),
            )
        for (stage, auditor), audited in sorted(ledger.step_audits.items()):
            report_header = record.header_of(auditor, audited)
            yield StepAuditLeaf(
                stage=stage,
                auditor=auditor,
                report=report_header,
                gradient=audited.gradient if report_header is None else None,
                norm_squared=audited.norm_squared if report_header is None else None,
                commit=ledger.commit_header(stage),
            )


Check = Literal["messages", "whole_step", "owner", "state"]
CHECKS: dict[Check, str] = {
    "messages": "the other copy of the stage recomputed the drawn messages",
    "whole_step": "the other copy of the stage recomputed all messages and the weight gradient",
    "owner": "the owner recomputed all of these and the update",
    "state": "both copies agreed on the weights and the optimizer state at the start of the step",
}
"""Every kind of check, with what it is."""


@dataclass(frozen=True)
class StageChecks:
    """The checks of one worker's stage in one step.

    Attributes:
        party: The party that served the stage.
        rests_on: The parties on which it rests that all of its work was recomputed, update included. Empty where the
            owner did so itself, None where no party did.
    """

    made: frozenset[Check]
    party: str
    rests_on: frozenset[str] | None


NoteChecks = Callable[[int, Mapping[int, StageChecks]], None]
"""Told of every step that is applied, those included that are done again, with its stages at workers."""


def step_checks(facts: StepFacts) -> dict[int, StageChecks]:
    """Return the checks by stage; audits that lag count as made, for their step is undone if one fails."""
    return {
        stage: StageChecks(_checks_made(facts, stage), holder, _rests_on(facts, stage))
        for stage, holder in sorted(facts.assignment.holders.items())
        if holder != OWNER
    }


def _checks_made(facts: StepFacts, stage: int) -> frozenset[Check]:
    ledger = facts.ledger
    if stage not in facts.watched_stages:
        return frozenset()
    shadow, guard = facts.shadow_of(stage), facts.plan.guard
    checks: dict[Check, bool] = {
        "messages": any((audited, auditor) == (stage, shadow) for audited, _, auditor in ledger.awaited_audits),
        "whole_step": guard.shadow_upkeep.in_lockstep or (stage, shadow) in ledger.awaited_step_audits,
        "owner": stage in ledger.owner_audited,
        # two parties of one class must have signed the same state for the step to be applied
        "state": facts.same_class(facts.holder_of(stage), shadow),
    }
    return frozenset(check for check, is_made in checks.items() if is_made)


def _rests_on(facts: StepFacts, stage: int) -> frozenset[str] | None:
    made = _checks_made(facts, stage)
    if "owner" in made:
        return frozenset()
    # the update is the other copy's to check, and where it is not compared the owner alone can
    return frozenset({facts.shadow_of(stage)} - {OWNER}) if made >= {"whole_step", "state"} else None
