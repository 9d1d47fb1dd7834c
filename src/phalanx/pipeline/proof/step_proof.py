"""A check, from the audit log and its leaves alone, that an applied step was audited as its draws demand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phalanx.errors import AuditLogError, CertificateError, FrameError, PeerRefusedError, SignatureError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER, GuardConfig
from phalanx.pipeline.proof.step_record import (
    AttemptLeaf,
    AuditLeaf,
    CommitLeaf,
    DrawLeaf,
    Leaf,
    OwnerAuditLeaf,
    StateLeaf,
    StepAuditLeaf,
)
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import Activation, AuditReport, Commit, PassedOnHeader, StepAudited
from phalanx.pipeline.protocol.signed import Statement, StatementReader
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.security.crypto import Peer, certified_name

_DIRECTIONS = ("forward", "backward")
_Kind = TypeVar("_Kind", bound=Leaf)
_Said = TypeVar("_Said", bound=Message)


@dataclass(frozen=True)
class SessionRules:
    """The rules that the first line of a session sets for every step of it.

    Attributes:
        run: Name of the run; every session's name begins with it.
        guard: How steps are audited; with `classes` "one" no party may be of another numeric class than the owner.
        peers: Keys of the parties, by the name in their certificates.
        draw: Draws with the revealed key; None while it is secret.
    """

    run: str
    num_stages: int
    microbatches: int
    guard: GuardConfig
    peers: Mapping[str, Peer]
    draw: AuditDraw | None


@dataclass(frozen=True)
class ShownWork:
    """The recomputed work that the leaves of one step show.

    Attributes:
        signed: Recomputed microbatches with digests that both the stage and its auditor signed.
        owners: Microbatches and stages that the owner recomputed, by its own word.
        unlike: Recomputed microbatches of two numeric classes, with unequal digests; the distance is the owner's word.
        session: Name of the session that everything was signed for.
    """

    signed: int = 0
    owners: int = 0
    unlike: int = 0
    session: str = ""


@dataclass(frozen=True)
class _RequiredAudit:
    """The microbatches and steps that one auditor of one stage must have recomputed."""

    stage: int
    auditor: str
    microbatches: tuple[int, ...]
    whole: bool


def check_step(step: int, epoch: int, leaves: Sequence[Leaf], rules: SessionRules) -> ShownWork:
    """Check the leaves of one step.

    Args:
        step: Number in the audit log.
        leaves: Those under the step's root.

    Returns:
        What was recomputed. Where `rules` cannot draw, that every audit that is named was done, and no more.

    Raises:
        AuditLogError: Something was drawn and not recomputed, or a signature or digest does not hold.

    Guarantees:
        A microbatch, a whole step or a stage that the key draws and no party recomputed is found. Statements of auditor
        and stage are under their own signatures. The owner's own recomputations are its word.
    """
    return _StepJudge(step, epoch, leaves, rules).judge_step()


class _StepJudge:
    def __init__(self, step: int, epoch: int, leaves: Sequence[Leaf], rules: SessionRules) -> None:
        self._leaves, self._rules = leaves, rules
        attempts = self._leaves_of(AttemptLeaf)
        if len(attempts) != 1 or (attempts[0].step, attempts[0].epoch) != (step, epoch):
            raise AuditLogError("its leaves belong to another attempt")
        self._attempt = attempts[0]
        if not self._attempt.session.startswith(f"{rules.run}-"):
            raise AuditLogError("its leaves belong to another run")
        if self._attempt.classes and rules.guard.classes == "one":
            raise AuditLogError(f"{min(self._attempt.classes)} has another numeric class, but the run has only one")
        self._assignment = _read_assignment(self._attempt)
        self._statements = StatementReader(self._attempt.session, self._find_peer)
        self._audits = {(leaf.stage, leaf.microbatch, leaf.auditor): leaf for leaf in self._leaves_of(AuditLeaf)}
        self._step_audits = {(leaf.stage, leaf.auditor): leaf for leaf in self._leaves_of(StepAuditLeaf)}

    def judge_step(self) -> ShownWork:
        self._check_stages()
        self._check_done(
            _RequiredAudit(leaf.stage, leaf.auditor, leaf.microbatches, leaf.whole)
            for leaf in self._leaves_of(DrawLeaf)
        )
        if self._rules.draw is not None and self._rules.guard.is_enabled:
            self._check_drawn(self._rules.draw)
        signed = owners = unlike = 0
        for leaf in self._audits.values():
            digests = self._reported_digests(leaf)
            equal = digests == self._sent_digests(leaf, digests)
            if not equal and self._bits_decide(leaf.auditor, self._assignment.holders[leaf.stage]):
                raise AuditLogError(
                    f"{_describe_leaf(leaf)}: {leaf.auditor} got another digest than was sent, but no verdict follows"
                )
            unlike += not equal
            owners += equal and leaf.report is None
            signed += equal and leaf.report is not None
        for step_audit in self._step_audits.values():
            self._check_whole(step_audit)
        return ShownWork(signed, owners + len(self._leaves_of(OwnerAuditLeaf)), unlike, self._attempt.session)

    def _leaves_of(self, kind: type[_Kind]) -> list[_Kind]:
        return [leaf for leaf in self._leaves if isinstance(leaf, kind)]

    def _check_stages(self) -> None:
        """Check that every worker's stage has a shadow, commitments and an agreed state."""
        assignment, rules = self._assignment, self._rules
        if set(assignment.holders) != set(range(rules.num_stages)):
            raise AuditLogError(f"has stages {sorted(assignment.holders)}, but the run has {rules.num_stages}")
        commits = {leaf.stage: leaf.party for leaf in self._leaves_of(CommitLeaf)}
        states = {leaf.stage for leaf in self._leaves_of(StateLeaf)}
        for stage, holder in assignment.holders.items():
            if holder != OWNER and (stage not in assignment.shadows or stage not in states):
                raise AuditLogError(f"stage {stage}: is held by {holder}, without a shadow or an agreed state")
        missing = [stage for stage, holder in assignment.holders.items() if commits.get(stage) != holder]
        if missing:
            raise AuditLogError(f"stage {missing[0]}: no party committed to its work")

    def _check_drawn(self, draw: AuditDraw) -> None:
        """Draw again: everything drawn must have been asked for, and done."""
        demands = [demand for stage in self._watched_stages for demand in self._required_audits(draw, stage)]
        asked = {(leaf.stage, m, leaf.auditor) for leaf in self._leaves_of(DrawLeaf) for m in leaf.microbatches}
        for demand in demands:
            changed = [m for m in demand.microbatches if (demand.stage, m, demand.auditor) not in asked]
            if changed:
                raise AuditLogError(
                    f"stage {demand.stage}, microbatch {changed[0]}: is drawn for {demand.auditor} by the revealed "
                    "key, but the log has another draw"
                )
        self._check_done(demands)
        owned = {leaf.stage for leaf in self._leaves_of(OwnerAuditLeaf)}
        for stage in sorted(set(self._watched_stages) - owned):
            if draw.draws_owner_audit(step=self._attempt.step, epoch=self._attempt.epoch, stage=stage):
                raise AuditLogError(f"stage {stage}: was drawn for the owner's audit, which is missing")

    def _check_done(self, demands: Iterator[_RequiredAudit] | Sequence[_RequiredAudit]) -> None:
        for demand in demands:
            stage = demand.stage
            missing = [m for m in demand.microbatches if (stage, m, demand.auditor) not in self._audits]
            if missing:
                raise AuditLogError(
                    f"stage {stage}, microbatch {missing[0]}: was drawn for {demand.auditor}, but its report is missing"
                )
            if demand.whole and (stage, demand.auditor) not in self._step_audits:
                raise AuditLogError(
                    f"stage {stage}: its weight gradient was drawn, but the report of {demand.auditor} is missing"
                )

    @property
    def _watched_stages(self) -> list[int]:
        return sorted(self._assignment.shadows)

    def _required_audits(self, draw: AuditDraw, stage: int) -> Iterator[_RequiredAudit]:
        """Yield the audits that the key demands of one stage, by the rules of `AuditRequests`, from the log."""
        assignment, num_microbatches = self._assignment, self._rules.microbatches
        if assignment.holders[stage] == OWNER:
            return
        place = {"step": self._attempt.step, "epoch": self._attempt.epoch, "stage": stage}
        everything = tuple(range(num_microbatches))
        lockstep = self._rules.guard.shadow_upkeep.in_lockstep
        is_whole = not lockstep and draw.draws_whole_step(**place)
        drawn = (
            everything if lockstep or is_whole else draw.draw_microbatches(**place, num_microbatches=num_microbatches)
        )
        yield _RequiredAudit(stage, assignment.shadows[stage], drawn, is_whole)

    def _bits_decide(self, one: str, other: str) -> bool:
        """As `StepFacts.bits_decide`: where several classes are let in, parties are compared within tau."""
        numbers = self._attempt.classes
        return self._rules.guard.classes != "mixed" and numbers.get(one, 0) == numbers.get(other, 0)

    def _reported_digests(self, leaf: AuditLeaf) -> Mapping[str, str]:
        """The digests that an auditor got."""
        if leaf.report is None:
            if leaf.auditor != OWNER or leaf.digests is None:
                raise AuditLogError(f"{_describe_leaf(leaf)}: the report of {leaf.auditor} is not signed")
            return {str(direction): digest for direction, digest in leaf.digests.items()}
        place = {"stage": leaf.stage, "microbatch": leaf.microbatch}
        digests = self._open_statement(
            leaf.report, leaf.auditor, AuditReport, place, _describe_leaf(leaf)
        ).message.digests
        if set(digests) != set(_DIRECTIONS):
            raise AuditLogError(f"{_describe_leaf(leaf)}: the report of {leaf.auditor} lacks a direction")
        return {str(direction): digest for direction, digest in digests.items()}

    def _sent_digests(self, leaf: AuditLeaf, digests: Mapping[str, str]) -> Mapping[str, str]:
        """Return the digests that the stage signed; for the owner's own messages, the reported ones."""
        holder, opened = self._assignment.holders[leaf.stage], dict(digests)
        for direction, signed in zip(_DIRECTIONS, leaf.outputs, strict=True):
            if signed is not None:
                place = {"source": leaf.stage, "microbatch": leaf.microbatch, "direction": direction}
                opened[direction] = self._open_statement(
                    signed, holder, Activation, place, _describe_leaf(leaf)
                ).payload_digest
            elif holder != OWNER:
                raise AuditLogError(f"{_describe_leaf(leaf)}: the {direction} message that was audited is missing")
        return opened

    def _check_whole(self, leaf: StepAuditLeaf) -> None:
        description, place = f"stage {leaf.stage}", {"stage": leaf.stage}
        holder = self._assignment.holders[leaf.stage]
        if leaf.commit is None or (leaf.report is None and leaf.auditor != OWNER):
            raise AuditLogError(f"{description}: the weight gradient or its audit by {leaf.auditor} is not signed")
        committed = self._open_statement(leaf.commit, holder, Commit, place, description).message
        got = (leaf.gradient, leaf.norm_squared)
        if leaf.report is not None:
            audited = self._open_statement(leaf.report, leaf.auditor, StepAudited, place, description).message
            got = (audited.gradient, audited.norm_squared)
        if got != (committed.gradient, committed.norm_squared) and self._bits_decide(leaf.auditor, holder):
            raise AuditLogError(f"{description}: {leaf.auditor} got another weight gradient, but no verdict follows")

    def _open_statement(
        self, signed: PassedOnHeader, party: str, kind: type[_Said], place: Mapping[str, object], where: str
    ) -> Statement[_Said]:
        """Open a statement of a party, if it is of this session, step and attempt and about this place."""
        attempt = self._attempt
        try:
            full_place = {**place, "step": attempt.step}
            return self._statements.open_statement(signed, kind, attempt.epoch, full_place, lambda _: (party, None))
        except SignatureError as exc:
            raise AuditLogError(f"{where}: {party} did not sign this {kind.kind!r}") from exc
        except FrameError as exc:
            raise AuditLogError(
                f"{where}: {party} signed this {kind.kind!r} for another place or session ({exc})"
            ) from exc

    def _find_peer(self, name: str) -> Peer:
        try:
            return self._rules.peers[certified_name(name)].with_session_name(name)
        except (KeyError, CertificateError) as exc:
            raise PeerRefusedError(f"{name!r} has no certificate in this log") from exc


def _read_assignment(attempt: AttemptLeaf) -> Assignment:
    try:
        holders = {int(stage): holder for stage, (holder, _) in attempt.stages.items()}
        shadows = {int(stage): shadow for stage, (_, shadow) in attempt.stages.items() if shadow is not None}
    except ValueError as exc:
        raise AuditLogError("a leaf is malformed: stages") from exc
    return Assignment(dict(sorted(holders.items())), shadows)


def _describe_leaf(leaf: AuditLeaf) -> str:
    return f"stage {leaf.stage}, microbatch {leaf.microbatch}"
